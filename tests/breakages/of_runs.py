"""Small mistakes in planning, training, evaluation, sampling and extras; `make mutations` tries them."""
from code_changes import Change, Mutation

MUTATIONS: dict[str, Mutation] = {
    # --- planning
    "a plan with two control images counts one": Mutation(
        "tests/planning/test_plan.py::test_each_control_image_of_a_pair_counts", [
        Change("planning/cards", "plan", 'controls * areas["control_area"]',
               'areas["control_area"]')]),
    "host memory of one process for two": Mutation(
        "tests/planning/test_plan.py::test_each_process_pins_host_memory_of_its_own", [
        Change("planning/cards", "GpuPlan.fits", "m.host * q.processes", "m.host")]),
    "the time of a batch as that of a sample": Mutation(
        "tests/planning/test_plan.py::test_a_batch_takes_its_time_once_for_all_its_samples", [
        Change("planning/cards", "run_seconds", "each * samples / q.batch", "each * samples")]),
    "block swap takes no time": Mutation(
        "tests/planning/test_plan.py::test_block_swap_takes_time", [
        Change("planning/step_work", "step_seconds",
               "products * math.prod(way.slowdown for way in used_by(q)) + moved",
               "products + moved")]),
    "block swap preferred to smaller weights": Mutation("tests/planning/test_plan.py", [
        Change("planning/cards", "rank_cost",
               "math.prod((way.slowdown for way in used_by(q)), start=weights)", "weights")]),
    "two GPUs take twice the hours of one": Mutation("tests/planning/test_plan.py", [
        Change("planning/step_work", "speedup", "0.92 * processes", "0.92 / processes")]),
    "the mean of the adapter missing from checkpoints": Mutation(
        "tests/planning/test_disk_space.py::test_a_checkpoint_has_the_mean_of_the_adapter_too", [
        Change("planning/disk_space", "checkpoint_bytes", "(1 + q.ema) * _adapter_bytes(q)",
               "_adapter_bytes(q)")]),
    "init plans all steps for each GPU": Mutation(
        "tests/planning/test_first_run.py::test_thirty_pairs_are_the_same_run_everywhere", [
        Change("planning/first_config", "file_text", "first_run(pairs, count)",
               "first_run(pairs)")]),
    "init takes one of several data sets": Mutation("tests/planning/test_first_config.py", [
        Change("planning/first_config", "find_pairs", "len(found) == 1", "found")]),
    "a run is cut off by the end of its session": Mutation("tests/planning/test_machines.py", [
        Change("planning/decisions", "choose_hours", "machine.hours - MARGIN", "machine.hours")]),
    "a resumed run holds out other pairs": Mutation(
        "tests/planning/test_first_run.py::"
        "test_a_resumed_run_keeps_what_its_checkpoint_held_out", [
        Change("planning/decisions", "choose_held_out", "before is not None", "False")]),
    "compiling switched off in long runs, not in short ones": Mutation(
        "tests/planning/test_machines.py", [
        Change("planning/decisions", "_compile_does_not_pay", "steps < ENOUGH_STEPS",
               "steps > ENOUGH_STEPS")]),
    "the doctor looks at the first eight pairs": Mutation(
        "tests/planning/test_doctor.py::test_alignment_is_judged_by_pairs_of_the_whole_data_set", [
        Change("planning/doctor", "alignment_findings", "sampled_alignment(samples)",
               "sampled_alignment(samples[:8])")]),
    "what fits only with other settings is called fitting": Mutation(
        "tests/planning/test_doctor.py", [
        Change("planning/doctor", "plan_findings", "p.fits(p.asked)",
               "p.fits(p.asked) or p.chosen")]),
    "host memory named by the wrong setting": Mutation("tests/planning/test_doctor.py", [
        Change("planning/doctor", "memory_findings", '"`train.blocks_to_swap`"',
               '"`train.offload_activations`"')]),
    "two processes may pin all host memory": Mutation(
        "tests/planning/test_machines.py::"
        "test_two_processes_that_were_asked_for_must_fit_the_host_together", [
        Change("planning/plan", "fits_machine", "memory.host * n", "memory.host")]),
    "after out of memory the first change is forgotten": Mutation(
        "tests/planning/test_machines.py", [
        Change("planning/plan", "smaller", "facts = changed(facts, change)", "pass")]),
    # --- extras: what is judged
    "a control test judges by the mean alone": Mutation(
        "tests/extras/test_swaps.py::test_what_is_uncertain_is_no_use_of_the_control_images", [
        Change("extras/diagnostics", "ControlTest.verdict", "self.difference.low > 0",
               "self.difference.mean > 0")]),
    "right although both directions fit": Mutation(
        "tests/extras/test_swaps.py::test_two_directions_that_fit_cannot_be_told_apart", [
        Change("extras/diagnostics", "SwapTest.verdict", "fits and not reverse and self.difference.low > 0",
               "fits and self.difference.low > 0")]),
    "an overfit check with dropped captions": Mutation(
        "tests/extras/test_overfit.py::test_what_is_judged_has_its_captions_and_no_edit_mask", [
        Change("extras/diagnostics", "_Measure.prepare", "caption_dropout_rate=0.,", "")]),
    # --- extras: ComfyUI
    "control images of 2511 at the time of the target": Mutation(
        "tests/extras/test_comfyui_workflow.py", [
        Change("extras/comfyui_workflow", "unused_nodes", "not f.model.controls_at_zero",
               "f.model.controls_at_zero")]),
    "width and height of the result exchanged": Mutation("tests/extras/test_comfyui_workflow.py", [
        Change("extras/comfyui_workflow", "values",
               '"empty.width": width, "empty.height": height',
               '"empty.width": height, "empty.height": width')]),
    "width and height for the text encoder exchanged": Mutation(
        "tests/extras/test_comfyui_workflow.py", [
        Change("extras/comfyui_workflow", "values", "seen_width, seen_height = vl_expressions",
               "seen_height, seen_width = vl_expressions")]),
    "ComfyUI scales after guidance": Mutation("tests/extras/test_comfyui_workflow.py", [
        Change("extras/comfyui_workflow", "template", "return json.loads(file.read_text(encoding='utf-8'))",
               "return json.loads(file.read_text(encoding='utf-8')"
               ".replace('\"pre_cfg\": true', '\"pre_cfg\": false'))")]),
    "ComfyUI with another scheduler": Mutation("tests/extras/test_comfyui_workflow.py", [
        Change("extras/comfyui_workflow", "template", "return json.loads(file.read_text(encoding='utf-8'))",
               "return json.loads(file.read_text(encoding='utf-8')"
               ".replace('\"simple\"', '\"normal\"'))")]),
    # --- extras: other rooms
    "a result of something else is a pair": Mutation("tests/extras/test_backward_pairs.py", [
        Change("extras/backward_pairs", "judge", "same < LEAST_LIKENESS", "same < 0")]),
    "pairs have the instruction that undoes": Mutation("tests/extras/test_backward_pairs.py", [
        Change("extras/backward_pairs", "_make",
               'f"{instruction.strip()}\\n"', 'f"{undo.strip()}\\n"')]),
    "captions of the user are replaced": Mutation("tests/extras/test_instructions.py", [
        Change("extras/instructions", "write_instructions", "[p for p in pairs if not p.was]",
               "list(pairs)")]),
    "the image after is named before": Mutation("tests/extras/test_instructions.py", [
        Change("extras/instructions", "chat", '[*names, "After"]', '["After", *names]')]),
    "an edited caption is undone": Mutation("tests/extras/test_instructions.py", [
        Change("extras/instructions", "undo_instructions",
               "not still_holds(file, line.text)", "False")]),
    "folders of the user are published": Mutation("tests/extras/test_kaggle_upload.py", [
        Change("extras/kaggle_upload", "without_paths", "None if changed == values else", "None and")]),
    "a folder's private name is published": Mutation("tests/extras/test_kaggle_upload.py", [
        Change("extras/kaggle_upload", "published_model", "if is_hub_id(name)", "if name")]),
    "a copy with a missing component is sent": Mutation("tests/extras/test_kaggle_upload.py", [
        Change("extras/kaggle_upload", "component_files", 'origin.get("kind") != quantization',
               "False")]),
    "more workers than GPUs": Mutation("tests/extras/test_ray_cluster.py", [
        Change("extras/ray_cluster", "share_machines", "workers is None or gpus and workers > fit",
               "workers is None")]),
    "a machine with other encoders fills the cache": Mutation("tests/extras/test_ray_cluster.py", [
        Change("extras/ray_cluster", "Worker.setup",
               "identity_id(mine) != identity_id(wanted)", "False")]),
    "a selfcheck with other shapes passes": Mutation("tests/extras/test_selfcheck.py", [
        Change("extras/selfcheck", "SelfCheck.is_close",
               'row["relative"] <= self.facts["tolerance"]',
               'not row["relative"] > self.facts["tolerance"]')]),
    "the last block that is not finite is named": Mutation("tests/extras/test_selfcheck.py", [
        Change("extras/selfcheck", "FiniteCheck.facts",
               "(row.block for row in rows if not np.isfinite(row.value))",
               "(row.block for row in rows[::-1] if not np.isfinite(row.value))")]),
    "a Space with the card's base model, not the user's": Mutation("tests/extras/test_space.py", [
        Change("extras/space", "space_facts", 'base_model or header.get("base_model")',
               'header.get("base_model") or base_model')]),
    "a Space with the published sizes, not the trained ones": Mutation(
        "tests/extras/test_space.py", [
        Change("extras/space", "space_facts", 'info.get("control_area") or variant.control_area',
               "variant.control_area")]),
    "files of others are replaced by a Space": Mutation("tests/extras/test_space.py", [
        Change("extras/space", "check_own", "file.exists() and MARK not in", "False and MARK not in")]),
    # --- edits
    "a user's change of the scheduler loses to the schedule": Mutation(
        "tests/test_predict.py::test_a_change_of_the_scheduler_wins_over_the_schedule", [
        Change("predict", "Predictor._sampling",
               "{**own, **(overrides or {})}", "{**(overrides or {}), **own}")]),
    "predict without the mean of the adapter": Mutation(
        "tests/test_predict.py::test_an_edit_uses_the_mean_of_the_adapter_if_there_is_one", [
        Change("predict", "Predictor._saved_weights", "return self.adapters.ema_weights()",
               "return nullcontext()")]),
    # --- trainer and its parts
    "the last good checkpoint is pruned after skipped steps": Mutation(
        "tests/test_trainer.py::test_the_last_good_checkpoint_is_kept_while_steps_are_skipped", [
        Change("trainer", "QwenImageEditTrainer.prune_checkpoints",
               "self.finite is None or not self.finite.row", "True")]),
    "a quantization taken back on the trainer stays planned": Mutation("tests/test_trainer.py", [
        Change("training/attributes", "RunAttributes.quantize",
               'self.components.quantize["transformer"] or "none"',
               'self.components.quantize["transformer"]')]),
    "a cache folder set on the trainer is ignored": Mutation(
        "tests/test_trainer.py::"
        "test_a_cache_folder_that_is_set_on_the_trainer_is_its_caches", [
        Change("training/attributes", "RunAttributes.cache_dir", "self.data.cache_dir = value", "pass")]),
    "the hours of earlier sessions are forgotten": Mutation(
        "tests/training/test_stopping.py::"
        "test_a_resume_brings_back_every_fact_of_the_run_and_takes_the_optimizers_new_settings", [
        Change("training/callbacks", "RunState.restore", 'was.get("seconds", 0.)', "0.")]),
    "every step of a due epoch is evaluated": Mutation(
        "tests/evaluation/test_evaluate.py::"
        "test_evaluations_are_due_at_steps_epochs_and_the_end", [
        Change("training/callbacks", "due", "state.epoch_ended and bool(epochs)", "bool(epochs)")]),
    "adafactor scales the configured rate": Mutation("tests/training/test_optimizer.py", [
        Change("training/optimizers/adafactor", "Adafactor.make", "scale_parameter=False",
               "scale_parameter=True")]),
    "adafactor planned with a number for each weight": Mutation(
        "tests/planning/test_training_memory.py::test_adapter_gradient_and_optimizer_bytes", [
        Change("training/optimizers/adafactor", "Adafactor.state_bytes",
               "sum(shape)", "len(shape) * math.prod(shape)")]),
    "adamw with torch's own betas": Mutation(
        "tests/training/test_optimizer.py::test_each_setting_reaches_the_optimizer", [
        Change("training/optimizers/adamw", "AdamW.make", "**moments(settings), fused=True",
               "lr=settings.lr, fused=True")]),
    "adamw planned with one moment": Mutation(
        "tests/planning/test_training_memory.py::test_adapter_gradient_and_optimizer_bytes", [
        Change("training/optimizers/adamw", "AdamW.state_bytes", "8 * math.prod(shape)",
               "4 * math.prod(shape)")]),
    "adamw8bit with its own settings": Mutation(
        "tests/training/test_optimizer.py::test_each_setting_reaches_the_optimizer", [
        Change("training/optimizers/adamw8bit", "AdamW8bit.make", "**moments(settings)",
               "lr=settings.lr")]),
    "small tensors planned in eight bits": Mutation(
        "tests/planning/test_training_memory.py::test_adapter_gradient_and_optimizer_bytes", [
        Change("training/optimizers/adamw8bit", "AdamW8bit.state_bytes", "n >= 4096", "n >= 1")]),
    "an optimizer that cannot run is found in the first step": Mutation(
        "tests/training/test_optimizer.py::test_unavailable_optimizers_are_refused", [
        Change("training/optimizers/known", "check_optimizer",
               "OPTIMIZERS[settings.name].check(settings, device)", "pass")]),
    "adamw whatever is configured": Mutation(
        "tests/training/test_optimizer.py::test_each_setting_reaches_the_optimizer", [
        Change("training/optimizers/known", "make_optimizer",
               "OPTIMIZERS[settings.name].make(params, settings)",
               'OPTIMIZERS["adamw"].make(params, settings)')]),
    "prodigy with the rate of another optimizer": Mutation(
        "tests/training/test_optimizer.py::test_prodigy_refuses_the_rate_of_another_optimizer", [
        Change("training/optimizers/prodigy", "Prodigy.check", "0.1 <= settings.lr <= 10",
               "settings.lr <= 10")]),
    "prodigy planned without the start": Mutation(
        "tests/planning/test_training_memory.py::test_adapter_gradient_and_optimizer_bytes", [
        Change("training/optimizers/prodigy", "Prodigy.state_bytes", "12 if zero else 16", "12")]),
    "steps that are asked for lose to the schedule": Mutation("tests/lora/test_mixing.py", [
        Change("training/run_adapters", "RunAdapters.sampling",
               "s.steps if steps is None else steps", "s.steps")]),
    "edits at other sizes than the adapter's": Mutation(
        "tests/test_predict.py::test_an_edit_has_the_sizes_that_its_adapter_was_trained_at", [
        Change("training/run_adapters", "RunAdapters.geometry", "self.components.areas | own",
               "self.components.areas")]),
    "a stop between two messages is lost": Mutation(
        "tests/training/test_run_processes.py::test_a_stop_between_two_messages_is_passed_on", [
        Change("training/run_processes", "take_state", 'if m["stop"]: s.stop = m["stop"]',
               's.stop = m["stop"]')]),
    "a stop is sent again and again": Mutation(
        "tests/training/test_run_processes.py::test_a_stop_between_two_messages_is_passed_on", [
        Change("training/run_processes", "Watched.pass_on", 'not in ("", "done", self.asked)',
               'not in ("", "done")')]),
    "skipped samples count as cached": Mutation(
        "tests/training/test_run_processes.py::test_the_reports_of_processes_are_added_up", [
        Change("training/run_processes", "sum_reports",
               'samples - encoded - len(skipped)', 'samples - encoded')]),
    "control images without rows of the table": Mutation("tests/models/test_modulation.py", [
        Change("training/run_table", "RunTable._training_sets",
               "control | {training_times(dtype): label}", "{training_times(dtype): label}")]),
    "a table although its layers are trained": Mutation("tests/models/test_modulation.py", [
        Change("training/run_table", "RunTable.why_layers", "if trained", "if False")]),
    "a sink by name replaces the one of its class": Mutation("tests/test_extensions.py", [
        Change("training/sinks/base", "Sink.__init_subclass__", 'cls.__dict__.get("key")',
               "cls.key")]),
    "a sink's key is no value of the setting": Mutation("tests/test_extensions.py", [
        Change("training/sinks/base", "Sink.__init_subclass__", 'register("sink", cls.key)', "pass")]),
    "the last row before a resume is lost": Mutation(
        "tests/test_logging.py::test_logs_of_resumed_and_new_runs", [
        Change("training/sinks/event_files", "EventFiles.open", "purge_step=n + 1 if n else None",
               "purge_step=n if n else None")]),
    "a new run's curves go on from the old ones": Mutation(
        "tests/test_logging.py::test_logs_of_resumed_and_new_runs", [
        Change("training/sinks/event_files", "EventFiles.open", "move_old_events(folder)", "pass")]),
    "numbers go to another tracker": Mutation("tests/test_logging.py", [
        Change("training/sinks/tracker", "Tracker.open", "a.trackers[-1]", "a.trackers[0]")]),
    "a tracker without the options of the user": Mutation(
        "tests/test_logging.py::test_tracker_gets_numbers_images_captions_and_options", [
        Change("training/sinks/tracker", "Tracker.open", "c.tracker_options.get(self.name, {})", "{}")]),
    # --- evaluation
    "the worst checkpoint is marked as the best": Mutation(
        "tests/evaluation/test_evaluate.py::test_the_command_prints_numbers_and_a_table", [
        Change("evaluation/compare", "table",
               'min(results, key=itemgetter("held_out_loss"))',
               'max(results, key=itemgetter("held_out_loss"))')]),
    "changes counted from the first column, not from the model's own": Mutation(
        "tests/evaluation/test_compare.py", [
        Change("evaluation/compare", "Comparison.__init__",
               "next((k for k, c in enumerate(columns) if c.bare), 0)", "0")]),
    "images of another schedule are compared": Mutation(
        "tests/evaluation/test_eval_schedule.py::"
        "test_images_of_another_schedule_are_not_compared", [
        Change("evaluation/evaluate", "image_distances",
               "not same or not now.keys() <= before.keys()", "not now.keys() <= before.keys()")]),
    "an uncertain use of the control images is an alarm": Mutation(
        "tests/evaluation/test_evaluate.py::"
        "test_an_uncertain_use_of_the_control_images_is_news", [
        Change("evaluation/evaluate", "first_advice", '("rises", "unknown")', '("rises",)')]),
    "a run resumed by a call holds out other pairs": Mutation(
        "tests/planning/test_first_run.py::"
        "test_a_run_resumed_by_a_call_keeps_what_its_checkpoint_held_out", [
        Change("training/resume", "RunResume.restore_state",
               "self.adapters.data is not None", "self.adapters.data is None")]),
    "the effect with Lightning is counted from the LoRA alone": Mutation(
        "tests/extras/test_with_lightning.py::"
        "test_effects_are_counted_from_the_column_without_lora", [
        Change("extras/with_lightning", "measured",
               "effect_of(row[k], row[0], wanted)", "effect_of(row[k], row[1], wanted)")]),
    "a terminal's progress bar has no loss": Mutation(
        "tests/test_logging.py::test_bar_on_a_terminal", [
        Change("core/display", "Progress.update", "if note:", "if not note:")]),
    "a run on several GPUs must fit the largest": Mutation(
        "tests/planning/test_machines.py::test_a_run_on_several_gpus_must_fit_the_smallest", [
        Change("planning/decisions", "fits_gpus", "needed <= min(rooms)", "needed <= max(rooms)")]),
    "two processes pin the memory of one": Mutation(
        "tests/planning/test_machines.py::test_two_processes_pin_host_memory_twice", [
        Change("planning/decisions", "choose_processes", "pinned * gpus", "pinned")]),
    "two processes leave the last step out": Mutation(
        "tests/planning/test_plan.py::test_two_processes_take_half_of_the_steps_and_no_pair_less", [
        Change("planning/cards", "strategy_settings",
               "-(-asked.max_train_steps // q.processes)",
               "asked.max_train_steps // q.processes")]),
    "an evaluation is logged at the log's interval only": Mutation(
        "tests/test_logging.py::"
        "test_an_evaluation_is_logged_with_its_step_whatever_the_interval_of_the_log", [
        Change("training/stopping", "logged", "bool(state.metrics) or", "")]),
    "steps that an earlier fit skipped count again": Mutation(
        "tests/training/test_failed_runs.py::"
        "test_steps_that_were_skipped_in_an_earlier_fit_do_not_count_again", [
        Change("training/stopping", "judge_run",
               "s.skipped - skipped < steps", "s.skipped < steps")]),
    "a process without work counts another's": Mutation(
        "tests/training/test_stopping.py::test_each_unit_of_work_counts_once_over_all_processes", [
        Change("training/stopping", "shares", "u < n", "True")]),
    "images after every step once they were asked for": Mutation(
        "tests/training/test_stopping.py::test_images_are_made_once_for_each_request", [
        Change("training/stopping", "asked_for_images", "state.sample_now = False", "pass")]),
    "an error costs the steps since the last checkpoint": Mutation(
        "tests/training/test_failed_runs.py::test_a_run_that_ends_with_an_error_is_saved_first", [
        Change("training/stopping", "run_context",
               "failed = state.processes > 1", "failed = True")]),
    "an equal loss is a better one": Mutation(
        "tests/training/test_stopping.py::test_an_equal_loss_is_no_better_checkpoint", [
        Change("training/checkpoint", "CheckpointCallback.better",
               "loss >= state.best[0]", "loss > state.best[0]")]),
    "latest is not what its file names": Mutation(
        "tests/training/test_stopping.py::"
        "test_latest_is_the_checkpoint_that_its_file_names_while_it_is_complete", [
        Change("training/checkpoint", "_latest", "named and is_complete(named)", "False")]),
    "a run that is done is saved again": Mutation(
        "tests/training/test_stopping.py::test_a_run_that_is_done_is_not_saved_again", [
        Change("training/checkpoint", "CheckpointCallback.on_train_begin",
               "trainer.global_step or None", "None")]),
    "a negative prompt is encoded for nothing": Mutation(
        "tests/test_predict.py::test_without_guidance_no_negative_prompt_is_encoded", [
        Change("sampling/edits", "run_edits", "true_cfg_scale > 1", "true_cfg_scale >= 1")]),
    "a seed of 64 bits": Mutation(
        "tests/test_predict.py::test_seeds_are_those_that_torch_takes_in_63_bits", [
        Change("sampling/edits", "seeds_of", "s < 2**63", "s <= 2**63")]),
    "a file's name counts more than its header": Mutation(
        "tests/test_predict.py::test_the_schedule_in_a_header_counts_more_than_the_files_name", [
        Change("sampling/denoising", "pick_schedule",
               'own = info.get("schedule")', 'own = None if named else info.get("schedule")')]),
    "the mean of a run replaces a loaded adapter": Mutation(
        "tests/test_saved_and_shown.py::"
        "test_an_adapter_that_is_loaded_after_a_run_is_used_without_the_runs_mean", [
        Change("training/run_adapters", "RunAdapters._load", "self.ema = None", "pass")]),
    "the first adapter gives image sizes, even without any": Mutation(
        "tests/lora/test_mixing.py::test_the_first_adapter_with_image_sizes_gives_them", [
        Change("training/run_adapters", "info_of_sizes", "if sizes_in(info)", "if True")]),
    "a file called default replaces the trained adapter": Mutation(
        "tests/lora/test_mixing.py::"
        "test_a_file_called_default_does_not_replace_the_trained_adapter", [
        Change("lora/adapters", "parse_loras", '{"default", *given}', "{*given}")]),
    "results of evaluate are taken for a run's": Mutation(
        "tests/evaluation/test_compare.py::"
        "test_results_of_a_run_are_those_of_its_own_evaluations", [
        Change("evaluation/compare", "results_of",
               'not re.fullmatch(r"(epoch|step)_\\d+", file.parent.name)', "False")]),
    "guidance of the first column for all": Mutation(
        "tests/evaluation/test_compare.py::"
        "test_a_column_may_have_guidance_where_the_first_has_none", [
        Change("evaluation/compare", "compare_edits",
               "any(c.true_cfg_scale > 1 for c in columns)", "columns[0].true_cfg_scale > 1")]),
    "the time of an earlier fit is forgotten": Mutation(
        "tests/training/test_stopping.py::"
        "test_the_time_of_earlier_fits_counts_and_the_pause_between_them_does_not", [
        Change("training/callbacks", "RunClock.start_clock", "self.spent = self.seconds", "pass")]),
    "an image a little further is always near enough": Mutation(
        "tests/evaluation/test_advice.py::"
        "test_an_image_near_its_target_may_be_a_little_further_than_before", [
        Change("evaluation/validation_loss", "progress_of_images",
               "m.image < m.control / 2", "m.image < m.control")]),
    "settings alone are a cause": Mutation(
        "tests/evaluation/test_advice.py::test_settings_alone_are_no_cause", [
        Change("evaluation/validation_loss", "causes_of",
               "not set(known) & set(MEASURED)", "False")]),
    "a report does not count warnings": Mutation(
        "tests/planning/test_doctor.py::test_a_report_counts_what_is_less_than_an_error", [
        Change("planning/report", "DoctorReport._summary", "LEVELS[1:3]", "LEVELS[2:3]")]),
    "what is too large fits": Mutation(
        "tests/planning/test_doctor.py::"
        "test_a_report_says_what_the_smallest_strategy_needs_if_none_fits", [
        Change("planning/report", "DoctorReport._fit", "not p.chosen", "False")]),
    "an error does not stop the doctor": Mutation(
        "tests/planning/test_doctor.py", [
        Change("planning/report", "DoctorReport.stop",
               'errors = self.of("error")', 'errors = self.of("warning")')]),
    "two encoders take the room of the larger one": Mutation(
        "tests/planning/test_machines.py::test_as_many_samples_are_encoded_at_once_as_fit", [
        Change("planning/parts", "choose_encode_batch",
               "sum(facts.weights[part] for part in here)",
               "max(facts.weights[part] for part in here)")]),
    "an image is decoded again where memory ran out": Mutation(
        "tests/planning/test_machines.py::test_what_ran_out_of_memory_once_is_decoded_on_the_cpu", [
        Change("planning/parts", "choose_decoder", "if failed:", "if False:")]),
    "the largest of two GPUs holds the text encoder": Mutation(
        "tests/planning/test_machines.py::test_the_facts_of_a_text_encoder", [
        Change("planning/parts", "encoder_room",
               "min(map(room_of, machine.gpus))", "max(map(room_of, machine.gpus))")]),
    "the target's size alone counts for encoding": Mutation(
        "tests/planning/test_machines.py::"
        "test_the_largest_image_of_a_pair_decides_about_the_text_encoder", [
        Change("planning/parts", "text_encoder_facts",
               'max(width * height, config.data.control_area or components.areas["control_area"])',
               "width * height")]),
    "the shared part of prompts is planned twice": Mutation(
        "tests/planning/test_disk_space.py::test_a_prompts_shared_part_is_stored_once", [
        Change("planning/disk_space", "sample_bytes", "share_prefix and s.images", "False")]),
    "edit masks take no room": Mutation(
        "tests/planning/test_disk_space.py::test_a_prompts_shared_part_is_stored_once", [
        Change("planning/disk_space", "sample_bytes", "masks and s.controls", "False")]),
    "images of an evaluation take no room": Mutation(
        "tests/planning/test_disk_space.py::test_images_of_an_evaluation_are_a_part_of_the_logs", [
        Change("planning/disk_space", "log_bytes", "2 * shown + 4 * edits", "2 * shown")]),
    "identity pairs take no room": Mutation(
        "tests/planning/test_disk_space.py::test_identity_pairs_need_room_too", [
        Change("planning/disk_space", "cache_items",
               "samples[:identity_count(len(samples), config.data.identity_share)]",
               "samples[:0]")]),
    "an old checkpoint held a tenth out": Mutation(
        "tests/training/test_run_data.py::test_what_a_checkpoint_held_out", [
        Change("training/run_data", "used_fraction",
               'train.get("val_fraction", 0)', 'train.get("val_fraction", 0.1)')]),
    "masks of pairs erase mask images": Mutation(
        "tests/training/test_run_data.py::"
        "test_masks_of_images_and_of_pairs_are_the_weights_of_their_own_samples", [
        Change("training/run_data", "with_edit_masks", "if given is None else given.clone()", "")]),
    "a pair's mask replaces its mask image": Mutation(
        "tests/training/test_run_data.py::test_a_mask_image_counts_more_than_the_pair", [
        Change("training/run_data", "edit_masked",
               "s.mask is None and bool(s.controls)", "bool(s.controls)")]),
    "a subset drops other captions": Mutation(
        "tests/training/test_run_data.py::"
        "test_a_subset_drops_the_captions_that_the_data_set_drops", [
        Change("training/run_data", "RunData.subset", "out.seed = dataset.seed", "pass")]),
    "a GPU drives another one's screen": Mutation(
        "tests/planning/test_machines.py::test_the_screen_of_a_gpu_is_found_by_its_bus", [
        Change("planning/facts", "drives_a_screen", "== bus", "!= bus")]),
    "the largest of two GPUs counts": Mutation(
        "tests/planning/test_machines.py::"
        "test_of_gpus_of_one_kind_the_smallest_and_the_fullest_count", [
        Change("planning/facts", "first_kind",
               "min(g.bytes for g in same)", "max(g.bytes for g in same)")]),
    "the emptiest of two GPUs counts": Mutation(
        "tests/planning/test_machines.py::"
        "test_of_gpus_of_one_kind_the_smallest_and_the_fullest_count", [
        Change("planning/facts", "first_kind",
               "min((g.free for g in same if g.free is not None), default=None)",
               "max((g.free for g in same if g.free is not None), default=None)")]),
    "a P100 gets a T4's tensor cores": Mutation(
        "tests/planning/test_machines.py::"
        "test_a_card_that_is_only_named_has_the_capability_and_host_memory_of_its_kind", [
        Change("planning/facts", "machine_with",
               "(7, 5) if gpu.tensor_cores else (6, 0)", "(7, 5)")]),
    "every card is in Kaggle's host": Mutation(
        "tests/planning/test_machines.py::"
        "test_a_card_that_is_only_named_has_the_capability_and_host_memory_of_its_kind", [
        Change("planning/facts", "host_bytes",
               'gpu is not None and gpu.name == "T4"', "gpu is not None")]),
    "GPUs hidden by -1 are an old driver": Mutation(
        "tests/planning/test_machines.py::test_a_variable_hides_all_gpus", [
        Change("planning/facts", "hides_gpus", '("", "-1", "NoDevFiles")', '("", "NoDevFiles")')]),
    "a given dtype is chosen again": Mutation(
        "tests/planning/test_machines.py::test_a_dtype_that_is_given_is_not_chosen", [
        Change("planning/plan", "make_plan", "if so_far.dtype:", "if False:")]),
    "a run of epochs is saved by quarters": Mutation(
        "tests/planning/test_machines.py::"
        "test_a_run_of_epochs_is_saved_by_epochs_and_one_of_samples_by_quarters", [
        Change("planning/plan", "make_plan",
               "choose_save_interval(t, length)", "choose_save_interval(t, None)")]),
    "with styles no target is decoded": Mutation(
        "tests/planning/test_hand_sums.py::test_styles_are_decoded_at_the_size_of_control_images", [
        Change("planning/plan", "expected_decoding",
               "pixels = max(pixels, memory.query.control * 256)",
               "pixels = memory.query.control * 256")]),
    "processes on other machines need GPUs here": Mutation(
        "tests/planning/test_machines.py::test_processes_of_a_launcher_may_be_on_other_machines", [
        Change("planning/plan", "fits_machine",
               "1 if facts.machine.world else plan.processes.value", "plan.processes.value")]),
    "a smaller batch loses the accumulation": Mutation(
        "tests/planning/test_machines.py::test_a_smaller_batch_is_made_up_for_by_accumulation", [
        Change("planning/plan", "smaller_settings",
               "d.batch_size * t.gradient_accumulation_steps", "d.batch_size")]),
    "a loaded quantization outlives another setting": Mutation(
        "tests/planning/test_machines.py::"
        "test_another_quantization_takes_the_place_of_that_which_was_loaded", [
        Change("planning/plan", "changed", "so_far = replace(so_far, quantize=None)", "pass")]),
    "compiled blocks recompute against their setting": Mutation(
        "tests/planning/test_machines.py::"
        "test_blocks_that_compile_recompute_as_it_is_set_although_the_run_does_not_fit", [
        Change("planning/plan", "checkpointing_choice",
               "plan.compile.value or not hoped.value", "not hoped.value")]),
    "each of two processes takes all steps": Mutation(
        "tests/planning/test_machines.py::"
        "test_the_steps_of_a_run_are_shared_by_the_processes_that_were_asked_for", [
        Change("planning/plan", "expected_steps", "1 if n == AUTO else n", "1")]),
    "what is in use is free": Mutation(
        "tests/planning/test_machines.py::"
        "test_what_torch_keeps_for_reuse_is_free_and_what_is_in_use_is_not", [
        Change("models/loading", "free_device_bytes", "- torch.cuda.memory_allocated(d)", "")]),
    "a resumed epoch ends a step early": Mutation(
        "tests/training/test_step.py::"
        "test_a_run_is_planned_to_the_end_of_its_epoch_wherever_a_forced_resume_takes_it_up", [
        Change("training/callbacks", "RunPosition.plan_lengths",
               "-(-(batches - self.position) // per_step)",
               "steps_per_epoch - -(-self.position // per_step)")]),
    "the batches of a step are those of one process": Mutation(
        "tests/core/test_settings.py::"
        "test_the_batches_of_a_step_count_over_all_processes_and_alpha_is_the_rank_if_it_is_not_set", [
        Change("training/resume", "settings_metadata",
               "gradient_accumulation_steps * processes", "gradient_accumulation_steps")]),
    "alpha that is not set is one": Mutation(
        "tests/core/test_settings.py::"
        "test_the_batches_of_a_step_count_over_all_processes_and_alpha_is_the_rank_if_it_is_not_set", [
        Change("training/resume", "settings_metadata", 'or out["model.lora.r"]', "or 1")]),
    "an older version's epochs are a change": Mutation(
        "tests/training/test_resume.py::"
        "test_the_epochs_that_an_older_version_wrote_by_itself_are_no_change", [
        Change("training/resume", "changed_settings",
               "before != after and not open_as_before", "before != after")]),
    "an adapter with one layer more is put back": Mutation(
        "tests/training/test_resume.py::test_an_adapter_with_other_layers_is_not_put_back", [
        Change("training/resume", "put_back", "if odd:", "if len(odd) > len(params):")]),
    "another machine's folder is another model": Mutation(
        "tests/training/test_resume.py::"
        "test_a_checkpoint_of_another_model_is_named_before_anything_is_downloaded", [
        Change("training/resume", "_model_misfit", "and not Path(old).is_absolute()", "")]),
    "a forced resume is refused before it begins": Mutation(
        "tests/training/test_resume.py::"
        "test_a_forced_resume_takes_any_checkpoint_that_can_be_read", [
        Change("training/resume", "checkpoint_misfit",
               'if c.train.force_resume: return ""', "pass")]),
    "older names of a checkpoint are unknown": Mutation(
        "tests/training/test_resume.py::test_a_setting_is_found_by_its_older_name", [
        Change("training/resume", "recorded", "*setting.role.older", "")]),
    "a selfcheck with an error is well": Mutation(
        "tests/extras/test_selfcheck.py::test_all_is_well_only_if_all_was_compared_and_alike", [
        Change("extras/selfcheck", "SelfCheck.ok", "or self.errors", "")]),
    "a selfcheck that compared nothing is well": Mutation(
        "tests/extras/test_selfcheck.py::test_all_is_well_only_if_all_was_compared_and_alike", [
        Change("extras/selfcheck", "SelfCheck.ok", "bool(self.parity) and", "")]),
    "an image a hundred grey levels off is close": Mutation(
        "tests/extras/test_selfcheck.py::test_all_is_well_only_if_all_was_compared_and_alike", [
        Change("extras/selfcheck", "SelfCheck.is_close",
               'row["difference"] <= 1', 'row["difference"] <= 100')]),
    "a missing stage is equal": Mutation(
        "tests/extras/test_selfcheck.py::test_a_stage_that_is_missing_is_a_difference", [
        Change("extras/selfcheck", "compare_traces", "torch.full_like(a, torch.nan)", "a")]),
    "an adapter moved because it has numbers": Mutation(
        "tests/extras/test_selfcheck.py::test_an_adapter_that_stays_zero_has_not_moved", [
        Change("extras/selfcheck", "train_steps", 'if "lora_B" in name', "")]),
    "a loader of yours gets the configured batch": Mutation(
        "tests/training/test_run_data.py::test_a_loader_of_yours_keeps_its_batch_size", [
        Change("training/run_data", "RunData.make_loader",
               "size or c.data.batch_size", "c.data.batch_size")]),
    "a check that compared nothing passed": Mutation(
        "tests/extras/test_selfcheck.py::test_all_is_well_only_if_all_was_compared_and_alike", [
        Change("extras/selfcheck", "SelfCheck.verdict",
               '"passed" if self.parity else "nothing was compared"', '"passed"')]),
    "rounding is an effect": Mutation(
        "tests/extras/test_with_lightning.py::test_effect_is_the_share_of_the_way", [
        Change("extras/with_lightning", "effect_of",
               "length < way.size / 4", "length < way.size / 4000")]),
    "a file in small letters is for any model": Mutation(
        "tests/extras/test_with_lightning.py::"
        "test_published_files_say_their_model_by_their_names", [
        Change("extras/with_lightning", "made_for",
               ".lower() in Path(file).name.lower()", " in Path(file).name")]),
    "what was written twice is half undone": Mutation(
        "tests/extras/test_instructions.py::"
        "test_what_was_written_twice_is_undone_to_the_very_beginning", [
        Change("extras/instructions", "undo_instructions",
               "reversed(read_journal(folder))", "read_journal(folder)")]),
    "small images are enlarged for a question": Mutation(
        "tests/extras/test_instructions.py::"
        "test_images_are_made_smaller_and_never_larger_than_the_least_side", [
        Change("extras/instructions", "seen_at",
               "min(1., (area / (im.width * im.height)) ** 0.5)",
               "(area / (im.width * im.height)) ** 0.5")]),
    "one instruction is made of the first pairs": Mutation(
        "tests/extras/test_instructions.py::"
        "test_the_pairs_that_one_instruction_is_made_of_are_spread_over_the_data_set", [
        Change("extras/instructions", "_texts", "max(1, len(pairs) // MOST_ASKED)", "1")]),
}
