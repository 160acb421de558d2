"""GPUs by their names, and the settings that a preset gives for a size."""
import pytest

from qie_nb.core.presets import parse_gpu_name, preset_settings, with_preset


@pytest.mark.parametrize("written, name, gib, bf16, count", [
    ("T4", "T4", 14.56, False, 1), ("2xT4", "T4", 14.56, False, 2),
    ("A100", "A100 40", 39.4, True, 1), ("NVIDIA A100-SXM4-80GB", "A100 80", 79.2, True, 1),
    ("RTX 4090 x 2", "RTX 4090", 23.6, True, 2)])
def test_a_gpu_has_the_memory_that_its_driver_reports(written, name, gib, bf16, count):
    found = parse_gpu_name(written)
    assert (found.name, found.bf16, found.count) == (name, bf16, count)
    assert found.bytes == int(gib * 2**30)


def test_a_number_is_gigabytes_of_ten():
    assert parse_gpu_name("24").bytes == parse_gpu_name("24 GB").bytes == 24 * 10**9


@pytest.mark.parametrize("size, control_area, quantize", [
    (512, None, "qfloat8"), (528, None, "nf4"), (1024, 512 * 512, "nf4"), (512, 2**20, "nf4")])
def test_the_larger_of_target_and_control_decides(size, control_area, quantize):
    assert preset_settings("rtx4080", size, control_area)["model.quantize"] == quantize


def test_what_the_user_wrote_lies_over_the_preset():
    own = dict(preset="rtx4080", model=dict(quantize="none"), data=dict(image_size=[640, 512]))
    found = with_preset(own)
    assert found["model"]["quantize"] == "none" and found["data"]["image_size"] == [640, 512]
    assert found["data"]["control_area"] == 640 * 512
