"""Small mistakes, put into the library one at a time: which of them does `make test-all` notice?

`make mutations` runs all of them and prints the score; `ARGS="seed key"` those whose name contains
one of these words. Each runs in a process of its own that reads the changed code: first the test
that the table names, then the tests of the changed module, all everyday tests, and the module's
notebook, until something fails. torch is loaded once, before. On two cores: about an hour, and a
quarter of an hour more for each mutation that the tests of its module do not notice.
"""
import argparse
import importlib.machinery
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import of_basics
import of_models
import of_runs
from code_changes import ROOT, Change, Misfit, Mutation, changed_cells, changed_files

OF_EACH_CHANGE = "not weekly and not browser and not mounts" # by `make test-all`
EVERYDAY = f"not slow and {OF_EACH_CHANGE}" # by `make test`


MUTATIONS = {
    # --- step
    "same noise in every epoch": Mutation("tests/training/test_randomness.py", [
        Change("training/step", "batch_seeds",
               "stable_seed(seed, epoch, i)", "stable_seed(seed, i)")]),
    "same noise for all samples of an epoch": Mutation("tests/training/test_randomness.py", [
        Change("training/step", "batch_seeds",
               "stable_seed(seed, epoch, i)", "stable_seed(seed, epoch)")]),
    "same noise in every step of a foreign loader": Mutation("tests/training/test_randomness.py", [
        Change("training/step", "batch_seeds",
               'stable_seed(seed, "step", step, i)', 'stable_seed(seed, "step", i)')]),
    "one noise level for a batch": Mutation("tests/models/test_flow_matching.py", [
        Change("models/flow_matching", "sample_sigmas",
               "[draw((), generator=_generator(seed, _FOR_SIGMAS)) for seed in seeds]",
               "[draw((), generator=_generator(seed, _FOR_SIGMAS)) for seed in "
               "[seeds[0]] * len(seeds)]")]),
    "noise and level from the same numbers": Mutation("tests/models/test_flow_matching.py", [
        Change("models/flow_matching", "sample_sigmas", "_FOR_SIGMAS", "_FOR_NOISE")]),
    "shift by the unpacked tokens": Mutation("tests/training/test_randomness.py", [
        Change("training/step", "sample_noise_and_sigmas",
               "variant.token_count(*shape[-2:])", "shape[-2] * shape[-1]")]),
    "shift ignores the size": Mutation("tests/training/test_randomness.py", [
        Change("training/step", "sample_noise_and_sigmas",
               "variant.token_count(*shape[-2:])", "256")]),
    "timestep not divided by 1000": Mutation("tests/training/test_step.py", [
        Change("models/flow_matching", "transformer_inputs",
               "timesteps.to(x_t.dtype) / 1000", "timesteps.to(x_t.dtype)")]),
    "continuous levels rounded": Mutation("tests/training/test_randomness.py", [
        Change("training/step", "sample_noise_and_sigmas",
               "None if train.continuous_timesteps else 1000", "1000")]),
    "weights by the level of the first sample": Mutation("tests/training/test_step.py", [
        Change("training/step", "flow_matching_loss", "flow.level_weights(sigma, weighting)",
               "flow.level_weights(sigma[:1], weighting)")]),
    "mask inverted": Mutation("tests/models/test_flow_matching.py", [
        Change("models/flow_matching", "mask_weights",
               "(1 - background) * (1 - mask.float())", "(1 - background) * mask.float()")]),
    "parts of a batch joined in their own order": Mutation("tests/training/test_step.py", [
        Change("trainer", "QwenImageEditTrainer.loss",
               "[losses[i] for i in range(len(eps))]", "list(losses.values())")]),
    "gradients never clipped": Mutation(
        "tests/training/test_randomness.py::test_gradients_are_clipped_at_their_norm", [
        Change("training/loop", "take_step",
               'trainer.config.train.max_grad_norm or float("inf")', 'float("inf")')]),
    "gradients of accumulated batches averaged twice": Mutation(
        "tests/training/test_randomness.py", [
        Change("training/loop", "accumulate_gradients", "count * n != group.samples", "True"),
        Change("training/loop", "accumulate_gradients", "loss * (count * n / group.samples)",
               "loss * (count * n / group.samples) / len(group)")]),
    "dropout repeats in every step": Mutation(
        "tests/training/test_randomness.py::"
        "test_each_step_drops_other_units_and_a_resumed_run_the_same", [
        Change("training/loop", "accumulate_gradients",
               'stable_seed(c.train.seed, "dropout", s.global_step, k * n + s.process)',
               'stable_seed(c.train.seed, "dropout", k * n + s.process)')]),
    "a step with an infinite gradient is made": Mutation("tests/training/test_optimizer.py", [
        Change("training/step", "guarded_step",
               "torch.logical_not(ok).float()", "torch.logical_not(ok).float() * 0")]),
    "the mean follows from the start at full decay": Mutation(
        "tests/training/test_optimizer.py::test_the_mean_follows_the_formula", [
        Change("training/step", "EMA.decay_at",
               "min(self.decay, (1 + n) / (10 + n))", "self.decay")]),
    "mean and deviation of the levels exchanged": Mutation("tests/training/test_randomness.py", [
        Change("training/step", "sample_noise_and_sigmas",
               "train.logit_mean, train.logit_std", "train.logit_std, train.logit_mean")]),
    "fixed shift without its logarithm": Mutation("tests/training/test_randomness.py", [
        Change("models/flow_matching", "sample_sigmas", "math.log(shift)", "shift")]),
    "accumulated batches weighed alike": Mutation("tests/training/test_randomness.py", [
        Change("training/loop", "accumulate_gradients",
               "loss * (count * n / group.samples)", "loss / len(group)")]),
    "weight decay not passed": Mutation(
        "tests/training/test_optimizer.py::test_each_setting_reaches_the_optimizer", [
        Change("training/optimizers/base", "rates",
               "dict(lr=settings.lr, weight_decay=settings.weight_decay)",
               "dict(lr=settings.lr)")]),
    # --- batches
    "the epoch is not passed to the data set": Mutation("tests/training/test_randomness.py", [
        Change("data/batches", "BucketBatchSampler.set_epoch",
               "self.dataset.set_epoch(epoch)", "pass")]),
    "the same order in every epoch": Mutation("tests/data/test_batches.py", [
        Change("data/batches", "BucketBatchSampler.batches",
               'stable_seed(self.seed, self.epoch, "order")', 'stable_seed(self.seed, "order")')]),
    "the position in an epoch is ignored": Mutation("tests/data/test_batches.py", [
        Change("data/batches", "BucketBatchSampler.rounds",
               "self.batches()[self.start:]", "self.batches()")]),
    "mask of a sample without one is black": Mutation(
        "tests/data/test_masks.py::test_cached_and_uncached_batches_have_the_same_masks", [
        Change("data/batches", "stack_masks",
               "np.full_like(known, 255)", "np.full_like(known, 0)")]),
    "controls stacked in reverse order": Mutation("tests/test_cache.py", [
        Change("data/batches", "controls_of",
               'key=lambda k: int(k.split(".")[1])', "reverse=True")]),
    "padding counts as tokens": Mutation("tests/parity/test_pipelines.py", [
        Change("data/batches", "pad_prompts",
               "out, (None if mask.all() else mask.bool())", "out, None")]),
    "strata of levels are ignored": Mutation("tests/models/test_flow_matching.py", [
        Change("models/flow_matching", "sample_sigmas", "(part + u) / parts", "u")]),
    "the same strata in every step": Mutation("tests/models/test_flow_matching.py", [
        Change("training/step", "step_strata",
               'stable_seed(seed, "strata", step)', 'stable_seed(seed, "strata")')]),
    "processes take the same batches": Mutation("tests/devices/test_distributed.py", [
        Change("data/batches", "BucketBatchSampler.__iter__",
               "(r[self.rank:self.rank + 1] or [r[0][:1]])[0]", "r[0]")]),
    "a foreign loader begins again on resume": Mutation(
        "tests/training/test_step.py::test_another_loader_is_taken_up_where_the_run_stopped", [
        Change("training/step", "BatchStream.groups",
               "islice(iter(self.loader), state.position, None)", "iter(self.loader)")]),
    "captions dropped for all samples at once": Mutation("tests/training/test_randomness.py", [
        Change("data/dataset", "ImageDataset.dropped",
               'stable_seed(self.seed, self.epoch, self.samples[i].id, "caption")',
               'stable_seed(self.seed, self.epoch, "caption")')]),
    # --- samples and images
    "held out by sample": Mutation("tests/data/test_samples.py", [
        Change("data/samples", "split_held_out",
               "_first_images(samples)", "[s.id for s in samples]")]),
    "the same pairs held out for every seed": Mutation("tests/data/test_samples.py", [
        Change("data/samples", "split_held_out",
               'stable_seed(seed, d, "held out")', 'stable_seed(0, d, "held out")')]),
    "trigger word put before prompts that have it": Mutation("tests/evaluation/test_evaluate.py::test_own_prompts_get_the_trigger_word", [
        Change("data/prompts", "add_trigger", "if _has_word(prompt, word)", "if False")]),
    # --- what people bring
    "a name that is twice in JSON": Mutation("tests/core/test_text_files.py", [
        Change("core/text_files", "_object", "len(out) < len(pairs)", "False")]),
    "a key that is twice in YAML": Mutation("tests/core/test_text_files.py", [
        Change("core/text_files", "_check_names", "name in lines", "False")]),
    "a column that is twice in CSV": Mutation("tests/core/test_text_files.py", [
        Change("core/text_files", "_check_header", "names.count(n) > 1", "False")]),
    "octal numbers in YAML": Mutation("tests/core/test_text_files.py", [
        Change("core/text_files", "_check_scalar", '"[-+]?0[0-9_]"', '"never"')]),
    "aliases in YAML are not counted": Mutation("tests/core/test_text_files.py", [
        Change("core/text_files", "_size_of", "total > MOST_PARTS", "False")]),
    "one byte order mark only": Mutation("tests/core/test_text_files.py", [
        Change("core/text_files", "read_text", 'text.lstrip("\ufeff")', 'text.removeprefix("\ufeff")')]),
    "pipes and devices are opened": Mutation("tests/core/test_text_files.py", [
        Change("core/text_files", "_check_stat", "not stat.S_ISREG(st.st_mode)",
               "stat.S_ISDIR(st.st_mode) or stat.S_ISFIFO(st.st_mode)")]),
    "letters inside of a word removed": Mutation("tests/core/test_text_files.py", [
        Change("core/files", "visible", "return text[first:end]",
               'return "".join(c for c in text[first:end] if not is_invisible(c))')]),
    "a misnamed second control without a word": Mutation("tests/data/test_brought.py", [
        Change("data/folders", "_check_controls", "if n and gaps", "if False")]),
    "two controls of one target": Mutation("tests/data/test_brought.py", [
        Change("data/sides", "refuse_doubt", "len(found) > 1", "False")]),
    "an unrelated metadata.csv is the table": Mutation("tests/data/test_brought.py", [
        Change("data/samples", "_is_metadata", "if not rows or _only_captions(table)",
               "if True: return bool(rows) and not _only_captions(table)\nif True")]),
    "a link above the data set is followed": Mutation("tests/data/test_samples.py", [
        Change("data/listing", "is_inside", "not home.is_relative_to(end.parent)", "True")]),
    "word borders of English only": Mutation("tests/data/test_brought.py", [
        Change("data/prompts", "_joined", "_NO_BLANKS.intersection(scripts)", "False")]),
    "captions dropped with the empty image set": Mutation("tests/data/test_batches.py::test_a_dropped_caption_is_the_empty_prompt", [
        Change("data/dataset", "ImageDataset.__getitem__", '"" if drop else s.prompt', "s.prompt")]),
    "controls resized before encoding": Mutation("tests/parity/test_pipelines.py", [
        Change("data/samples", "load_images", "crop_to(c, geometry.aspect)",
               "crop_to(c, geometry.aspect).resize(geometry.target(c.size))")]),
    "target resized with another filter": Mutation("tests/parity/test_pipelines.py", [
        Change("data/samples", "load_images",
               "Image.Resampling.LANCZOS", "Image.Resampling.BICUBIC")]),
    "a changed file goes unnoticed": Mutation(
        "tests/data/test_samples.py::test_a_changed_image_is_refused", [
        Change("data/samples", "open_unchanged",
               "digest and source_digest(data) != digest", "False")]),
    "mask resized without averaging": Mutation(
        "tests/data/test_masks.py::test_thin_lines_of_a_mask_are_averaged", [
        Change("data/samples", "load_mask", "Image.Resampling.BOX", "Image.Resampling.NEAREST")]),
    "held-out share rounded down": Mutation("tests/data/test_samples.py", [
        Change("data/samples", "split_held_out",
               "round(len(groups) * fraction)", "int(len(groups) * fraction)")]),
    "metadata stop an image": Mutation("tests/data/test_odd_images.py", [
        Change("data/images", "_read_with", "if plain is None: raise", "raise")]),
    "an orientation in a long text is lost": Mutation(
        "tests/data/test_odd_images.py::test_the_orientation_survives", [
        Change("data/images", "_turn_of_xmp", "if rest[0]:", "if False:")]),
    "transparency of a mask on white": Mutation(
        "tests/data/test_odd_images.py::test_masks_are_read_right", [
        Change("data/pair_checks", "_of_transparency", "<= _SPREAD", "< 0")]),
    "a mask of 0 and 1 is used": Mutation(
        "tests/data/test_odd_images.py::test_masks_that_mean_something_else_are_refused", [
        Change("data/pair_checks", "_check_mask", "if high * level >= _SPREAD", "if high > 0")]),
    "small numbers in 16 bits without a mark": Mutation(
        "tests/data/test_odd_images.py::test_small_numbers_in_16_bits_are_marked", [
        Change("data/pair_checks", "_is_dark", "c.high < 16384", "c.high < 16")]),
    "tall images cropped at the top": Mutation(
        "tests/data/test_images.py::test_a_crop_keeps_the_centre", [
        Change("data/images", "crop_to", "(h - ch) // 2", "0")]),
    # --- cache keys
    "prompts keyed in lower case": Mutation("tests/encoding/test_keys.py", [
        Change("cache", "prompt_parts",
               'prompt if prompt.strip() else " "', 'prompt.lower() if prompt.strip() else " "')]),
    "latents keyed without the crop": Mutation("tests/encoding/test_keys.py", [
        Change("cache", "image_parts", "list(crop) if crop else None", "None")]),
    "prompts keyed without the crop": Mutation("tests/encoding/test_keys.py", [
        Change("cache", "prompt_parts", "list(crop) if crop and controls else None", "None")]),
    "prompts keyed without the images' sizes": Mutation("tests/encoding/test_keys.py", [
        Change("cache", "prompt_parts", "[list(s) for s in vl_sizes]", "[]")]),
    "latents keyed without the dtype": Mutation("tests/encoding/test_keys.py", [
        Change("cache", "image_parts", ', dtype=identity["dtype"]', "")]),
    "controls keyed as a set": Mutation("tests/encoding/test_keys.py", [
        Change("cache", "prompt_parts", "list(controls)", "sorted(controls)")]),
    "a suffix without its lost prefix": Mutation("tests/test_cache.py", [
        Change("cache", "EmbeddingCacheManager.load_cache", "None if prefix is None", "tensor if prefix is None")]),
    "a quantized text encoder under the same key": Mutation("tests/encoding/test_keys.py", [
        Change("models/components", "Components.identity",
               "f\"{text}-{self.quantize.get('text_encoder') or 'plain'}\"", "text")]),
    # --- encoding and packing
    "latents sampled instead of their mode": Mutation("tests/encoding/test_vae.py", [
        Change("models/encoders", "encode_images", ".latent_dist.mode()", ".latent_dist.sample()")]),
    "latents not normalised by the deviation": Mutation("tests/parity/test_pipelines.py", [
        Change("models/encoders", "encode_images", "(z - mean) / std", "z - mean")]),
    "latent pixels packed by columns": Mutation("tests/parity/test_pipelines.py", [
        Change("models/flow_matching", "pack_latents",
               "QwenImageEditPipeline._pack_latents(latents, B, C, h, w)",
               "QwenImageEditPipeline._pack_latents(latents.mT, B, C, w, h)"),
        Change("models/flow_matching", "unpack_latents",
               "QwenImageEditPipeline._unpack_latents(tokens, h, w, vae_scale_factor=1)",
               "QwenImageEditPipeline._unpack_latents(tokens, w, h, vae_scale_factor=1).mT")]),
    "a prefix kept after its images changed": Mutation("tests/encoding/test_precompute.py", [
        Change("encoding/encoder", "Encoder._prefix",
               "self._last_images == images", "True")]),
    "a prefix known by its pixels alone": Mutation("tests/encoding/test_precompute.py", [
        Change("encoding/encoder", "image_set",
               "repr(p.size).encode() + p.tobytes()", "p.tobytes()")]),
    "prompts after a prefix at its length": Mutation("tests/encoding/test_prompts.py", [
        Change("models/encoders", "encode_suffixes",
               "prefix.next, prefix.next + n", "prefix.count, prefix.count + n")]),
    "a suffix with its padding": Mutation("tests/encoding/test_prompts.py", [
        Change("models/encoders", "encode_suffixes", "h[:len(r)]", "h")]),
    "the control's size for the target": Mutation("tests/encoding/test_precompute.py", [
        Change("encoding/jobs", "missing_tensors",
               "MissingTensor(sample, name, keys[name], target)",
               "MissingTensor(sample, name, keys[name], controls[0] if controls else target)")]),
    "decoded pixels not rounded": Mutation(
        "tests/encoding/test_vae.py::test_pixels_are_rounded_as_by_the_pipelines", [
        Change("models/encoders", "decode_latents", ".round()", "")]),
    "all controls in the group of the first": Mutation("tests/encoding/test_precompute.py", [
        Change("encoding/jobs", "missing_tensors", 'int(name.split(".")[1])', "0")]),
    # --- precompute
    "an error in one sample skips its group": Mutation(
        "tests/encoding/test_precompute.py::test_a_nan_skips_its_own_sample", [
        Change("encoding/precompute", "Filling.encode", "len(samples) > 1", "False")]),
    "processes encode the same samples": Mutation(
        "tests/encoding/test_precompute.py::test_each_process_encodes_its_share", [
        Change("encoding/jobs", "shard", "work[rank::world]", "work")]),
    "entries reused without a look": Mutation(
        "tests/encoding/test_precompute.py::"
        "test_a_damaged_entry_is_noticed_and_a_sample_that_cannot_be_used_is_named", [
        Change("encoding/precompute", "scan_cache",
               "dataset.keys(i).values() if verify else ()", "()")]),
    "space counted without the table": Mutation(
        "tests/encoding/test_precompute.py::test_the_disk_is_filled_in_whole_blocks", [
        Change("encoding/precompute", "check_space", "[*entries, *table]", "[*entries]")]),
    "strict ignored in precompute": Mutation(
        "tests/encoding/test_precompute.py::test_a_nan_skips_its_own_sample", [
        Change("encoding/precompute", "Filling.encode", "if self.dataset.strict: raise", "pass")]),
    "validation pairs not precomputed": Mutation(
        "tests/test_cache.py::"
        "test_training_from_a_packed_cache_without_encoders_needs_the_validation_pairs", [
        Change("training/run_data", "RunData.beside", "judged = self._val_samples()", "judged = []")]),
    # --- single files
    "the model's text encoder, not that of the file": Mutation("tests/models/test_text_encoder_file.py", [
        Change("models/components", "Components.place_of", "self.homes.get(name, self.folder)", "self.folder")]),
    "another text encoder, the same cache": Mutation(
        "tests/models/test_text_encoder_file.py::test_the_cache_knows_it_by_its_content", [
        Change("models/components", "component_digest", "own_weights(folder)", "[]")]),
    # --- folder owner
    "a thread's new file looks like that of a dead run": Mutation(
        "tests/training/test_output_folder.py"
        "::test_a_thread_that_reads_the_file_at_once_finds_its_owner_alive", [
        Change("core/folder_owner", "_create", "_held.add(owner.token)", "pass")]),
    "a dead owner's file is removed without a look at who holds it now": Mutation(
        "tests/training/test_output_folder.py::test_the_file_of_one_who_came_meanwhile_stays", [
        Change("core/folder_owner", "_remove_dead", "not came_meanwhile", "True")]),
    # --- backward pairs
    "no pair's direction is judged": Mutation("tests/extras/test_backward_pairs.py", [
        Change("extras/backward_pairs", "pairs_from_results", "judged >= 3", "judged > 99")]),
    # --- identity pairs
    "a share of the pairs, not of all samples": Mutation("tests/data/test_identity_pairs.py", [
        Change("data/identity_pairs", "identity_count", "share / (1 - share)", "share")]),
    "identity pairs with the caption of the edit": Mutation("tests/data/test_identity_pairs.py", [
        Change("data/identity_pairs", "_identity", "prompt=KEEP", "prompt=s.prompt")]),
    "identity pairs of held-out images": Mutation("tests/data/test_identity_pairs.py", [
        Change("training/run_data", "RunData.identity_data",
               "config.train.seed, held_out", "config.train.seed")]),
    "identity pairs not precomputed": Mutation("tests/data/test_identity_pairs.py", [
        Change("training/run_data", "RunData.beside",
               "self.identity_data(self.subset(dataset, whole)) if whole else None", "None")]),
    # --- evaluation
    "held-out loss in training mode": Mutation("tests/evaluation/test_evaluate.py", [
        Change("sampling/edits", "eval_mode", "transformer.eval()", "pass")]),
    "the transformer stays in evaluation mode": Mutation("tests/evaluation/test_evaluate.py", [
        Change("sampling/edits", "eval_mode", "transformer.train(was)", "pass")]),
    "the LoRA for few steps stays": Mutation("tests/evaluation/test_eval_schedule.py", [
        Change("evaluation/eval_images", "added_lora",
               "remove_loras(transformer, [name])", "pass")]),
    "few steps without the trained adapter": Mutation("tests/evaluation/test_eval_schedule.py", [
        Change("evaluation/eval_images", "added_lora", "before | {name: weight}", "{name: weight}")]),
    "few steps with the model's schedule": Mutation("tests/evaluation/test_eval_schedule.py", [
        Change("evaluation/eval_images", "render_eval_images", "sampling.overrides", "{}")]),
    "held-out noise of one draw": Mutation("tests/evaluation/test_evaluate.py", [
        Change("evaluation/validation_loss", "losses_at_sigma",
               'stable_seed("held out noise", i, draw)', 'stable_seed("held out noise", i)')]),
    "held-out levels of one pair": Mutation("tests/evaluation/test_evaluate.py", [
        Change("evaluation/validation_loss", "fixed_sigmas",
               'stable_seed("held out level", sample_id, draw, k)',
               'stable_seed("held out level", draw, k)')]),
    "levels weighed alike": Mutation("tests/evaluation/test_evaluate.py", [
        Change("evaluation/validation_loss", "level_weight", "sigma**2 * s", "0 * sigma + s")]),
    "interval of a normal distribution": Mutation("tests/evaluation/test_evaluate.py", [
        Change("evaluation/validation_loss", "confidence_interval", "t_quantile(n - 1)", "1.96")]),
    "evaluation trains the raw weights": Mutation("tests/evaluation/test_evaluate.py::test_the_ema_is_what_is_evaluated", [
        Change("evaluation/evaluate", "evaluate_now", "trainer.ema_weights(),", "")]),
    "distance of an image from its control": Mutation("tests/evaluation/test_evaluate.py", [
        Change("evaluation/eval_images", "measured",
               "image_error(image, target)", "image_error(image, case.shown[0])")]),
    "drift of the target": Mutation("tests/evaluation/test_drift.py", [
        Change("evaluation/eval_images", "measured", "case.control", "case.shown[-1]")]),
    "drift outside and inside exchanged": Mutation(
        "tests/evaluation/test_drift.py::test_the_error_inside_is_that_of_the_edit", [
        Change("evaluation/eval_images", "drift_of", "changed_region(at_size(control, target), target)",
               "~changed_region(at_size(control, target), target)")]),
    "swap test with the adapter": Mutation("tests/extras/test_swaps.py", [
        Change("extras/diagnostics", "swap_test",
               "nullcontext() if use_lora", "nullcontext() if not use_lora")]),
    "a rate that is too high is not named": Mutation("tests/evaluation/test_advice.py", [
        Change("evaluation/validation_loss", "direction", "ratio.low > 1", "ratio.low > 100")]),
    "an image behind a blank sheet is better": Mutation("tests/evaluation/test_advice.py", [
        Change("evaluation/validation_loss", "progress_of_images", "m.image > m.blank", "m.image > 9 * m.blank")]),
    "the loss before the first step does not count for best": Mutation(
        "tests/evaluation/test_advice.py::test_a_run_at_ten_times_the_rate_names_the_rate_and_has_no_best_checkpoint", [
            Change("training/checkpoint", "CheckpointCallback.on_train_begin",
                   "self.better(trainer.state) and trainer.global_step",
                   "t.global_step and self.better(t.state)")]),
    "exchanged with the same control": Mutation(
        "tests/evaluation/test_evaluate.py::"
        "test_a_pair_gets_the_controls_of_another_of_its_sizes", [
        Change("evaluation/validation_loss", "partners", "if other != digest", "")]),
    # --- sampling
    "guidance without the norm": Mutation("tests/parity/test_pipelines.py", [
        Change("models/flow_matching", "true_cfg",
               "* (torch.norm(cond, dim=-1, keepdim=True) / torch.norm(comb, dim=-1, "
               "keepdim=True))",
               "")]),
    "negative prompt of the first edit": Mutation("tests/test_predict.py::test_each_edit_of_a_list_has_its_own_negative_prompt", [
        Change("sampling/edits", "encode_edits",
               "texts[_encoded_as(e.negative)] if guidance", "texts[_encoded_as(edits[0].negative)] if guidance")]),
    "generator of the caller not used": Mutation("tests/test_predict.py::test_a_generator_of_the_caller_draws_the_noise", [
        Change("sampling/denoising", "start_noise", "generator or", "")]),
    "shift without the overrides": Mutation("tests/test_predict.py", [
        Change("sampling/denoising", "sampling_schedule",
               "shift_mu(tokens, own.config, steps)", "shift_mu(tokens, config, steps)")]),
    "predict crops": Mutation("tests/test_predict.py::test_an_image_is_never_cropped", [
        Change("predict", "Predictor.predict", "replace(self.geometry(), crop=False)", "self.geometry()")]),
    # --- checkpoints
    "generator not restored": Mutation(
        "tests/training/test_randomness.py::test_a_resumed_run_continues_torchs_generator", [
        Change("training/resume", "RunResume.restore",
               "if saved.rng is not None: torch.set_rng_state(saved.rng)", "")]),
    "settings of the optimizer stay the old ones": Mutation("tests/training/test_stopping.py", [
        Change("training/optimizers/base", "Optimizer.load", "group.update(settings)", "pass")]),
    "the best loss forgotten": Mutation("tests/training/test_stopping.py", [
        Change("training/callbacks", "RunState.restore",
               'was.get("best") and tuple(was["best"])', "None")]),
    "the mean restored from the raw weights": Mutation("tests/training/test_stopping.py", [
        Change("training/resume", "RunResume.restore", "put_back(tr, load_file(file))", "")]),
    # --- planning and placement
    "gradients left out of the plan": Mutation("tests/planning/test_training_memory.py::test_adapter_gradient_and_optimizer_bytes", [
        Change("planning/memory", "memory_of",
               '"gradients", share * trained * 4', '"gradients", share * trained * 0')]),
    "checkpointing ignores the batch": Mutation("tests/planning/test_training_memory.py", [
        Change("planning/memory", "_saved_by_checkpoints",
               "(img + txt) * q.dim", "(img + txt) // q.batch * q.dim")]),
    "the runtime left out of the plan": Mutation("tests/planning/test_training_memory.py::test_a_gpu_needs_memory_for_its_runtime_too", [
        Change("planning/memory", "memory_of", "if gpu", "if False")]),
    "evaluation leaves the VAE on the GPU": Mutation("tests/devices/test_placement.py", [
        Change("devices/placement", "temporarily_load",
               "components.drop(*(n for n in names if n not in before))", "pass")]),
    "memory reused before its copy": Mutation("tests/devices/test_block_swap.py", [
        Change("devices/strategies/offload", "OffloadedInputs.put",
               "if t.is_cuda: t.record_stream(self.streams.side)", "")]),
    "a block computes before its copy": Mutation("tests/devices/test_block_swap.py", [
        Change("devices/strategies/block_swap", "BlockSwap.prepare_block",
               "self.streams.wait(self.events[n % len(self.slots)])", "pass")]),
    "what other processes have trained is never loaded": Mutation("tests/devices/test_edit_model.py", [
        Change("devices/edit_model", "EditModel.get", "self.finish_postponed()", "pass")]),
    "offloaded inputs cost no host memory": Mutation("tests/devices/test_edit_model.py", [
        Change("devices/strategies/offload", "OffloadedActivations.host_bytes", "q.layers * inputs", "0")]),
    "EMA left out of the plan": Mutation(
        "tests/planning/test_training_memory.py::"
        "test_a_running_mean_takes_as_much_as_the_adapter", [
        Change("planning/memory", "memory_of", "if q.ema", "if False")]),
    "the exchange between processes left out of the plan": Mutation("tests/planning/test_hand_sums.py", [
        Change("planning/memory", "memory_of", "if q.processes > 1", "if False")]),
    "compiling counted as set, not as planned": Mutation("tests/planning/test_hand_sums.py", [
        Change("planning/plan", "step_query", "compiled=plan.compile.value", "compiled=bool(config.train.compile)")]),
    "half the working memory": Mutation("tests/planning/test_hand_sums.py", [
        Change("planning/memory", "memory_of", "peak_activations(q)", "peak_activations(q) // 2")]),
    "the decoder placed without its memory": Mutation("tests/evaluation/test_decoder.py", [
        Change("planning/parts", "choose_decoder", "facts.needed <= SHARE * facts.free", "True")]),
    "the decoder's work left out": Mutation("tests/evaluation/test_decoder.py", [
        Change("planning/facts", "decoding_facts", "weights + work", "weights")]),
    "decoding again on the same GPU": Mutation("tests/evaluation/test_decoder.py", [
        Change("evaluation/eval_images", "ImageDecoder.leave_gpu", 'self.device = "cpu"', "pass")]),
    "out-of-memory of the decoder forgotten": Mutation("tests/evaluation/test_decoder.py", [
        Change("evaluation/eval_images", "ImageDecoder.leave_gpu",
               "self.trainer.planner.learn(decoder_failed=failed)", "pass")]),
    "bfloat16 decoded on the CPU": Mutation("tests/evaluation/test_decoder.py", [
        Change("evaluation/eval_images", "ImageDecoder.decoded", "vae.to(torch.float32)", "pass")]),
    "the card's total counts, whatever is free": Mutation("tests/planning/test_doctor.py", [
        Change("planning/decisions", "room_of", "gpu.free is None", "True")]),
    "what torch holds is not ours": Mutation("tests/planning/test_doctor.py", [
        Change("planning/facts", "_can_have", " + torch.cuda.memory_reserved(n)", "")]),
    "a process asks the others' GPUs": Mutation("tests/planning/test_doctor.py", [
        Change("planning/facts", "_can_have", "launched and", "False and")]),
    "a driver's error passed on": Mutation("tests/training/test_stopping.py", [
        Change("training/stopping", "is_driver_error", "isinstance(error, RuntimeError)", "False")]),
    "memory that ran out called the driver's fault": Mutation("tests/training/test_stopping.py", [
        Change("training/stopping", "memory_advice", "and not is_out_of_memory(e)", "")]),
    "the checkpoint being written left out": Mutation("tests/planning/test_disk_space.py", [
        Change("planning/disk_space", "kept_checkpoints",
               "_holds_out(train, pairs) + 1", "_holds_out(train, pairs)")]),
    "checkpoints ordered by the clock": Mutation("tests/training/test_output_folder.py", [
        Change("training/checkpoint", "save_order", "int(state.get(\"saves\") or 0)", "0")]),
    "a dead owner that lives on": Mutation("tests/training/test_output_folder.py", [
        Change("core/folder_owner", "is_alive",
               "bool(owner.start) and process_start(owner.pid) == owner.start", "True")]),
    "a taken folder that is written": Mutation("tests/training/test_output_folder.py", [
        Change("training/resume", "RunResume.check_owned", "if o.lost", "if False")]),
    "estimates that refuse a run": Mutation("tests/planning/test_disk_space.py", [
        Change("planning/disk_space", "_limit", "if not i.estimated", "")]),
    "numbers without an end": Mutation("tests/core/test_bad_configurations.py", [
        Change("core/section", "Section", ", allow_inf_nan=False", "")]),
    "one position too many": Mutation("tests/encoding/test_prompts.py", [
        Change("models/variants/text_to_image", "QwenImage", "POSITIONS - max", "POSITIONS + 1 - max")]),
    "held memory counted as taken": Mutation(
        "tests/devices/test_placement.py::test_what_loaded_components_hold_counts_as_free", [
        Change("planning/parts", "prediction_facts",
               "free[device] += sizes[part]", "pass")]),
    "placed in training mode": Mutation(
        "tests/devices/test_placement.py::"
        "test_a_prediction_during_training_leaves_every_component_where_it_was", [
        Change("devices/placement", "place_component",
               "components.move(name, torch.device(choice.device)).eval()",
               "components.move(name, torch.device(choice.device))")]),
    # --- pairs and drift
    "shift measured from the target to the control": Mutation("tests/data/test_alignment.py", [
        Change("data/alignment", "_mapped",
               "p @ _matrix(t).T + t[:2]", "p @ _matrix(t).T - t[:2]")]),
    "rotation with the other sign": Mutation("tests/data/test_alignment.py", [
        Change("data/alignment", "_alignment", "math.degrees(t[4])", "-math.degrees(t[4])")]),
    "scales of both directions exchanged": Mutation("tests/data/test_alignment.py", [
        Change("data/alignment", "_alignment", "t[:4]", "(t[0], t[1], t[3], t[2])")]),
    "zoom is no misfit": Mutation("tests/data/test_alignment.py::test_words_of_the_report", [
        Change("data/alignment_check", "CheckedPair.misfits", "max(ZOOMED, 1 / side)", "1.")]),
    "kept alignments known by the target alone": Mutation(
        "tests/data/test_alignment.py::test_the_control_that_fits_counts", [
        Change("data/alignment_check", "_kept",
               'f"{source_digest(control)} {source_digest(target)}"',
               'f"{source_digest(target)}"')]),
    "inside and outside of the edit exchanged": Mutation("tests/evaluation/test_drift.py", [
        Change("evaluation/eval_images", "inside_and_outside",
               "out = ~region", "out, row, region = region, {}, ~region")]),
    "detail of the target over that of the result": Mutation("tests/evaluation/test_drift.py", [
        Change("evaluation/eval_images", "drift_of",
               "detail(edited) / energy", "energy / detail(edited)")]),
    "drift said of the targets' own": Mutation(
        "tests/evaluation/test_drift.py::test_words_come_with_large_and_certain_drift_only", [
        Change("evaluation/eval_images", "say_drift", "notable(rows)", 'notable(rows, "target")')]),
    "edit masks inverted": Mutation("tests/data/test_edit_masks.py", [
        Change("models/flow_matching", "edit_mask", ".clamp(max=1)", ".clamp(max=1).neg() + 255")]),
    "edit masks keyed without the control": Mutation("tests/data/test_edit_masks.py", [
        Change("cache", "edit_mask_parts",
               "dict(target=target, control=control, **EDIT_MASK_RULE)", "dict(target=target, **EDIT_MASK_RULE)")]),
    "edit masks for samples with a mask image": Mutation("tests/data/test_edit_masks.py", [
        Change("data/dataset", "ImageDataset.wants_edit_mask", "s.mask is None and", "")]),
    "a diverging setup learns": Mutation("tests/extras/test_overfit.py", [
        Change("extras/diagnostics", "_verdict", 'return "too high"', 'return "learns"')]),
    # --- the ComfyUI workflow
    "an unguided workflow scales as a guided one": Mutation("tests/extras/test_comfyui_workflow.py", [
        Change("extras/comfyui_workflow", "unused_nodes", "f.true_cfg_scale <= 1", "f.true_cfg_scale < 1")]),
    "grid lines of half the period count": Mutation("tests/extras/test_with_lightning.py", [
        Change("extras/with_lightning", "line_energy",
               "np.arange(1, PERIOD // 2, 2)", "np.arange(1, PERIOD // 2)")]),
    "a photograph's own pattern is blamed": Mutation("tests/extras/test_with_lightning.py", [
        Change("extras/with_lightning", "grid_lines",
               "max([1., *(line_energy(luma(other), axis).ratio for other in own)])", "1.")]),
    "Lightning always at full strength": Mutation("tests/extras/test_with_lightning.py", [
        Change("evaluation/compare", "denoise_columns",
               "added_lora(tr, c.few_steps, c.few_steps_weight)", "added_lora(tr, c.few_steps)")]),
    "a LoRA of another model is compared": Mutation("tests/extras/test_with_lightning.py", [
        Change("extras/with_lightning", "_few_step_file",
               'check_made_for(trainer, "lightning", file, info)', "pass")]),
    "links to a node that was taken out end": Mutation("tests/extras/test_comfyui_workflow.py", [
        Change("extras/comfyui_workflow", "passed_on", "return value", "return None")]),
    # --- remote shards
    "a shard's digest is not checked": Mutation(
        "tests/extras/test_remote_shards.py::"
        "test_one_wrong_byte_of_a_shard_is_visible_at_once_and_nothing_of_it_is_kept", [
        Change("extras/remote_shards", "_chunks",
               "digest and found.hexdigest() != digest", "False")]),
    "the most recently used shard is deleted": Mutation(
        "tests/extras/test_remote_shards.py::test_the_local_copy_stays_below_its_limit", [
        Change("extras/remote_shards", "LocalCopy.files",
               "sorted(found)", "sorted(found, reverse=True)")]),
    "local copies without a limit": Mutation(
        "tests/extras/test_remote_shards.py::test_the_local_copy_stays_below_its_limit", [
        Change("extras/remote_shards", "LocalCopy.make_room", "total + size <= self.limit and", "")]),
    "deleted shards stay open": Mutation(
        "tests/extras/test_remote_shards.py::test_the_local_copy_stays_below_its_limit", [
        Change("extras/remote_shards", "RemoteStore._file",
               "if not os.fstat(opened.fileno()).st_nlink:", "if False:")]),
    "a bad local copy is not fetched again": Mutation(
        "tests/extras/test_remote_shards.py::test_a_local_copy_that_changed_is_fetched_again", [
        Change("core/cache_layers", "read_entry",
               "if not layer.renew(kind, key): raise", "raise")]),
    "an index is known by its URL alone": Mutation(
        "tests/extras/test_remote_shards.py::test_a_new_version_at_the_same_url_is_read", [
        Change("extras/remote_shards", "RemoteStore._index",
               '{key: value for key, value in found[INDEX].items() if key != "name"}', "{}")]),
    "a look fetches shards": Mutation("tests/extras/test_remote_shards.py", [
        Change("core/cache_layers", "ShardStore.header",
               "ShardStore.payload(self, kind, key)", "self.payload(kind, key)")]),
    "passwords in messages": Mutation(
        "tests/extras/test_remote_shards.py::test_commands_accept_a_url_and_hide_its_credentials", [
        Change("core/cache_layers", "without_secrets", "_plain_address", 'r"\\g<0>"')]),
    # --- the index of a packed cache
    "a database is opened without its digest": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_damaged_database_never_reaches_sqlite", [
        Change("core/packed_index", "EntryDatabase._check_file",
               'file_digest(self.path) != self.facts["sha256"]', "False")]),
    "a database is not checked when it is opened": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_missing_or_exchanged_database_never_reaches_sqlite", [
        Change("core/packed_index", "EntryDatabase._open", "self._check_file()", "pass")]),
    "a write-ahead log is read": Mutation(
        "tests/core/test_packed_index.py::"
        "test_files_beside_the_database_are_not_read", [
        Change("core/packed_index", "_open_read_only", '"?mode=ro&immutable=1"', '"?mode=ro"')]),
    "a path is not quoted": Mutation(
        "tests/core/test_packed_index.py::"
        "test_paths_with_odd_characters", [
        Change("core/packed_index", "_open_read_only",
               "path.absolute().as_uri()", "f'file:{path.absolute()}'")]),
    "a database can be written": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_connection_refuses_to_write", [
        Change("core/packed_index", "_open_read_only", '"?mode=ro&immutable=1"', '""'),
        Change("core/packed_index", "_open_read_only", '"query_only=ON", ', "")]),
    "any tables will do": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_database_with_other_tables", [
        Change("core/packed_index", "EntryDatabase._open",
               "_has_our_tables(opened.connection)", "True")]),
    "messages of SQLite as they are": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_malformed_schema_is_one_line", [
        Change("core/packed_index", "_in_one_line",
               're.sub(r"[^ -~]+", " ", str(error))', "str(error)")]),
    "places are not checked": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_value_that_is_no_place_in_a_shard", [
        Change("core/packed_index", "EntryTable._one", "if not inside", "if False")]),
    "numbers may be of any type": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_value_that_is_no_place_in_a_shard", [
        Change("core/packed_index", "_is_count", "type(value) is int and value >= 0", "True")]),
    "headers may be of any type": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_header_that_is_no_text_or_gone", [
        Change("core/packed_index", "EntryTable.__getitem__",
               "not isinstance(row[3], str)", "False")]),
    "listed keys need not grow": Mutation(
        "tests/core/test_packed_index.py::"
        "test_pages_that_lead_in_a_circle_end", [
        Change("core/packed_index", "EntryTable.sizes", "and key > last", "")]),
    "listed keys may be anything": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_key_that_is_no_key", [
        Change("core/packed_index", "EntryTable.sizes", "is_key(key) and", "")]),
    "a connection is used after a fork": Mutation(
        "tests/core/test_packed_index.py::"
        "test_each_process_has_its_own_connection", [
        Change("core/packed_index", "EntryDatabase._opened",
               "if os.getpid() not in held: held[os.getpid()] = self._open()",
               "if 0 not in held: held[0] = self._open()"),
        Change("core/packed_index", "EntryDatabase._opened",
               "return held[os.getpid()]", "return held[0]")]),
    "one connection for all threads": Mutation(
        "tests/core/test_packed_index.py::"
        "test_each_thread_has_its_own_connection", [
        Change("core/packed_index", "EntryDatabase.__init__",
               "threading.local()", "type('Shared', (), {})()")]),
    "connections stay open": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_connection_is_closed_with_its_layer", [
        Change("core/packed_index", "_close", "current() == process", "False")]),
    "a full disk in the words of SQLite": Mutation(
        "tests/core/test_packed_index.py::"
        "test_a_full_disk_is_one_sentence_and_leaves_nothing", [
        Change("core/packed_index", "write_database", 'if "full" not in str(e): raise', "raise")]),
    "too few bytes for a database": Mutation(
        "tests/core/test_packed_index.py::"
        "test_what_is_needed_is_never_less_than_what_is_written", [
        Change("core/packed_index", "_most_bytes", "else 2 * row", "else row * 5 // 4")]),
    "older indexes are always parsed whole": Mutation(
        "tests/core/test_packed_index.py::"
        "test_an_older_packed_cache_is_read", [
        Change("core/cache_layers", "_read_index",
               "return _checked(scan_older_index(path, data), path, sizes)", "raise OtherText")]),
    "an index may name another database": Mutation(
        "tests/core/test_packed_index.py::"
        "test_an_index_that_lies_about_its_database", [
        Change("core/cache_layers", "_checked_database", 'facts["name"] == DATABASE and', "")]),
    "shards at a URL may have other sizes": Mutation(
        "tests/extras/test_remote_shards.py::"
        "test_what_is_missing_is_named_before_work_begins", [
        Change("core/cache_layers", "_checked_database",
               'dict(zip(shards, index["sizes"])) if remote else {}', "{}")]),
    "a damaged local copy of a database stays": Mutation(
        "tests/extras/test_remote_shards.py::"
        "test_a_local_copy_that_changed_is_fetched_again", [
        Change("extras/remote_shards", "_fetch_database",
               'file_digest(path) == facts["sha256"]', "True")]),
    "a database is deleted before its shards": Mutation(
        "tests/extras/test_remote_shards.py::"
        "test_the_local_copy_stays_below_its_limit", [
        Change("extras/remote_shards", "RemoteStore._use_database",
               "self.copy.touch(self.database.path)", "pass")]),
    "a deleted database stays open": Mutation(
        "tests/extras/test_remote_shards.py::"
        "test_a_database_that_was_deleted_here_is_closed_and_fetched_again", [
        Change("extras/remote_shards", "RemoteStore._use_database",
               "self.database.close_if_deleted()", "pass")]),
    # --- grids
    "matched grids ignore the setting": Mutation("tests/data/test_grids.py", [
        Change("data/images", "Geometry.target", "not self.match_grids", "True")]),
}
MUTATIONS |= of_basics.MUTATIONS | of_models.MUTATIONS | of_runs.MUTATIONS


def read_changed(texts):
    """Let the import system read these texts, and no compiled file of theirs."""
    texts = {str(path): text for path, text in texts.items()}
    loader = importlib.machinery.SourceFileLoader
    read, code = loader.get_data, loader.get_code

    def get_data(self, path):
        return texts[path].encode() if path in texts else read(self, path)

    def get_code(self, name):
        if self.path in texts: return compile(texts[self.path], self.path, "exec")
        return code(self, name)

    loader.get_data = get_data
    loader.get_code = get_code


def in_order(changes) -> list[str]:
    """All test files, those of the changed modules first."""
    folders = {Path(change.module).parent.name for change in changes}

    def rank(path):
        if is_own(path, changes): return 0
        if path.parent.name in folders: return 1
        return 2 if path.parent.name == "parity" else 3

    files = [p for p in sorted((ROOT/"tests").rglob("test_*.py")) if p.parent.name not in ("breakages", "lint")]
    return [str(path) for path in sorted(files, key=rank)]


def is_own(path, changes) -> bool:
    """Is it the test file of a changed module?"""
    return Path(path).stem in {f"test_{Path(change.module).name}" for change in changes}


def attempts(mutation) -> list[list[str]]:
    """What is run until something fails: the named test, its file, the module's own file, all."""
    file = mutation.test.partition("::")[0]
    ordered = in_order(mutation.changes)
    own = [path for path in ordered if is_own(path, mutation.changes)]
    near = [[mutation.test], [file]] if mutation.test != file else [[file]]
    if not (ROOT/file).is_file(): near = []
    steps = [["-m", OF_EACH_CHANGE, *tests] for tests in [*near, own] if tests]
    return [*steps, ["-m", EVERYDAY, *ordered]]


def run_in_child(mutation, log) -> int:
    """Start a process that runs the tests with the mutation; its id."""
    pid = os.fork()
    if pid: return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    read_changed(changed_files(mutation.changes))
    import pytest
    options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["--basetemp", f"{log}.tmp"]
    code = 0
    for step in attempts(mutation):
        if code in (0, 4, 5): # 4, 5: the named test is called something else now
            code = int(pytest.main([*options, *step]))
    if not code:
        code = run_notebooks(mutation.changes)
    os._exit(code)


def run_notebooks(changes) -> int:
    """Run the changed modules' notebooks; 1 if one fails."""
    for module in sorted({change.module for change in changes}):
        if not notebook_passes(module, [c for c in changes if c.module == module]):
            print(f"FAILED notebook of {module}", flush=True)
            return 1
    return 0


def notebook_passes(module, changes) -> bool:
    """Run the module's notebook with the same changes in its exported cells, as nbdev_test does."""
    import nbdev.test as runner
    from execnb.nbio import read_nb
    from nbdev.config import get_config
    from nbdev.process import NBProcessor
    source = ROOT/"qie_nb"/f"{module}.py"
    written_in = re.search(r"File to edit: (\S+)\.$", source.read_text(), re.M)
    path = source.parent/written_in[1]
    nb = read_nb(path)
    cells = {n: c.source for n, c in enumerate(nb.cells) if c.source.startswith("#| export")}
    for n, text in changed_cells(cells, changes, path.name).items():
        nb.cells[n].source = text

    def process(name, **options):
        return NBProcessor(name, nb=nb, **options)

    runner.NBProcessor = process
    return runner.test_nb(path.resolve(), skip_flags=get_config().tst_flags.split())[0]


def judge(log, code) -> str:
    """The test that noticed the mutation, or ""."""
    text = Path(log).read_text(errors="replace")
    found = re.findall(r"^(?:FAILED|ERROR) (notebook of \S+|\S+)", text, re.M)
    if code == 1 and found: return found[0]
    if code: raise SystemExit(f"the tests did not run: see {log}")
    return ""


def chosen(words) -> list[str]:
    """The mutations whose name contains one of the words, or all."""
    return [name for name in MUTATIONS if not words or any(word in name for word in words)]


def that_fit(names) -> dict[str, Mutation]:
    """Those mutations that fit the code. Prints the others."""
    fitting = {}
    for name in names:
        try:
            changed_files(MUTATIONS[name].changes)
        except Misfit as e:
            print(f"not run: {name}: {e}", flush=True)
        else:
            fitting[name] = MUTATIONS[name]
    return fitting


def run(todo, workers) -> dict[str, str]:
    """{mutation: the test that noticed it, or ""}"""
    folder = tempfile.mkdtemp()
    left, running, results = list(todo), {}, {}
    while left or running:
        while left and len(running) < workers:
            name = left.pop(0)
            log = f"{folder}/{len(todo) - len(left)}"
            running[run_in_child(todo[name], log)] = (name, log, time.time())
        pid, status = os.wait()
        name, log, began = running.pop(pid)
        results[name] = judge(log, os.waitstatus_to_exitcode(status))
        seconds = time.time() - began
        noticed = results[name] or "SURVIVED"
        print(f"{len(results)}/{len(todo)} {name}: {noticed} ({seconds:.0f} s)", flush=True)
    return results


def noticed_elsewhere(results) -> list[str]:
    """A sentence for each mutation that another file noticed than the one in the table."""
    sentences = []
    for name, test in results.items():
        named = MUTATIONS[name].test.partition("::")[0]
        if test and test.partition("::")[0] != named:
            sentences.append(f"update the table: {name!r} was noticed by {test}, not by {named}")
    return sentences


def main() -> int:
    """Run the mutations; 1 if one survived or could not be run."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("words", nargs="*", help="only mutations whose name contains one of these")
    p.add_argument("--workers", type=int, default=2)
    a = p.parse_args()
    names = chosen(a.words)
    todo = that_fit(names)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT/"tests")]
    import diffusers, peft, pytest, torch, transformers # noqa: F401
    results = run(todo, a.workers)
    for sentence in noticed_elsewhere(results):
        print(sentence)
    survived = [name for name in names if not results.get(name)]
    rest = f"; not: {'; '.join(survived)}" if survived else ""
    print(f"{len(names) - len(survived)} of {len(names)} mutations are noticed{rest}")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
