"""Break the library on purpose, one line at a time, and check that a test fails."""
import re
import subprocess
import sys

import pytest

from code_changes import Change, broken_copy

BREAKAGES = dict(
    flow_target_with_the_wrong_sign=[
        Change("models/flow_matching", "flow_target",
               "eps.float() - x0.float()", "x0.float() - eps.float()")],
    loss_on_control_tokens_too=[
        Change("models/variants/base", "Variant.velocity", "[:, :x_t.shape[1]]", ""),
        Change("models/flow_matching", "flow_loss", "pred = pred[:, :target.shape[1]].float()",
               "target = torch.cat([target, torch.zeros_like(pred[:, target.shape[1]:])], 1)")],
    control_width_and_height_swapped=[
        Change("encoding/jobs", "SampleInputs.size",
               "self.geometry.control(size)", "self.geometry.control(size)[::-1]")],
    embeddings_keyed_by_prompt_only=[
        Change("cache", "prompt_parts", "list(controls)", "[]")],
    a_shard_opened_for_every_read=[
        Change("core/cache_layers", "ShardStore._file",
               "(os.getpid(), shard) not in self.open_files", "True")],
    zero_cond_t_lost=[
        Change("models/components", "load_component",
               "use_safetensors=True",
               "use_safetensors=True, **(dict(zero_cond_t=False) if name == 'transformer' else "
               "{})")],
)

POSITIONS = dict( # of image tokens
    height_and_width_of_positions_swapped=[
        Change("models/encoders", "prefix_positions",
               "index(ids, image_grid_thw=grid, **options)[0]",
               "index(ids, image_grid_thw=grid, **options)[0][[0, 2, 1]]")],
    words_after_an_image_count_tokens=[
        Change("models/encoders", "encode_prefix",
               "int(positions.max()) + 1", "positions.shape[-1]")],
    the_second_image_numbered_like_the_first=[
        Change("models/encoders", "prefix_positions",
               "image_grid_thw=grid", "image_grid_thw=grid[:1].repeat(len(grid), 1)")],
    positions_not_in_a_key=[
        Change("models/variants/text_to_image", "QwenImage.prompt_identity",
               'f"{_digest(edit)}-{self.positions}"', 'f"{_digest(edit)}"')],
    positions_hook_registered_twice=[
        Change("models/components", "restore_image_positions",
               'or getattr(encoder, "has_image_positions", False)', "")],
    positions_of_the_installed_pipeline=[
        Change("models/variants/text_to_image", "QwenImage.positions",
               '"3d" if self.image_positions == "3d" else', "")],
)

TEXT = dict( # samples without a control image
    text_encoded_with_the_edits_template=[
        Change("models/variants/text_to_image", "QwenImage.text_template",
               "TEXT_TO_IMAGE", "self.pipeline")],
    text_template_not_in_a_key=[
        Change("cache", "prompt_parts",
               'identity["template"] if controls else identity.get("text_template")',
               'identity["template"]')],
    batches_with_and_without_controls_mixed=[
        Change("data/dataset", "ImageDataset.bucket", ", *(self.geometry.control(c) for c in controls)", ",")],
    a_misnamed_control_trained_on_as_text=[
        Change("data/folders", "_check_controls", "rest or unread", "unread")],
    a_held_out_target_trained_on_alone=[
        Change("data/samples", "_first_images", "d or of.get(t, t)", "d or t")],
)

TESTS = dict.fromkeys(BREAKAGES, [
    "tests/training/test_step.py", "tests/parity/test_pipelines.py",
    "tests/end_to_end/test_main_job.py", "tests/test_cache_costs.py"])
TESTS |= dict.fromkeys(POSITIONS, ["tests/parity/test_image_positions.py"])
TESTS |= dict.fromkeys(TEXT, ["tests/parity/test_text_to_image.py"])


@pytest.mark.weekly
@pytest.mark.parametrize("name", TESTS)
def test_a_breakage_is_noticed(name, tmp_path):
    """A test of the library's everyday ones fails with the broken code."""
    pytest_x = [sys.executable, "-m", "pytest", "-m", "not slow and not weekly", "-x"]
    how = broken_copy((BREAKAGES | POSITIONS | TEXT)[name], tmp_path)
    run = subprocess.run([*pytest_x, *TESTS[name]], **how)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", run.stdout, re.M)
    print(f"{name}: {failed}")
    assert run.returncode == 1 and failed and "ImportError" not in run.stdout
