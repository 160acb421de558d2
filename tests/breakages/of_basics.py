"""Small mistakes in core, configuration, command line, data, logs, tiny model and widgets.

`make mutations` tries them.
"""
from code_changes import Change, Mutation

MUTATIONS: dict[str, Mutation] = {
    # --- command line
    "clear does not wait for a yes": Mutation("tests/test_cli.py::test_clear_asks", [
        Change("cli", "_clear", 'answer not in ("y", "yes")', 'answer in ("n", "no")')]),
    "a suspect run ends with exit code 0": Mutation(
        "tests/test_cli.py::test_the_exit_code_of_a_run_says_how_it_ended", [
        Change("cli", "train", "1 if trainer.state.suspect else 0", "0")]),
    "precompute succeeds although all samples were skipped": Mutation(
        "tests/test_cli.py::test_precompute_fails_if_no_sample_could_be_used", [
        Change("cli", "precompute",
               "report.samples > len(report.skipped)", "report.samples >= len(report.skipped)")]),
    "warnings of the doctor are errors": Mutation(
        "tests/test_cli.py::test_the_exit_code_of_the_doctor_is_that_of_errors", [
        Change("cli", "doctor", 'report.of("error")', 'report.of("warning")')]),
    "predict exchanges width and height": Mutation(
        "tests/test_cli.py::test_an_edit_has_the_size_and_the_numbers_that_were_typed", [
        Change("cli", "predict", "a.height, a.width", "a.width, a.height")]),
    "predict exchanges steps and guidance": Mutation(
        "tests/test_cli.py::test_an_edit_has_the_size_and_the_numbers_that_were_typed", [
        Change("cli", "predict", "a.negative_prompt, a.steps, a.cfg",
               "a.negative_prompt, a.cfg, a.steps")]),
    # --- configuration
    "the file wins over the command line": Mutation(
        "tests/core/test_config.py::test_settings_of_a_command_line_override_a_file", [
        Change("config", "load_config_from_yaml",
               "merge_settings(in_file, given)", "merge_settings(given, in_file)")]),
    "the height of a typed resolution is ignored": Mutation(
        "tests/core/test_config.py::test_a_typed_resolution_is_width_and_height", [
        Change("config", "sides_of", "int(sides[2] or width)", "width")]),
    "plan names the setting instead of its option": Mutation(
        "tests/core/test_config.py::test_what_no_plan_can_be_made_of_names_the_option", [
        Change("config", "check_plan_arguments",
               '"`--model`"', '"`model.pretrained_model_name_or_path`"')]),
    "older names are reported for each configuration": Mutation(
        "tests/core/test_config.py::test_translations_are_reported_once", [
        Change("config", "_report", "_reported.update(new)", "pass")]),
    # --- sections and settings
    "a refused value stays in the configuration": Mutation(
        "tests/core/test_config.py::test_a_refused_assignment_changes_nothing", [
        Change("core/section", "Section.__setattr__", "self.__dict__[name] = before", "pass")]),
    "any setting is proposed for an unknown option": Mutation(
        "tests/test_cli.py::"
        "test_an_option_that_does_not_exist_leads_to_a_setting_only_if_one_is_near", [
        Change("core/section", "near_setting", "alike >= 0.75", "alike >= 0.1")]),
    "settings of many runs are listed among those of every run": Mutation(
        "tests/core/test_settings.py::test_what_every_run_needs_comes_first", [
        Change("core/section", "Options.heading",
               'level == "everybody"', 'level in ("everybody", "many")'),
        Change("core/section", "Options.heading", "return GROUPS[level]",
               'return GROUPS["everybody"]')]),
    "a length in samples and one in steps are both taken": Mutation(
        "tests/planning/test_first_run.py::test_steps_and_samples_are_not_both_given", [
        Change("core/sections", "TrainSection._one_length",
               "self.max_train_steps and self.max_train_samples", "False")]),
    "the default learning rate is ten times as high": Mutation(
        "tests/core/test_settings.py::test_the_defaults_are_those_of_the_recipes", [
        Change("core/sections", "OptimizerSection",
               '1e-4, "learning rate; 1 for prodigy"', '1e-3, "learning rate; 1 for prodigy"')]),
    "captions are not dropped by default": Mutation(
        "tests/core/test_settings.py::test_the_defaults_are_those_of_the_recipes", [
        Change("core/sections", "DataSection",
               '0.1, "fraction of samples trained on the empty prompt"',
               '0.0, "fraction of samples trained on the empty prompt"')]),
    "a side of a multiple of 8 is taken": Mutation(
        "tests/core/test_bad_configurations.py::"
        "test_values_are_refused_when_the_configuration_is_made", [
        Change("core/sections", "DataSection._check_size",
               "side // 16 * 16", "side // 8 * 8")]),
    "the older name of a setting wins": Mutation(
        "tests/core/test_config.py::test_todays_spelling_wins_over_an_older_one", [
        Change("core/settings", "translate",
               "used = out[section].setdefault(key, value)", "used = out[section][key] = value")]),
    "a removed setting that changes results is dropped": Mutation(
        "tests/core/test_removed_settings.py", [
        Change("core/settings", "without_removed",
               "gone.changes_results and value not in gone.same", "False")]),
    "the last of two values on a command line is taken": Mutation(
        "tests/core/test_bad_configurations.py::"
        "test_a_command_line_takes_text_where_only_text_is_meant", [
        Change("core/settings", "texts_of", "out.get(name, text) != text", "False")]),
    "one number as size is the width of a strip": Mutation(
        "tests/core/test_bad_configurations.py::test_sizes_are_read_as_people_write_them", [
        Change("core/settings", "_sides", "[*value, *value]", "[*value, 16]")]),
    # --- presets
    "a preset lies over the user's settings": Mutation("tests/core/test_presets.py", [
        Change("core/presets", "with_preset",
               "{key: value} | out[section]", "out[section] | {key: value}")]),
    "the size of the targets alone chooses a preset's row": Mutation("tests/core/test_presets.py", [
        Change("core/presets", "preset_settings",
               "max(area, sides[0] * sides[1]) > 512 * 512", "sides[0] * sides[1] > 512 * 512")]),
    "memory of a GPU in powers of ten": Mutation("tests/core/test_presets.py", [
        Change("core/presets", "parse_gpu_name",
               "int(KNOWN_GPUS[name].gib * 2**30)", "int(KNOWN_GPUS[name].gib * 1e9)")]),
    "an A100 has 80 GB": Mutation("tests/core/test_presets.py", [
        Change("core/presets", "known_gpu_name", 'dict(a100="A100 40")', 'dict(a100="A100 80")')]),
    "one pair of twenty is held out": Mutation("tests/planning/test_first_run.py::"
        "test_the_pairs_decide_from_five_hundred_to_two_thousand_samples", [
        Change("core/presets", "held_out_images",
               "max(5, round(images / 10))", "max(1, round(images / 20))")]),
    # --- the plan's decisions
    "a time limit counts from the call of fit": Mutation("tests/core/test_choice.py", [
        Change("core/choice", "TimeLimit.end", "self.since or began", "began")]),
    "parts of a run are rounded down": Mutation("tests/core/test_choice.py", [
        Change("core/choice", "EvalInterval.of",
               "-(-max_steps // self.parts)", "max_steps // self.parts")]),
    "a run ends before its last samples": Mutation("tests/core/test_choice.py", [
        Change("core/choice", "RunLength.steps_of",
               "-(-self.samples // per_step)", "self.samples // per_step")]),
    "every decision is shown as the user's": Mutation("tests/core/test_choice.py", [
        Change("core/choice", "Plan.rows", "if c.asked", "if setting")]),
    "a reason hides what is impossible": Mutation("tests/core/test_choice.py", [
        Change("core/choice", "Plan.rows", "c.problem or c.why", "c.why or c.problem")]),
    # --- what is shown
    "the rate of a resumed run counts earlier steps": Mutation("tests/core/test_display.py", [
        Change("core/display", "Progress.pace", "(self.n - self.start)", "self.n")]),
    "two numbers look equal": Mutation("tests/core/test_display.py", [
        Change("core/display", "two_numbers", "(2, 3, 4)", "(2,)")]),
    "a time of hours has its seconds as minutes": Mutation("tests/core/test_display.py", [
        Change("core/display", "short_time",
               "f\"{s//3600}:{s%3600//60:02} h\"", "f\"{s//3600}:{s%60:02} h\"")]),
    "further kinds of reasons are not counted": Mutation("tests/core/test_display.py", [
        Change("core/display", "counted_reasons",
               "sum(len(found) for found in list(kinds.values())[most:])", "len(list(kinds.values())[most:])")]),
    "an incomplete cache is not marked": Mutation("tests/core/test_display.py", [
        Change("core/display", "_badges", "complete < n", "complete > n")]),
    "the written layer of a cache is called read-only": Mutation(
        "tests/widgets/test_sample_viewer.py::test_status_of_several_layers", [
        Change("core/display", "mode_text",
               '"written" if layer["writable"] else "only read"',
               '"only read" if layer["writable"] else "written"')]),
    # --- files
    "what is known of a file outlives its change": Mutation("tests/core/test_files.py", [
        Change("core/files", "cached_file_property", "known and known[0] == sig", "known")]),
    "a file that changes twice in a second is remembered": Mutation("tests/core/test_files.py", [
        Change("core/files", "cached_file_property",
               "began - st.st_ctime > _MIN_AGE", "began - st.st_ctime >= 0")]),
    "temporary files of running processes are stale": Mutation("tests/core/test_files.py", [
        Change("core/files", "stale_temp_files",
               "not psutil.pid_exists(int(pid))", "psutil.pid_exists(int(pid))")]),
    "a full disk asks for too few bytes": Mutation("tests/core/test_files.py", [
        Change("core/files", "disk_full", "megabytes(need, True)", "megabytes(need)")]),
    # --- entries of the cache
    "infinity is stored in the cache": Mutation("tests/core/test_cache_entries.py", [
        Change("core/cache_entries", "pack_entry",
               "torch.isfinite(t if t.element_size() > 1 else t.float())",
               "torch.logical_not(torch.isnan(t if t.element_size() > 1 else t.float()))")]),
    "an entry is read under the key of another": Mutation("tests/core/test_cache_entries.py", [
        Change("core/cache_entries", "unpack_entry",
               '(meta.get("kind"), meta.get("key")) == (kind, key)', 'meta.get("kind") == kind')]),
    "the checksum leaves out the type": Mutation("tests/core/test_cache_entries.py", [
        Change("core/cache_entries", "_checksum",
               'record["dtype"], record["shape"]', '"", record["shape"]')]),
    "the checksum leaves out the shape": Mutation("tests/core/test_cache_entries.py", [
        Change("core/cache_entries", "_checksum",
               'record["dtype"], record["shape"]', 'record["dtype"], ""')]),
    "a file that was cut off is called damaged": Mutation("tests/core/test_cache_entries.py", [
        Change("core/cache_entries", "_check_whole", "missing > 0", "missing > 8")]),
    "weights beyond float16 are taken": Mutation("tests/core/test_cache_entries.py", [
        Change("core/cache_entries", "fault_of_numbers",
               "largest <= LARGEST", "largest <= 16 * LARGEST")]),
    "an entry that is gone from one layer hides that of the next": Mutation(
        "tests/test_cache.py::test_an_entry_that_one_layer_lost_is_read_from_the_next", [
        Change("cache", "EmbeddingCacheManager.load_cache",
               "except FileNotFoundError: continue", "except FileNotFoundError: return None")]),
    "a bad entry of one layer hides that of the next": Mutation(
        "tests/test_cache.py::test_an_entry_that_one_layer_lost_is_read_from_the_next", [
        Change("cache", "EmbeddingCacheManager.load_cache",
               "self.quarantine(layer, kind, file_hash, str(e)); continue",
               "self.quarantine(layer, kind, file_hash, str(e))\nreturn None")]),
    "an unusable entry of one layer is unusable in all": Mutation(
        "tests/test_cache.py::test_an_entry_that_one_layer_lost_is_read_from_the_next", [
        Change("cache", "EmbeddingCacheManager._layers_with",
               "(layer.folder, kind, key) not in self.unusable",
               "(kind, key) not in {(k, e) for _, k, e in self.unusable}")]),
    # --- the machine
    "a session with a GPU has twelve hours": Mutation(
        "tests/core/test_environment.py::test_name_and_hours", [
        Change("core/environment", "_kaggle",
               '"accelerator" if fast else "cpu"', '"cpu" if fast else "accelerator"')]),
    "the oldest checkpoint comes first": Mutation(
        "tests/core/test_environment.py::test_newest_artifact_comes_first", [
        Change("core/environment", "newest_first.order",
               "-last.get(a.run, a.written)", "last.get(a.run, a.written)")]),
    "the limits of a container are ignored": Mutation(
        "tests/core/test_environment.py::test_limits_of_control_groups", [
        Change("core/environment", "host_memory",
               "[psutil.virtual_memory().total, *(int(w[0]) for w in limits if w[0].isdigit())]",
               "[psutil.virtual_memory().total]")]),
    "a quota hides a full disk": Mutation(
        "tests/core/test_environment.py::test_free_space_is_the_smaller_of_disk_and_quota", [
        Change("core/environment", "Environment.free_space",
               "min(room, max(0, self.quota - used_bytes(self.working)))",
               "max(0, self.quota - used_bytes(self.working))")]),
    "an attached cache is the one that is written": Mutation(
        "tests/core/test_environment.py::test_next_session_resumes_from_attached_files", [
        Change("core/environment", "Environment.cache_dirs",
               "(*others, folder)", "(folder, *others)")]),
    "downloads on Kaggle are kept twice": Mutation(
        "tests/core/test_startup.py::test_downloads_are_kept_in_pieces_except_on_kaggle", [
        Change("core/startup", "on_kaggle",
               'env.get("KAGGLE_KERNEL_RUN_TYPE") or env.get("KAGGLE_URL_BASE")',
               'env.get("KAGGLE_KERNEL_RUN_TYPE") and env.get("KAGGLE_URL_BASE")')]),
    "the size of the download cache that a user chose is replaced": Mutation(
        "tests/core/test_startup.py::test_downloads_are_kept_in_pieces_except_on_kaggle", [
        Change("core/startup", "set_download_cache",
               'os.environ.setdefault(XET_CACHE, "0")', 'os.environ[XET_CACHE] = "0"')]),
    "the allocator is set where it fails": Mutation(
        "tests/core/test_startup.py::"
        "test_nothing_is_set_under_windows_where_the_first_allocation_would_fail", [
        Change("core/startup", "set_allocator", "under_wsl()", "not under_wsl()")]),
    "errors of Python lose their traceback": Mutation(
        "tests/core/test_startup.py::test_another_handler_keeps_its_errors", [
        Change("core/startup", "show_error", "not raised_by_us(value)", "False")]),
    # --- sides, folders, tables
    "a name in another case is taken although two targets have it": Mutation(
        "tests/data/test_brought.py::test_a_name_in_another_case_is_taken_only_if_one_file_fits", [
        Change("data/sides", "aligned",
               "ours[form(n)] == theirs[form(n)] == 1", "theirs[form(n)] == 1")]),
    "a name in another case is taken although two files have it": Mutation(
        "tests/data/test_brought.py::test_a_name_in_another_case_is_taken_only_if_one_file_fits", [
        Change("data/sides", "aligned",
               "ours[form(n)] == theirs[form(n)] == 1", "ours[form(n)] == 1")]),
    "guessed folders are sorted by their first numbers": Mutation(
        "tests/data/test_layouts.py::test_layouts_that_are_found", [
        Change("data/sides", "_number_of",
               r'(re.findall(r"\d+", folder.name) or [0])[-1]',
               r'(re.findall(r"\d+", folder.name) or [0])[0]')]),
    "control_10 comes before control_2": Mutation(
        "tests/data/test_samples.py::test_folder_layouts", [
        Change("data/sides", "roles_of", "int(m[1] or 0)", 'm[1] or ""')]),
    "results of a run are the targets": Mutation(
        "tests/data/test_layouts.py::"
        "test_results_of_a_run_beside_the_usual_folders_are_not_taken_for_targets", [
        Change("data/sides", "_target_of", "len(sure) == 1", "False")]),
    "an instruction gives way to a prompt": Mutation(
        "tests/data/test_brought.py::test_an_instruction_comes_before_a_prompt", [
        Change("data/sides", "",
               '"instruction edit_instruction editing_instruction edit_prompt edit_text prompt '
               'text caption edit " "description".split()',
               '"prompt instruction edit_instruction editing_instruction edit_prompt edit_text '
               'text caption edit " "description".split()')]),
    "numbered controls are sorted as text": Mutation(
        "tests/data/test_brought.py::test_numbered_controls_of_two_digits", [
        Change("data/folders", "_numbered", "(int(m[2]), m[2], name)", "(m[2], m[2], name)")]),
    "the number of a sample is that of a control": Mutation(
        "tests/data/test_samples.py::test_numbered_controls_and_numbered_samples", [
        Change("data/folders", "_numbered", "and name not in after", "")]),
    "numbered controls come before the plain one": Mutation(
        "tests/data/test_samples.py::test_numbered_controls_and_numbered_samples", [
        Change("data/folders", "_controls_of", "plain + more", "more + plain")]),
    "a table's captions win over those beside the images": Mutation(
        "tests/data/test_layouts.py::test_tables_of_captions_beside_folders", [
        Change("data/folders", "read_folders", "captions_of(forms, *texts, *tables.texts)",
               "captions_of(forms, *tables.texts, *texts)")]),
    "photographs in another format are left out without a word": Mutation(
        "tests/data/test_layouts.py::test_layouts_that_are_found", [
        Change("data/listing", "may_be_lost", "why == UNREAD or", "")]),
    "a HEIC file wins over its converted copy": Mutation(
        "tests/data/test_layouts.py::test_heic_is_named", [
        Change("data/listing", "read_folder",
               "sorted(files, key=late.__contains__)", "list(files)")]),
    "the last of two files of one name is taken": Mutation(
        "tests/data/test_samples.py::test_unusable_folders", [
        Change("data/listing", "read_folder",
               'raise_twice("samples" if held is images else "captions", stem, held[stem], p)',
               "held[stem] = p")]),
    "the second prompt of an image is left out": Mutation(
        "tests/data/test_layouts.py::test_tables_of_captions_beside_folders", [
        Change("data/tables", "table_captions",
               'text != seen.setdefault("/".join(parts), text)', "False")]),
    "the first split of a data set is trained on": Mutation(
        "tests/data/test_samples.py::test_dataset_with_lists_of_controls", [
        Change("data/tables", "_split_of", '"train" in data', "False")]),
    "a later control takes the place of an empty one": Mutation(
        "tests/data/test_samples.py::"
        "test_a_later_control_does_not_take_the_place_of_an_empty_one", [
        Change("data/tables", "_refuse_gap", "elif empty", "elif False")]),
    "two samples of one name": Mutation(
        "tests/data/test_samples.py::test_equal_stems_get_their_path", [
        Change("data/tables", "_with_ids", "name in seen", "False")]),
    "captions are taken for those of the images before": Mutation(
        "tests/data/test_one_refusal.py", [
        Change("data/no_pairs", "twin_folders",
               "one in texts and other not in texts", "other in texts and one not in texts")]),
    "the settings of a refusal exchange the sides": Mutation("tests/data/test_one_refusal.py", [
        Change("data/no_pairs", "settings_of",
               "dict(control_dir=twins.before, target_dir=twins.after)",
               "dict(control_dir=twins.after, target_dir=twins.before)")]),
    "folders with half of their names alike are proposed": Mutation(
        "tests/data/test_one_refusal.py::test_what_may_be_chance_is_not_guessed", [
        Change("data/no_pairs", "_alike", "0.8 *", "0.5 *")]),
    "a refusal asks for a prompt although there are captions": Mutation(
        "tests/data/test_one_refusal.py", [
        Change("data/no_pairs", "settings_of", "not twins.captions", "True")]),
    # --- alignment
    "the first control is corrected instead of the one that was measured": Mutation(
        "tests/data/test_alignment.py::"
        "test_of_two_controls_the_one_that_was_measured_is_corrected", [
        Change("data/alignment_check", "_write_pair",
               "images[1 + found[1]], images[0], *masks = new",
               "images[1], images[0], *masks = new")]),
    "the first control is cropped as the one that was measured": Mutation(
        "tests/data/test_alignment.py::"
        "test_of_two_controls_the_one_that_was_measured_is_corrected", [
        Change("data/alignment_check", "_write_pair",
               "sample.controls[found[1]]", "sample.controls[0]")]),
    "shifts are told where a part of the image decides": Mutation(
        "tests/data/test_alignment.py::test_it_says_nothing_where_images_do_not_tell", [
        Change("data/alignment", "_located", "errors[[axis, 2 + axis]] = np.inf", "pass")]),
    "uncertain shifts are told": Mutation(
        "tests/data/test_alignment.py::test_a_number_is_told_only_if_its_error_is_small", [
        Change("data/alignment", "measure_alignment",
               "max(errors[np.isfinite(errors)] / most[np.isfinite(errors)]) > _SHAKY", "False")]),
    "large images are measured to a part of their pixels": Mutation(
        "tests/data/test_alignment.py::test_a_number_is_told_only_if_its_error_is_small", [
        Change("data/alignment", "measure_alignment",
               "max(1, math.sqrt(math.prod(target.size)) / 1024)", "1")]),
    # --- tiny model
    "the target is the photograph": Mutation("tests/tiny/test_photos.py", [
        Change("tiny/photos", "make_pairs", 'im.save(controls/f"{i:04}.png")',
               'edit(im).save(controls/f"{i:04}.png")'),
        Change("tiny/photos", "make_pairs", 'edit(im).save(targets/f"{i:04}.png")',
               'im.save(targets/f"{i:04}.png")')]),
    "red and blue are exchanged in the brightness": Mutation("tests/tiny/test_photos.py", [
        Change("tiny/photos", "luma_channel",
               "[[0.299], [0.587], [0.114]]", "[[0.114], [0.587], [0.299]]")]),
    "the demo is judged on photographs that it was trained on": Mutation(
        "tests/tiny/test_photos.py", [
        Change("tiny/photos", "write_pairs", 'split="held_out"', 'split="train"')]),
    "a duotone is exchanged": Mutation("tests/tiny/test_photos.py", [
        Change("tiny/photos", "duotone", "low + luma_channel(a) * (high - low)",
               "high + luma_channel(a) * (low - high)")]),
    "all random models are equal": Mutation("tests/tiny/test_random_models.py", [
        Change("tiny/random_models", "tiny_pipeline",
               "torch.manual_seed(seed)", "torch.manual_seed(0)")]),
    "controls of each random model are modulated at timestep 0": Mutation(
        "tests/tiny/test_random_models.py", [
        Change("tiny/random_models", "tiny_pipeline",
               "_transformer(v.zero_cond_t)", "_transformer(True)")]),
    "areas of VAE and text encoder are exchanged": Mutation("tests/tiny/test_random_models.py", [
        Change("tiny/random_models", "save_tiny",
               "control_area=areas[0], vl_area=areas[1]",
               "control_area=areas[1], vl_area=areas[0]")]),
    # --- logs
    "the rate of a run counts its evaluations": Mutation(
        "tests/test_logging.py::test_the_rate_of_a_run_leaves_out_its_evaluations", [
        Change("logging", "ProgressCallback.on_train_end",
               'f"{n / max(took - away, 1e-9):.2f} steps/s"',
               'f"{n / max(took, 1e-9):.2f} steps/s"')]),
    "the best step is compared with a later one": Mutation(
        "tests/test_logging.py::test_the_summary_says_which_checkpoint_is_best_and_why", [
        Change("logging", "best_text", 'if not row["step"]', 'if row["step"]')]),
    "a stopped run is shown as finished": Mutation(
        "tests/test_logging.py::test_the_summary_comes_last_and_names_files_that_are_there", [
        Change("logging", "RunSummary.__init__", 's.stop == "done"', "s.stop")]),
    "the command names the last LoRA instead of the best": Mutation(
        "tests/test_logging.py::test_the_command_names_the_best_lora_if_it_is_not_the_last", [
        Change("logging", "RunSummary.__init__",
               'self.files.get("best LoRA") or self.files.get("LoRA")',
               'self.files.get("LoRA") or self.files.get("best LoRA")')]),
    "a log shows the edit first and calls it before": Mutation(
        "tests/test_logging.py::test_samples_and_their_captions", [
        Change("logging", "LogCallback.samples",
               "[s.shown[0], edit, *s.shown[1:]]", "[edit, *s.shown]")]),
    # --- widgets
    "the titles of before and after are exchanged": Mutation(
        "tests/widgets/test_before_after.py", [
        Change("widgets/before_after", "BeforeAfter.html",
               "image_html(self.before, self.titles[0], most)",
               "image_html(self.before, self.titles[1], most)")]),
    "a note gives the size of the wrong image": Mutation("tests/widgets/test_before_after.py", [
        Change("widgets/before_after", "BeforeAfter.note",
               'f"{self.titles[1]} is {b}, shown at the size of {self.titles[0]}, {a}"',
               'f"{self.titles[1]} is {a}, shown at the size of {self.titles[0]}, {b}"')]),
    "images are larger than the page": Mutation("tests/widgets/test_before_after.py", [
        Change("widgets/before_after", "BeforeAfter.__init__",
               "min(height / first.height, 640 / first.width)",
               "max(height / first.height, 640 / first.width)")]),
    "a read-only cache is to be filled again": Mutation(
        "tests/widgets/test_sample_viewer.py::test_the_remedy_for_bad_entries_can_be_followed", [
        Change("widgets/cache_status", "CacheStatus.verify",
               "not self.cache.writable", "False")]),
    "only the written layer is counted as verified": Mutation(
        "tests/widgets/test_sample_viewer.py::"
        "test_verify_finds_corrupt_entries_of_every_layer", [
        Change("widgets/cache_status", "CacheStatus.verify", "for layer in self.cache.layers",
               "for layer in self.cache.layers[-1:]")]),
    "folders that are there are said to be missing": Mutation(
        "tests/widgets/test_sample_viewer.py::test_status_of_several_layers", [
        Change("widgets/cache_status", "CacheStatus.data",
               'if not layer["exists"]', 'if layer["exists"]')]),
    "a mask is red where the loss counts": Mutation(
        "tests/widgets/test_sample_viewer.py::test_a_mask_is_red_where_the_loss_does_not_count", [
        Change("widgets/sample_page", "masked_image",
               "image, red, Image.fromarray(mask)", "red, image, Image.fromarray(mask)")]),
    "tokens of the images count as tokens of the text": Mutation(
        "tests/widgets/test_sample_viewer.py::test_tokens_agree_with_encoded_tensors", [
        Change("widgets/sample_page", "_tokens", "n - sum(images)", "n")]),
    "a target is called before": Mutation(
        "tests/widgets/test_sample_viewer.py::"
        "test_stretched_images_and_unknown_lengths_are_said_in_words", [
        Change("widgets/sample_page", "_figures",
               'what = "after"', 'what = "before"')]),
    "stretched images are not told": Mutation(
        "tests/widgets/test_sample_viewer.py::"
        "test_stretched_images_and_unknown_lengths_are_said_in_words", [
        Change("widgets/sample_page", "stretched_text", "share >= 0.05", "share >= 0.5")]),
    "the id that was typed is found last": Mutation(
        "tests/widgets/test_sample_viewer.py::test_exact_id_wins", [
        Change("widgets/sample_viewer", "SampleBrowser.find",
               "samples[chosen[place]].id != text", "samples[chosen[place]].id == text")]),
    "swapped sides are written the wrong way round": Mutation(
        "tests/widgets/test_sample_viewer.py::"
        "test_both_sides_are_swapped_in_the_configuration_and_swapped_back", [
        Change("widgets/sample_viewer", "SampleBrowser.swap_all",
               "data.target_dir = target_dir\ndata.control_dir = control_dir",
               "data.target_dir = control_dir\ndata.control_dir = target_dir")]),
    "an edited caption is lost when another pair is shown": Mutation(
        "tests/widgets/test_sample_viewer.py::test_a_caption_that_is_not_saved_is_kept", [
        Change("widgets/sample_viewer", "SampleViewer.draw_caption",
               "self.drafts[was] = c.caption.value", "pass")]),
    "undo removes the trigger word": Mutation(
        "tests/widgets/test_sample_viewer.py::"
        "test_a_caption_is_edited_in_its_file_and_undone", [
        Change("widgets/sample_viewer", "SampleBrowser.save_caption",
               "(s.id, path, before, s.prompt)", "(s.id, path, before, text)")]),
    "the oldest runs are drawn": Mutation(
        "tests/widgets/test_tensorboard.py::test_newest_runs_are_drawn", [
        Change("widgets/tensorboard", "plot_events", "[-SHOWN:]", "[:SHOWN]")]),
    "the images of the oldest run are shown": Mutation(
        "tests/widgets/test_tensorboard.py::test_each_run_is_one_curve", [
        Change("widgets/tensorboard", "last_images", "reversed(runs.items())", "runs.items()")]),
    "drift to the left is not drawn": Mutation(
        "tests/widgets/test_tensorboard.py::test_small_drift_is_not_drawn", [
        Change("widgets/tensorboard", "worth_a_curve", "abs(v)", "v")]),
    "Kaggle is asked for a server": Mutation(
        "tests/widgets/test_tensorboard.py::test_view_of_each_environment", [
        Change("widgets/tensorboard", "choose_view", 'here.name == "kaggle"', "False")]),
    "the panel's rate counts evaluations": Mutation(
        "tests/widgets/test_training_panel.py::"
        "test_an_evaluation_is_announced_and_not_counted_in_the_rate", [
        Change("widgets/training_panel", "TrainingPanel.training_time",
               "now - s.eval_seconds -", "now -")]),
    "the time left has no evaluations": Mutation(
        "tests/widgets/test_training_panel.py::"
        "test_the_time_left_has_the_evaluations_to_come", [
        Change("widgets/training_panel", "TrainingPanel.evaluating_left",
               "(later + at_end) * s.eval_cost", "0")]),
    "the evaluation at the end is forgotten": Mutation(
        "tests/widgets/test_training_panel.py::"
        "test_the_time_left_has_the_evaluations_to_come", [
        Change("widgets/training_panel", "TrainingPanel.evaluating_left",
               "(later + at_end)", "later")]),
    "the panel forgets the images before the first step": Mutation(
        "tests/widgets/test_training_panel.py::"
        "test_the_images_before_the_first_step_are_kept_to_compare_with", [
        Change("widgets/training_panel", "TrainingPanel.show_eval_images",
               "del self.samples[list(self.samples)[1]]",
               "del self.samples[list(self.samples)[0]]")]),
    "the last held-out loss is called the first": Mutation(
        "tests/widgets/test_training_panel.py::"
        "test_the_held_out_loss_is_the_last_one_beside_the_first", [
        Change("widgets/training_panel", "numbers_html",
               'first = d["held_out"][0][1]', 'first = d["held_out"][-1][1]')]),
    "a small image is zoomed by half a pixel": Mutation(
        "tests/data/test_alignment.py::"
        "test_a_small_image_may_be_zoomed_by_half_a_pixel_at_its_edge", [
        Change("data/alignment_check", "CheckedPair.misfits", "max(ZOOMED, 1 / side)", "ZOOMED")]),
    "pairs that cannot be read fit": Mutation(
        "tests/data/test_alignment.py::test_pairs_that_cannot_be_read_do_not_fit", [
        Change("data/alignment_check", "AlignmentReport.summary",
               "n - len(self.misfits) - len(self.untold) - len(self.broken)",
               "n - len(self.misfits) - len(self.untold)")]),
    "odd values among images that were not read": Mutation(
        "tests/data/test_alignment.py::"
        "test_odd_values_are_counted_among_the_images_that_were_read", [
        Change("data/alignment_check", "sampled_contents",
               "counted_marks(marks, read)", "counted_marks(marks, len(samples))")]),
    "half a pixel is resampled": Mutation(
        "tests/data/test_alignment.py::test_less_than_a_pixel_is_left_as_it_is", [
        Change("data/alignment_check", "_correction",
               "displacement(a, size) < 0.75", "displacement(a, size) < 0.25")]),
    "a control of another size is cut elsewhere": Mutation(
        "tests/data/test_alignment.py::test_a_control_of_another_size_is_cut_where_the_target_is", [
        Change("data/alignment_check", "aligned_images",
               "*(box[:2] * scale)", "*(box[:2] / scale)")]),
    "copies whose names differ in case alone": Mutation(
        "tests/data/test_alignment.py::test_names_of_copies_differ_where_case_does_not_count", [
        Change("data/alignment_check", "_name", "name.casefold() in taken", "name in taken")]),
    "aligned copies get made-up captions": Mutation(
        "tests/data/test_alignment.py::test_pairs_without_captions_are_copied_without_them", [
        Change("data/alignment_check", "align_pairs", "s.prompt != NO_CAPTION", "True")]),
    "points of a curve stand for fewer and fewer steps": Mutation(
        "tests/widgets/test_loss_curve.py::"
        "test_a_full_curve_has_points_that_stand_for_equally_many_steps", [
        Change("widgets/loss_curve", "Curve.add", "self.stride *= 2", "pass")]),
    "a falling loss is drawn rising": Mutation(
        "tests/widgets/test_loss_curve.py::test_a_lower_loss_is_drawn_lower", [
        Change("widgets/loss_curve", "CurveAxes.y", "self.hi - within", "within - self.lo")]),
    "held-out losses outside of the drawing": Mutation(
        "tests/widgets/test_loss_curve.py::"
        "test_the_axes_hold_all_held_out_losses_and_no_single_outlier", [
        Change("widgets/loss_curve", "curve_axes", "(*smooth(loss), *held_out)", "smooth(loss)")]),
    "only plain JPEGs have bits": Mutation(
        "tests/data/test_odd_images.py::test_each_file_is_named_by_its_bytes", [
        Change("data/images", "_jpeg_bits", "0xcf", "0xc0")]),
    "a fraction on a command line is text": Mutation(
        "tests/core/test_settings.py::test_a_value_on_a_command_line_is_what_yaml_has_or_text", [
        Change("core/settings", "_value_of_text",
               "isinstance(value, (int, float))", "isinstance(value, int)")]),
    "the first of several splits": Mutation(
        "tests/data/test_samples.py::test_of_several_splits_one_must_be_called_train", [
        Change("data/tables", "_split_of", 'name != "train" and len(data) > 1', "False")]),
    "versions are compared as text": Mutation(
        "tests/planning/test_doctor.py::test_versions_are_compared_as_numbers", [
        Change("planning/doctor", "_tried", "_numbers(version) < _numbers(low)", "version < low")]),
}
