"""Break the library on purpose, one line at a time, and check that a test fails."""
import re, subprocess, sys
from pathlib import Path

import pytest

from helpers import broken, broken_copy
from mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
TESTS = "tests/training/test_step.py", "tests/parity/test_pipelines.py", "tests/end_to_end/test_main_job.py", "tests/test_cache_costs.py"
BREAKAGES = dict(
    flow_target_with_the_wrong_sign=[("models/flow_matching", "return eps.float() - x0.float()", "return x0.float() - eps.float()")],
    loss_on_control_tokens_too=[("models/flow_matching", "shapes))[0][:, :x_t.shape[1]]", "shapes))[0]"),
                        ("models/flow_matching", "    pred = pred[:, :target.shape[1]].float()\n", "    target = torch.cat([target, torch.zeros_like(pred[:, target.shape[1]:])], 1)\n")],
    control_width_and_height_swapped=[("encoding/encoder", 'else self.geometry.control(size)', 'else self.geometry.control(size)[::-1]')],
    embeddings_keyed_by_prompt_only=[("cache", "controls=list(controls)", "controls=[]")],
    a_shard_opened_for_every_read=[("core/cache_layers", "if (os.getpid(), shard) not in self.open_files:", "if True:")],
    zero_cond_t_lost=[("models/components", "use_safetensors=True)", "use_safetensors=True, **(dict(zero_cond_t=False) if name == 'transformer' else {}))")],
)

POSITIONS = dict( # of image tokens
    height_and_width_of_positions_swapped=[("encoding/prompts", "return index(ids, image_grid_thw=grid, **options)[0]", "return index(ids, image_grid_thw=grid, **options)[0][[0, 2, 1]]")],
    words_after_an_image_count_tokens=[("encoding/prompts", "next=int(positions.max()) + 1)", "next=positions.shape[-1])")],
    the_second_image_numbered_like_the_first=[("encoding/prompts", "return index(ids, image_grid_thw=grid, **options)[0]", "return index(ids, image_grid_thw=grid[:1].repeat(len(grid), 1), **options)[0]")],
    positions_not_in_a_key=[("models/components", "-{positions_of(self.variant)}\"", "\"")],
    positions_hook_registered_twice=[("models/components", ' or getattr(encoder, "has_image_positions", False)', "")],
    positions_of_the_installed_pipeline=[("models/components", 'return "3d" if variant.image_positions == "3d" else ', "return ")],
)

TEXT = dict( # samples without a control image
    text_encoded_with_the_edits_template=[("models/components", "if images else TEXT_TO_IMAGE)", "if images else variant.pipeline)")],
    text_template_not_in_a_key=[("cache", 'identity["template"] if controls else identity.get("text_template")', 'identity["template"]')],
    batches_with_and_without_controls_mixed=[("data/dataset", "(self.geometry.target(target), *(self.geometry.control(c) for c in controls))", "(self.geometry.target(target),)")],
    a_misnamed_control_trained_on_as_text=[("data/folders", "lone = lone and not rest and not unread", "lone = lone and not unread")],
    a_held_out_target_trained_on_alone=[("data/samples", "d or of.get(t, t)", "d or t")],
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BREAKAGES, *POSITIONS, *TEXT])
def test_a_breakage_is_noticed(name, tmp_path):
    tests = ["tests/parity/test_image_positions.py"] if name in POSITIONS else ["tests/parity/test_text_to_image.py"] if name in TEXT else TESTS
    run = subprocess.run([sys.executable, "-m", "pytest", "-m", "not slow", "-x", *tests], **broken_copy(ROOT, (BREAKAGES | POSITIONS | TEXT)[name], tmp_path))
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", run.stdout, re.M)
    print(f"{name}: {failed}")
    assert run.returncode == 1 and failed and "ImportError" not in run.stdout


def test_every_breakage_still_fits_the_code():
    for changes in (BREAKAGES | POSITIONS | TEXT | MUTATIONS).values():
        for path, text in broken(ROOT, changes).items(): compile(text, path, "exec")
