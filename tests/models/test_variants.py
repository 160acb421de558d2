"""What is published of each model, which prompts, plans and other programs rely on."""
import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

from qie_nb.models.variants.base import variant_named
from qie_nb.models.components import VARIANTS

# name on the hub, name in other trainers, most images of its training, file for ComfyUI
PUBLISHED = {
    "v1": ("Qwen-Image-Edit", "qwen_image_edit", 1, "qwen_image_edit_fp8_e4m3fn.safetensors"),
    "2509": ("Qwen-Image-Edit-2509", "qwen_image_edit_plus", 3,
             "qwen_image_edit_2509_fp8_e4m3fn.safetensors"),
    "2511": ("Qwen-Image-Edit-2511", "qwen_image_edit_plus", 3,
             "qwen_image_edit_2511_bf16.safetensors"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_published_of_each_model(name):
    v = VARIANTS[name]
    found = (v.published_name, v.base_version, v.trained_images, v.comfyui.unet)
    assert found == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_hub_id_names_its_variant(name):
    assert variant_named(f"Qwen/{VARIANTS[name].published_name}").name == name
    assert variant_named("someone/another-edit").name == "v1", "it has no mark"


def test_sizes_are_those_of_the_pipelines():
    for v in (VARIANTS["2509"], VARIANTS["2511"]):
        assert (v.vl_area, v.control_area) == (plus.CONDITION_IMAGE_SIZE, plus.VAE_IMAGE_SIZE)
        assert v.comfyui.node_area == v.vl_area
    assert VARIANTS["v1"].comfyui.node_area == VARIANTS["v1"].control_area
