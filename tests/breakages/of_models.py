"""Small mistakes in models, LoRA files and devices; `make mutations` tries them."""
from code_changes import Change, Mutation

MUTATIONS: dict[str, Mutation] = {
    # --- hub
    "the announced download counts files that are here": Mutation(
        "tests/models/test_hub.py::test_what_is_here_is_not_announced_again", [
        Change("models/hub", "HubModel.announce",
               "sum(self.files[p] for p in weights if not self.has(p))",
               "sum(self.files[p] for p in weights)")]),
    "room for the smallest shard": Mutation(
        "tests/models/test_hub.py::test_a_disk_holds_the_copy_and_the_largest_file", [
        Change("models/hub", "HubModel.check_disk_space",
               "max(todo, key=todo.__getitem__)", "min(todo, key=todo.__getitem__)")]),
    "files that were there before are deleted": Mutation(
        "tests/models/test_hub.py::"
        "test_a_killed_download_continues_and_deletes_only_what_it_downloaded", [
        Change("models/hub", "HubModel.release", "path not in downloaded", "downloaded is None")]),
    "the end of a large file is not in its digest": Mutation(
        "tests/models/test_hub.py::test_a_change_at_the_end_of_a_large_file_changes_its_digest", [
        Change("models/hub", "sampled_digest", "(size - 4096) * n // 63",
               "(size - 4096) * n // 64")]),
    # --- loading
    "a copy of another kind: set what is set already": Mutation(
        "tests/models/test_prequantize.py::test_a_copy_cannot_be_used_in_another_form", [
        Change("models/loading", "check_saved_quantization",
               "f\"{told}, but `{key}` is {quantization or 'none'}; set it to {saved} or none\"",
               "f\"{told}, but `{key}` is {quantization or 'none'}; set it to {quantization}\"")]),
    "the dtype of a file is that of its first tensor": Mutation(
        "tests/models/test_quantize.py::test_a_files_dtype_is_that_of_most_tensors", [
        Change("models/loading", "stored_dtype", "max(names, key=names.count)", "names[0]")]),
    "float32 doubles the encoder's memory and not the decoder's": Mutation(
        "tests/planning/test_hand_sums.py", [
        Change("models/loading", "work_bytes", "decoded == 4", "decoded == 2")]),
    # --- modulation
    "the farthest timestep's row": Mutation(
        "tests/models/test_modulation.py::"
        "test_other_timesteps_get_the_nearest_row_with_one_message", [
        Change("models/modulation", "ModulationTable.nearest_timestep",
               "min(self.index, key=lambda t: abs(t - time))",
               "max(self.index, key=lambda t: abs(t - time))")]),
    "rows of the text before those of the image": Mutation(
        "tests/models/test_modulation.py::test_outputs_and_gradients_are_those_of_the_layers", [
        Change("models/modulation", "block_rows", "for stream in STREAMS",
               "for stream in STREAMS[::-1]")]),
    "control tokens are modulated at the target's time": Mutation(
        "tests/models/test_modulation.py::test_outputs_and_gradients_are_those_of_the_layers", [
        Change("models/modulation", "TableIndex.append",
               "rows[-1:].expand(len(rows) - 1, -1, -1)", "rows[:-1]")]),
    "a table of any size replaces the layers": Mutation(
        "tests/models/test_modulation.py::"
        "test_auto_keeps_the_layers_where_a_table_is_larger", [
        Change("models/modulation", "table_pays", "<= 16e6", "<= 16e9")]),
    # --- prequantize
    "narrow weights are written wide": Mutation(
        "tests/models/test_hub.py::"
        "test_the_planned_size_of_a_copy_in_float32_of_a_narrow_checkpoint", [
        Change("models/prequantize", "ShardQuantizer.add",
               "tensor.clone() if tensor.element_size() < value.element_size() else value",
               "value")]),
    "room for the table once": Mutation(
        "tests/models/test_prequantize.py::"
        "test_the_modulation_table_needs_room_twice", [
        Change("models/prequantize", "_check_room", "sum(sizes.values()) + table",
               "sum(sizes.values())")]),
    "a copy without the text encoder's bits blames the transformer's setting": Mutation(
        "tests/models/test_prequantize.py::test_what_cannot_be_copied_is_refused", [
        Change("models/prequantize", "_copied_components",
               '"model.text_encoder_quantize"',
               '"model.quantize"')]),
    "a copy's text encoder has no digests for the cache": Mutation(
        "tests/models/test_prequantize.py::"
        "test_a_copy_replaces_the_model_from_precompute_to_resume", [
        Change("models/prequantize", "save_prequantized", "table_dtype, not base, part_bytes",
               "table_dtype, base, part_bytes")]),
    # --- single_file
    "every file is rotated in groups of 256": Mutation(
        "tests/models/test_single_file.py::"
        "test_each_form_gives_the_weights_within_its_rounding", [
        Change("models/single_file", "rotated_group",
               'both.get("convrot_groupsize", GROUP)', "GROUP")]),
    "all pieces of a weight get the first rows' scales": Mutation(
        "tests/models/test_single_file.py::test_a_layer_of_full_width", [
        Change("models/single_file", "ScaledSlice.__getitem__", "self.scale[rows].reshape(-1, 1)",
               "self.scale[slice(0, len(self.weight[rows]))].reshape(-1, 1)")]),
    "a text encoder is to be given as what it was given": Mutation(
        "tests/models/test_single_file.py::"
        "test_what_is_not_known_is_refused_in_one_sentence_before_any_work", [
        Change("models/single_file", "", '"give it as `model.text_encoder_file`"',
               '"give it as `model.transformer_file`"')]),
    "the mark of scaled float8 is a weight": Mutation(
        "tests/models/test_single_file.py::"
        "test_each_form_gives_the_weights_within_its_rounding", [
        Change("models/single_file", "SingleFile.__init__",
               'self.marks | {"scaled_fp8"}', 'self.marks')]),
    # --- tensor_files
    "a cut file passes": Mutation(
        "tests/models/test_single_file.py::"
        "test_what_is_not_known_is_refused_in_one_sentence_before_any_work", [
        Change("models/tensor_files", "read_header", "if needed > size",
               "if needed - 8 - length > size")]),
    "a wrong text encoder blames the transformer's setting": Mutation(
        "tests/models/test_text_encoder_file.py::"
        "test_what_is_not_known_is_refused_in_one_sentence_before_any_work", [
        Change("models/tensor_files", "read_header", "_foreign(path, start, kind)",
               "_foreign(path, start, TRANSFORMER)")]),
    # --- quantizations: base
    "float8 on Apple's GPUs": Mutation(
        "tests/models/test_quantize.py::test_refused_before_weights_are_read", [
        Change("models/quantizations/base", "Quantization.limit", 'device.type != "mps"',
               'device.type == "mps"')]),
    "saved layers lose their bias": Mutation(
        "tests/models/test_prequantize.py::"
        "test_a_component_is_the_one_that_load_quantized_gives", [
        Change("models/quantizations/base", "Quantization.part_names",
               '({"bias"} if bias else set())', "set()")]),
    "large weights are multiplied once more by their power": Mutation(
        "tests/devices/test_fp16.py::test_errors_are_a_tenth_of_bfloat16s", [
        Change("models/quantizations/base", "Quantization.fp16_product",
               ".mul(1 / power)", ".mul(power)")]),
    # --- quantizations: fp8_storage
    "a plan of float8 counts wide biases": Mutation(
        "tests/models/test_quantize.py::test_planned_bytes_of_a_layer_are_those_that_it_holds", [
        Change("models/quantizations/fp8_storage", "Fp8Storage.bytes",
               "inputs * outputs + outputs", "inputs * outputs + outputs * base_bytes")]),
    "a plan of float8 forgets the weights that autograd keeps": Mutation(
        "tests/models/test_quantize.py::test_autograd_keeps_what_a_plan_counts", [
        Change("models/quantizations/fp8_storage", "Fp8Storage", "copies = True",
               "copies = False")]),
    # --- quantizations: known
    "true means four bits": Mutation(
        "tests/models/test_quantize.py::"
        "test_the_quantization_is_part_of_the_encoders_identity", [
        Change("models/quantizations/known", "parse_quantization", 'advised("8 bits")',
               'advised("4 bits")')]),
    "the tower that sees images is quantized": Mutation(
        "tests/models/test_quantize.py::test_outputs_are_close_to_the_plain_model", [
        Change("models/quantizations/known", "", '"visual", "lora_"', '"lora_"')]),
    # --- quantizations: nf4
    "a plan of four bits forgets their scales": Mutation(
        "tests/models/test_quantize.py::test_planned_bytes_of_a_layer_are_those_that_it_holds", [
        Change("models/quantizations/nf4", "NF4.bytes", "n / 2 + n / 64 +", "n / 2 +")]),
    "a copy of four bits computes in the dtype that it was made in": Mutation(
        "tests/models/test_prequantize.py::"
        "test_plain_weights_are_as_narrow_as_in_the_checkpoint_and_nf4_serves_both_dtypes", [
        Change("models/quantizations/nf4", "NF4.from_tensors", "state.dtype = dtype", "pass")]),
    "four bits on GPUs that are too old": Mutation(
        "tests/models/test_quantize.py::test_refused_before_weights_are_read", [
        Change("models/quantizations/nf4", "NF4.limit", "(6, 0)", "(5, 0)")]),
    # --- quantizations: quanto
    "groups of four bits for kernels that cannot train": Mutation(
        "tests/models/test_quantize.py::test_kernels_unfit_for_training_are_avoided", [
        Change("models/quantizations/quanto", "QInt4.adjust", "(64, 32)", "(128, 32)")]),
    "eight bits in float16 without their power": Mutation(
        "tests/devices/test_fp16.py::test_eight_bit_weights_are_exact_in_float16", [
        Change("models/quantizations/quanto", "Rows.fp16_product",
               "weight._scale.flatten().float() * power", "weight._scale.flatten().float()")]),
    "a plan of quanto forgets the inputs that autograd keeps": Mutation(
        "tests/models/test_quantize.py::test_autograd_keeps_what_a_plan_counts", [
        Change("models/quantizations/quanto", "Quanto", "keeps_inputs = True",
               "keeps_inputs = False")]),
    # --- quantizations: torchao
    "a torchao with which every LoRA fails": Mutation(
        "tests/models/test_quantize.py::test_refused_before_weights_are_read", [
        Change("models/quantizations/torchao", "check_torchao", "< (0, 16)", "< (0, 10)")]),
    "a plan of torchao forgets the weights that autograd keeps": Mutation(
        "tests/models/test_quantize.py::test_autograd_keeps_what_a_plan_counts", [
        Change("models/quantizations/torchao", "TorchAO", "copies = True", "copies = False")]),
    # --- variants: base
    "as many images as in the training are a note": Mutation(
        "tests/test_saved_and_shown.py::test_more_images_than_the_model_knows_are_a_note", [
        Change("models/variants/base", "Variant.images_note", "images <= self.trained_images",
               "images < self.trained_images")]),
    "a variant that is asked for is not preferred": Mutation(
        "tests/test_extensions.py::"
        "test_a_variant_is_named_in_the_settings_and_not_found_by_itself", [
        Change("models/variants/base", "variant_of_folder",
               "[VARIANTS[wanted]] if wanted in VARIANTS else []", "[]")]),
    "an unknown hub id is the first variant with a mark": Mutation(
        "tests/models/test_variants.py::test_a_hub_id_names_its_variant", [
        Change("models/variants/base", "variant_named", "if not v.hub_mark", "if v.hub_mark")]),
    # --- variants: text_to_image
    "a prompt without images in the template of edits": Mutation(
        "tests/parity/test_text_to_image.py::test_embeddings_latents_and_prediction", [
        Change("models/variants/text_to_image", "QwenImage.template_for",
               "self.edit_template() if images else self.text_template()",
               "self.edit_template()")]),
    "control images are numbered from 0": Mutation(
        "tests/parity/test_pipelines.py::test_conditioning_and_velocity", [
        Change("models/variants/text_to_image", "QwenImage.prompt_text",
               "self.image_prefix.format(i + 1)", "self.image_prefix.format(i)")]),
    "a plan counts four tokens where the text encoder makes one": Mutation(
        "tests/planning/test_hand_sums.py", [
        Change("models/variants/text_to_image", "QwenImage.prompt_tokens", "// 784", "// 196")]),
    "the header always says 3d": Mutation(
        "tests/parity/test_image_positions.py::test_the_note_of_a_lora_follows_the_setting", [
        Change("models/variants/text_to_image", "QwenImage.note",
               "image_positions=self.positions", 'image_positions="3d"')]),
    "other positions: set what is set already": Mutation(
        "tests/parity/test_image_positions.py::"
        "test_a_lora_names_its_positions_and_the_other_mode_is_named_once", [
        Change("models/variants/text_to_image", "other_positions",
               'remedy = "set `model.image_positions` to 3d"',
               'remedy = "set `model.image_positions` to installed"')]),
    # --- variants: v1, v2509, v2511
    "other trainers take v1 for its successor": Mutation(
        "tests/models/test_variants.py::test_what_is_published_of_each_model", [
        Change("models/variants/v1", "V1", '"qwen_image_edit"', '"qwen_image_edit_plus"')]),
    "v1 gets the nodes of 2509": Mutation(
        "tests/extras/test_comfyui_workflow.py::test_each_variant_has_its_nodes", [
        Change("models/variants/v1", "V1", '"TextEncodeQwenImageEdit"',
               '"TextEncodeQwenImageEditPlus"')]),
    "the text encoder sees images at another size": Mutation(
        "tests/models/test_variants.py::test_sizes_are_those_of_the_pipelines", [
        Change("models/variants/v2509", "V2509", "vl_area = 384 * 384", "vl_area = 512 * 512")]),
    "four images look usual": Mutation(
        "tests/models/test_variants.py::test_what_is_published_of_each_model", [
        Change("models/variants/v2509", "V2509", "trained_images = 3", "trained_images = 4")]),
    "ComfyUI does not modulate 2511's controls at zero": Mutation(
        "tests/extras/test_comfyui_workflow.py::test_each_variant_has_its_nodes", [
        Change("models/variants/v2511", "V2511", "controls_at_zero=True",
               "controls_at_zero=False")]),
    "2511 in ComfyUI with the weights of 2509": Mutation(
        "tests/models/test_variants.py::test_what_is_published_of_each_model", [
        Change("models/variants/v2511", "V2511", '"qwen_image_edit_2511_bf16.safetensors"',
               '"qwen_image_edit_2509_fp8_e4m3fn.safetensors"')]),
    "a LoRA of 2511 names 2509": Mutation(
        "tests/models/test_variants.py::test_a_hub_id_names_its_variant", [
        Change("models/variants/v2511", "V2511", '"Qwen-Image-Edit-2511"',
               '"Qwen-Image-Edit-2509"')]),
    # --- adapters
    "a start LoRA is ignored if an adapter is in memory": Mutation(
        "tests/lora/test_adapters.py::"
        "test_training_starts_from_the_file_although_an_adapter_is_loaded", [
        Change("lora/adapters", "start_lora", "not settings.pretrained_weight",
               'not settings.pretrained_weight or name in getattr(transformer, "peft_config", {})'
               )]),
    "an adapter is trained at the weight of its last use": Mutation(
        "tests/lora/test_adapters.py::test_only_named_adapters_are_active", [
        Change("lora/adapters", "train_only", "set_weight(transformer, name, 1.0)", "pass")]),
    "alpha is 16 by default": Mutation(
        "tests/lora/test_adapters.py::test_alpha_is_the_rank_by_default", [
        Change("lora/adapters", "add_lora", "settings.lora_alpha or settings.r",
               "settings.lora_alpha or 16")]),
    "a start LoRA's dropout stays that of its file": Mutation(
        "tests/lora/test_adapters.py::test_dropout_follows_the_configuration", [
        Change("lora/adapters", "start_lora",
               "set_dropout(transformer, settings.lora_dropout, name)", "pass")]),
    # --- file_header
    "the only instruction replaces the user's trigger word": Mutation(
        "tests/lora/test_file_header.py::test_a_trigger_word_of_the_user_stays", [
        Change("lora/file_header", "trained_on", "not trigger and len(captions) == 1",
               "len(captions) == 1")]),
    "a list shows the left of each image": Mutation(
        "tests/lora/test_file_header.py::test_a_thumbnail_shows_the_centre", [
        Change("lora/file_header", "thumbnail_of", "(im.width - edge) // 2", "0")]),
    "the header says how many steps were images": Mutation(
        "tests/lora/test_file_header.py::test_a_saved_file_obeys_the_specification", [
        Change("lora/file_header", "training_entries", 'str(info["pairs"])',
               'str(info["steps"])')]),
    # --- formats
    "a header's alpha wins over the tensors": Mutation(
        "tests/lora/test_brought_files.py::test_alpha_from_every_place", [
        Change("lora/formats", "settle_config",
               'if any("alpha" in parts for parts in layers.values())',
               'if not stated and any("alpha" in parts for parts in layers.values())')]),
    "rsLoRA's alpha is too small for ComfyUI": Mutation(
        "tests/lora/test_formats.py::test_comfyui_adds_what_peft_adds", [
        Change("lora/formats", "kohya_alpha", "alpha * math.sqrt(r)", "alpha")]),
    "of several files the first is taken": Mutation(
        "tests/lora/test_brought_files.py::"
        "test_hidden_and_unfinished_files_are_no_candidates", [
        Change("lora/formats", "_choose", "names[0] if len(names) == 1 else None",
               "names[0] if names else None")]),
    # --- model_card
    "a card says that all captions are left out": Mutation(
        "tests/lora/test_model_card.py::test_a_card_says_how_many_captions_it_leaves_out", [
        Change("lora/model_card", "_parts", 'f"\\n\\nand {len(captions) - 5} more."',
               'f"\\n\\nand {len(captions)} more."')]),
    "an upload is public by default": Mutation(
        "tests/lora/test_model_card.py::test_upload_takes_lora_card_and_images_only", [
        Change("lora/model_card", "push_to_hub", "private:bool=True", "private:bool=False")]),
    "every file of the samples is uploaded": Mutation(
        "tests/lora/test_model_card.py::test_upload_takes_lora_card_and_images_only", [
        Change("lora/model_card", "published",
               "(n for n in dict.fromkeys(images) if (folder/n).is_file())",
               '("samples/*",)')]),
    # --- compile
    "blocks keep everything after their compiler has failed": Mutation(
        "tests/devices/test_compile.py::"
        "test_blocks_recompute_from_the_first_step_on_when_their_compiler_fails", [
        Change("devices/compile", "set_up.after",
               "checkpointing if uncompiled is None else uncompiled(failure)",
               "checkpointing")]),
    "the recomputation draws another dropout": Mutation(
        "tests/devices/test_compile.py::test_recomputation_draws_the_same_dropout", [
        Change("devices/compile", "set_up.way",
               "partial(modes[mode], random=True) if mode and random else modes[mode]",
               "modes[mode]")]),
    "selective recomputation passes each operation through Python": Mutation(
        "tests/devices/test_compile.py::test_only_attention_passes_through_the_mode_that_keeps_it", [
        Change("devices/compile", "set_up.eager", "way(EAGER, mode)", "way(MODES, mode)")]),
    "eager selective recomputation runs attention again": Mutation(
        "tests/devices/test_compile.py::test_selective_checkpointing_runs_attention_once_a_step", [
        Change("devices/compile", "KeptAttention.__call__", "if mode is None:", "if mode is not None:")]),
    "out of memory is taken for a failed compiler": Mutation(
        "tests/devices/test_compile.py::test_out_of_memory_is_not_a_compiler_failure", [
        Change("devices/compile", "Compiled.__call__", "raise", "pass")]),
    # --- edit_model
    "an offloaded encoder is loaded on the GPU first": Mutation(
        "tests/devices/test_edit_model.py::"
        "test_an_offloaded_component_is_never_whole_on_its_device", [
        Change("devices/edit_model", "EditModel._load_once",
               '"cpu" if offloaded else device', "device")]),
    "trained weights are loaded at each use": Mutation(
        "tests/devices/test_edit_model.py::test_each_way_to_the_transformer_is_the_same_door", [
        Change("devices/edit_model", "EditModel.finish_postponed",
               "self._postponed = None", "pass")]),
    # --- fp16
    "products are summed in float16": Mutation(
        "tests/devices/test_fp16.py::test_products_are_summed_in_float32", [
        Change("devices/fp16", "enable_fp16",
               "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
               "pass")]),
    "a NaN of the backward pass is looked for from its end": Mutation(
        "tests/devices/test_fp16.py::test_a_gradient_with_nan_names_where_it_began", [
        Change("devices/fp16", "Fp16Stats.first", "bad.nonzero()[-1 if backward else 0]",
               "bad.nonzero()[0]")]),
    "backward products without the scales of their rows": Mutation(
        "tests/devices/test_fp16.py::test_gradients_through_one_layer", [
        Change("devices/fp16", "ScaledLinear.backward", "g * times if rows else g", "g")]),
    # --- processes
    "both processes on the first GPU": Mutation(
        "tests/devices/test_processes.py::test_each_process_has_a_rank_and_a_gpu_of_its_own", [
        Change("devices/processes", "environment_of", "LOCAL_RANK=rank", "LOCAL_RANK=0")]),
    "workers of a cluster share the first GPU": Mutation(
        "tests/devices/test_processes.py::test_a_worker_of_a_cluster_has_a_gpu_of_its_own", [
        Change("devices/processes", "local_device", 'torch.device("cuda", rank)',
               'torch.device("cuda", 0)')]),
    "survivors of a dead process wait": Mutation(
        "tests/devices/test_processes.py::"
        "test_one_dead_process_ends_the_others_although_they_only_wait", [
        Change("devices/processes", "Processes.end_after_failure", "self.kill()", "pass")]),
    "the process before the dead one is named": Mutation(
        "tests/training/test_run_processes.py::"
        "test_the_process_that_died_is_named_whichever_it_is", [
        Change("devices/processes", "Processes.check",
               'f"process {died[0] + 1} of {n} was killed by {name}{why}"',
               'f"process {died[0]} of {n} was killed by {name}{why}"')]),
    "a quantization set on the trainer stays here": Mutation(
        "tests/training/test_run_processes.py::"
        "test_a_quantization_that_was_set_on_the_trainer_is_handed_to_the_processes", [
        Change("training/run_processes", "job_config",
               "c.model.quantize = cast(Any, trainer.quantize)", "pass")]),
    "each started process starts processes": Mutation(
        "tests/training/test_run_processes.py::test_a_started_process_starts_no_others", [
        Change("training/run_processes", "job_config", "dict(num_processes=1) | train", "train")]),
    # --- strategies
    "a split transformer may be moved to its first GPU": Mutation(
        "tests/devices/test_edit_model.py::"
        "test_a_split_transformer_cannot_be_moved_to_one_of_its_devices", [
        Change("devices/strategies/base", "forbid_move",
               "any(fn(torch.empty(0, device=d)).device != d for d in at)",
               "all(fn(torch.empty(0, device=d)).device != d for d in at)")]),
    "a way of yours is asked first": Mutation(
        "tests/devices/test_edit_model.py::test_a_way_of_yours_is_asked_last", [
        Change("devices/strategies/base", "Strategy", "order = 9", "order = 0")]),
    "block swap pins three blocks": Mutation(
        "tests/devices/test_edit_model.py::"
        "test_a_way_saves_on_the_device_and_costs_what_it_says", [
        Change("devices/strategies/block_swap", "BlockSwapping.host_bytes",
               "q.layers * block", "SLOTS * block")]),
    "a sharded plan trains unsharded": Mutation(
        "tests/devices/test_fsdp.py::test_what_was_launched_must_be_what_is_planned", [
        Change("devices/strategies/fsdp", "launch_problem",
               '(sharded or wanted == "fsdp")', '(wanted == "fsdp")')]),
    "FSDP that was launched by mistake": Mutation(
        "tests/devices/test_fsdp.py::test_what_was_launched_must_be_what_is_planned", [
        Change("devices/strategies/fsdp", "launch_problem",
               'wanted == "ddp" and made == "FSDP"', 'wanted == "fsdp" and made == "FSDP"')]),
    "offloading on two GPUs": Mutation(
        "tests/devices/test_block_swap.py::test_incompatible_settings_raise", [
        Change("devices/strategies/host_memory", "host_problem", "len(devices) > 1",
               "len(devices) > 2")]),
    "a copy does not wait for the block that computes": Mutation(
        "tests/devices/test_block_swap.py::test_outputs_and_gradients_are_the_same", [
        Change("devices/strategies/host_memory", "Streams.copy",
               "self.side.wait_stream(self.cuda.current_stream(self.device))", "pass")]),
    "memory that is full: the setting is to be off": Mutation(
        "tests/devices/test_block_swap.py::test_memory_that_cannot_be_pinned", [
        Change("devices/strategies/host_memory", "pinned", "code == 2", "code != 2")]),
    "the last layers are on the first GPU": Mutation(
        "tests/devices/test_model_parallel.py::test_each_weight_is_read_to_its_own_device", [
        Change("devices/strategies/model_parallel", "ModelParallelLoader.device",
               '-1 if name.startswith(("norm_out", "proj_out")) else 0', "0")]),
    "the run may be on the last of several GPUs": Mutation(
        "tests/devices/test_model_parallel.py::test_impossible_settings_raise", [
        Change("devices/strategies/model_parallel", "SplitBlocks.problem",
               '("auto", names[0])', '("auto", *names)')]),
    "ways are checked in the order of their definition": Mutation(
        "tests/devices/test_edit_model.py::"
        "test_a_configuration_asks_for_ways_in_an_order_of_their_own", [
        Change("devices/strategies/ways", "in_order",
               'sorted(STRATEGIES.values(), key=attrgetter("order"))',
               "list(STRATEGIES.values())")]),
    "only the first way that is asked for is checked": Mutation(
        "tests/devices/test_model_parallel.py::test_impossible_settings_raise", [
        Change("devices/strategies/ways", "weight_loader",
               "for strategy in asked: why = strategy.problem(facts)",
               "for strategy in asked[:1]:\n    why = strategy.problem(facts)")]),
    "a header's smaller alpha wins": Mutation(
        "tests/lora/test_brought_files.py::test_alpha_from_every_place", [
        Change("lora/formats", "_agrees",
               'told != parts["alpha"].float()', 'told > parts["alpha"].float()')]),
    "one layer's alpha is a disagreement": Mutation(
        "tests/lora/test_brought_files.py::test_alphas_of_single_layers_stay", [
        Change("lora/formats", "_same_alpha",
               "any(math.isclose(kohya_alpha(one, n), kohya_alpha(other, n), rel_tol=1e-6) for n in layers)",
               "all(math.isclose(kohya_alpha(one, n), kohya_alpha(other, n), rel_tol=1e-6) for n in layers)")]),
    "trained biases are dropped": Mutation(
        "tests/lora/test_brought_files.py::test_peft_settings_that_cannot_be_applied", [
        Change("lora/formats", "_own_settings",
               'config.get("bias") not in (None, "none")',
               'config.get("bias") not in (None, "none", "all")')]),
    "a card samples with the model's schedule": Mutation(
        "tests/lora/test_model_card.py::test_usage_code_runs", [
        Change("lora/model_card", "usage", 'facts.get("schedule") or {}', "{}")]),
    "a card forgets the stored schedule": Mutation(
        "tests/test_trainer.py::"
        "test_results_at_the_end_of_a_cell_are_one_line_and_a_lora_has_a_card", [
        Change("training/run_adapters", "RunAdapters.save",
               "self.card_facts() | info", "self.card_facts()")]),
    "four bits of another dtype are refused": Mutation(
        "tests/models/test_prequantize.py::test_a_copy_in_four_bits_fits_each_dtype", [
        Change("models/loading", "check_saved_quantization",
               "and not QUANTIZATIONS[saved].any_dtype", "")]),
    "a tensor of another shape is taken": Mutation(
        "tests/models/test_quantize.py::test_a_tensor_of_another_shape_is_named", [
        Change("models/loading", "place_tensor", "tensor.shape != expected", "False")]),
    "parts that a class keeps in float32 are rounded": Mutation(
        "tests/models/test_quantize.py::test_parts_that_a_class_keeps_in_float32_stay_so", [
        Change("models/loading", "place_tensor", "dtype = torch.float32", "pass")]),
    "an upgrade of diffusers is another VAE": Mutation(
        "tests/models/test_prequantize.py::"
        "test_an_identity_is_of_words_and_settings_and_not_of_who_wrote_them", [
        Change("models/components", "component_digest", "if k not in _VOLATILE", "")]),
    "a tokenizer without its merges": Mutation(
        "tests/models/test_prequantize.py::"
        "test_an_identity_is_of_words_and_settings_and_not_of_who_wrote_them", [
        Change("models/components", "component_digest",
               '"vocab.json", "merges.txt"', '"vocab.json"')]),
    "a GPU keeps what was dropped": Mutation(
        "tests/devices/test_edit_model.py::test_what_is_dropped_is_given_back_to_the_gpu", [
        Change("devices/edit_model", "EditModel.drop",
               "if torch.cuda.is_available():", "if False:")]),
    "only the newest component is offloaded": Mutation(
        "tests/devices/test_edit_model.py::test_each_component_is_offloaded_or_not_by_itself", [
        Change("devices/edit_model", "EditModel.set_offload", "n != name", "n == name")]),
    "a quantized text encoder is offloaded, too": Mutation(
        "tests/devices/test_edit_model.py::test_a_component_is_quantized_or_offloaded", [
        Change("devices/edit_model", "EditModel.check", "and n in self.offload", "and False")]),
    "the third LoRA of a name replaces the second": Mutation(
        "tests/lora/test_mixing.py::"
        "test_a_file_called_default_does_not_replace_the_trained_adapter", [
        Change("lora/adapters", "_name", "while free in taken:", "if free in taken:")]),
    "a prompt without images is cut too early": Mutation(
        "tests/encoding/test_prompts.py::"
        "test_a_prompt_without_images_is_cut_after_1024_tokens_of_its_own", [
        Change("models/encoders", "whole_ids",
               "_TEXT + variant.template_for(0).dropped", "_TEXT")]),
    "images of a short prompt do not count": Mutation(
        "tests/encoding/test_prompts.py::test_the_images_of_a_short_prompt_are_counted", [
        Change("models/encoders", "check_prompt_length",
               "(w // 28 + 1) * (h // 28 + 1)", "0 * w * h")]),
    "any library is imported": Mutation(
        "tests/models/test_hub.py::test_only_models_of_two_libraries_are_imported", [
        Change("models/hub", "component_class",
               'library not in ("diffusers", "transformers")', "library in ()")]),
    "open models need a token": Mutation(
        "tests/models/test_hub.py::test_what_a_model_asks_of_its_readers", [
        Change("models/hub", "access_terms", "if gated:", "if not gated:")]),
    "without a network another revision is taken": Mutation(
        "tests/models/test_hub.py::"
        "test_without_a_network_the_revision_that_was_asked_for_is_looked_for", [
        Change("models/hub", "HubClient.files",
               "revision=revision, local_files_only=True", "local_files_only=True")]),
    "the disk of downloads is not looked at": Mutation(
        "tests/models/test_hub.py::test_both_disks_must_hold_a_copy_and_its_largest_file", [
        Change("models/hub", "HubModel.check_disk_space",
               "min(self.hub.folder, self.store, key=free_for_downloads)", "self.store")]),
}
