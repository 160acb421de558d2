"""ComfyUI workflows: only nodes and inputs that ComfyUI has, both formats agree, sizes as in the training. benchmarks/comfyui.py runs ComfyUI itself."""
import hashlib, itertools, json, math
from collections import Counter
from pathlib import Path

import pytest

from qie_nb.data.images import Geometry
from qie_nb.extras import comfyui_workflow
from qie_nb.extras.comfyui_workflow import (
    NODES, WorkflowFacts, differences, encoded_squares, inputs_of, workflow_note, passed_on, vl_squares, template,
    unused_nodes, vl_expressions, vl_size, without, workflow, write_workflow)
from qie_nb.models.components import VARIANTS
from qie_nb.trainer import QwenImageEditTrainer
from helpers import settings
from loras import trained

FACTS = json.loads((Path(__file__).parent/"comfyui_nodes.json").read_text())["nodes"]
SIZES = [(1024, 1024), (1600, 1200), (1200, 1600), (1536, 1024), (1024, 1536), (1920, 1080), (1080, 1920), (1250, 1000), (1280, 720), (640, 427), (1184, 880), (900, 1350)]
NASTY = 'say "dusk"\n</script> {a|b} \\ ü'


def facts(variant="2511", controls=1, image_size=(512, 512), crop=False, area=512**2, **changes):
    v = VARIANTS[variant]
    geometry = Geometry(image_size, crop, area, v.vl_area)
    return WorkflowFacts(v.comfyui, "dusk.safetensors", geometry, controls, **dict(prompt=NASTY) | changes)


CASES = {
    **{v: facts(v) for v in VARIANTS},
    "three images": facts(controls=3),
    "cropped": facts(image_size=(1024, 768), crop=True),
    "text to image": facts(controls=0),
    "smaller result": facts("2509", 2, area=1024**2), "few steps": facts(steps=4, true_cfg_scale=1.0, shift=3.0, few_steps="Lightning-4steps.safetensors")}


def accepts(row, value): # as ComfyUI checks a field
    if "choices" in row and value not in row["choices"]: return False
    if row["type"] in ("INT", "FLOAT"): return row.get("min", -math.inf) <= value <= row.get("max", math.inf)
    return isinstance(value, dict(STRING=str, COMBO=str, BOOLEAN=bool)[row["type"]])


def problems(api): # as ComfyUI's validation finds them
    for number, node in api.items():
        known = FACTS[node["class_type"]]
        rows = known["required"] | known["optional"]
        yield from (f"{number} lacks {n}" for n in known["required"] if n not in node["inputs"])
        for name, value in node["inputs"].items():
            if name not in rows: yield f"{number} has no {name}"
            elif isinstance(value, list):
                sent = FACTS[api[value[0]]["class_type"]]["outputs"][value[1]]
                if sent not in rows[name]["type"].split(","): yield f"{number}.{name} gets {sent}"
            elif not accepts(rows[name], value): yield f"{number}.{name} does not take {value!r}"


@pytest.mark.parametrize("case", CASES)
def test_only_nodes_inputs_and_values_that_comfyui_has(case):
    api = workflow(CASES[case]).api()
    assert not list(problems(api)) and any(FACTS[n["class_type"]]["is_output"] for n in api.values())


def test_our_table_of_nodes_is_comfyuis():
    assert FACTS.keys() == NODES.keys()
    for kind, known in FACTS.items():
        ours = {name: (of, optional) for name, of, optional in inputs_of(kind)}
        assert ours == {n: (r["type"], need == "optional") for need in ("required", "optional") for n, r in known[need].items()}, kind
        assert NODES[kind][1] == known["outputs"], kind


def api_of(ui): # what ComfyUI's window sends
    links, out = {l[0]: l for l in ui["links"]}, {}
    for n in ui["nodes"]:
        if n["type"] == "MarkdownNote": continue
        values, inputs = list(n["widgets_values"]), {}
        for row in n["inputs"]:
            if "widget" in row:
                inputs[row["name"]] = values.pop(0)
                if row["name"] in ("seed", "image"): values.pop(0) # control after generate, upload
            if row["link"] is not None: inputs[row["name"]] = [str(links[row["link"]][1]), links[row["link"]][2]]
        assert not values
        out[str(n["id"])] = (n["type"], inputs)
    return out


@pytest.mark.parametrize("case", CASES)
def test_both_formats_are_the_same_graph(case):
    graph = workflow(CASES[case])
    ui = json.loads(json.dumps(graph.ui("a note")))
    assert api_of(ui) == {n: (d["class_type"], d["inputs"]) for n, d in json.loads(json.dumps(graph.api())).items()}
    nodes = {n["id"]: n for n in ui["nodes"]}
    assert len(nodes) == len(ui["nodes"]) == ui["last_node_id"] and len(ui["links"]) == ui["last_link_id"]
    for number, a, slot, b, to, of in ui["links"]: # each end names the link
        assert number in nodes[a]["outputs"][slot]["links"] and nodes[b]["inputs"][to]["link"] == number and nodes[a]["outputs"][slot]["type"] == of
        assert nodes[a]["order"] < nodes[b]["order"]
    boxes = [(n["pos"], n["size"]) for n in ui["nodes"]]
    overlap = lambda p, q: all(p[0][i] < q[0][i] + q[1][i] and q[0][i] < p[0][i] + p[1][i] for i in (0, 1))
    assert not [(p, q) for k, p in enumerate(boxes) for q in boxes[:k] if overlap(p, q)], "nodes lie on each other"


def scaled(node, size): # as ComfyUI's node computes it
    scale = math.sqrt(node["megapixels"] * 1024**2 / math.prod(size))
    return tuple(round(side * scale / node["resolution_steps"]) * node["resolution_steps"] for side in size)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("target, area", [(1024**2, 1024**2), (512**2, 512**2), (512**2, 1024**2)])
def test_sizes_are_those_of_the_training(variant, target, area):
    side = math.isqrt(target)
    f = facts(variant, image_size=(side, side), area=area)
    nodes = [d for d in workflow(f).nodes.values() if d["kind"] == "ImageScaleToTotalPixels"]
    control = next(d["inputs"] for d in nodes if d["title"] == "Control 1")
    result = next((d["inputs"] for d in nodes if d["title"] == "Result"), control)
    for size in SIZES:
        assert scaled(control, size) == f.geometry.control(size) and scaled(result, size) == f.geometry.target(size)
        if f.vl_area == f.node_area: assert encoded_squares(vl_size(size, f.vl_area, f.node_area), f.node_area) == vl_squares(f.geometry.vl(size)), size
    assert bool(differences(f)) == (f.vl_area != f.node_area or area > target)


def test_a_cropped_training_is_cropped_the_same_way():
    nodes = [d for d in workflow(CASES["cropped"]).nodes.values()]
    crop, empty = (next(d["inputs"] for d in nodes if d["title"] == t) for t in ("Crop", "Result"))
    assert (crop["width"], crop["height"], crop["crop"]) == (1024, 768, "center") and (empty["width"], empty["height"]) == (1024, 768)
    larger = workflow(facts(image_size=(512, 384), crop=True, area=1024**2))
    crop = next(d["inputs"] for d in larger.nodes.values() if d["title"] == "Crop")
    assert crop["width"] * 3 == crop["height"] * 4 and crop["width"] * crop["height"] >= 1024**2, "control images keep their details"


def test_expressions_for_comfyui_are_our_formula():
    for area in {v.comfyui.node_area for v in VARIANTS.values()}:
        for w, h in [*SIZES, (2000, 1000), (333, 1000)]:
            known = dict(sqrt=math.sqrt, round=round, max=max, min=min, a=w, b=h)
            assert tuple(eval(text, known) for text in vl_expressions(area, area)) == vl_size((w, h), area, area)


def kinds(f): return Counter(d["kind"] for d in workflow(f).nodes.values())


def test_each_variant_has_its_nodes():
    assert kinds(facts("v1"))["TextEncodeQwenImageEdit"] == 2 and kinds(facts("2509"))["TextEncodeQwenImageEditPlus"] == 2 and kinds(facts("2509"))["FluxKontextMultiReferenceLatentMethod"] == 0
    assert kinds(facts("2511"))["FluxKontextMultiReferenceLatentMethod"] == 2 and kinds(facts(controls=3))["ReferenceLatent"] == 6
    assert kinds(facts(controls=0))["CLIPTextEncode"] == 2 and kinds(facts(controls=0))["LoadImage"] == 0
    few = workflow(CASES["few steps"])
    assert [d["inputs"]["lora_name"] for d in few.nodes.values() if d["kind"] == "LoraLoaderModelOnly"] == ["Lightning-4steps.safetensors", "dusk.safetensors"]
    sampler = next(d["inputs"] for d in few.nodes.values() if d["kind"] == "KSampler")
    assert (sampler["steps"], sampler["cfg"]) == (4, 1.0) and kinds(CASES["few steps"])["CFGNorm"] == 0
    assert "Lightning-4steps.safetensors" in workflow_note(CASES["few steps"]) and "Comfy-Org" in workflow_note(facts())


def test_texts_are_data_and_too_many_images_are_refused(tmp_path):
    files = write_workflow(facts(), tmp_path/"dusk.safetensors")
    api = json.loads(files.api.read_text(encoding="utf-8"))
    assert [n["inputs"]["prompt"] for n in api.values() if "prompt" in n["inputs"]] == [NASTY, " "]
    with pytest.raises(ValueError, match="`workflow` needs at most three control images, got 4"): workflow(facts(controls=4))
    with pytest.raises(ValueError, match="`workflow` needs images of at most 16 megapixels, got 33554432 pixels: "):
        workflow(facts(area=2**25))


def test_images_that_are_too_small_for_the_node_get_its_smallest_size_and_a_note():
    f = facts("2509", image_size=(96, 96), area=96**2)
    scaled = [d["inputs"] for d in workflow(f).nodes.values() if d["kind"] == "ImageScaleToTotalPixels"]
    assert scaled and all(inputs["megapixels"] == 0.01 for inputs in scaled)
    note = "The training has images of 96 x 96 pixels. ComfyUI's node scales to 0.01 megapixels or more"
    assert note in workflow_note(f)
    assert note[:24] not in workflow_note(facts("2509", image_size=(128, 128), area=128**2))


def sampler_and_loras(folder):
    api = json.loads(next(folder.glob("*_api.json")).read_text(encoding="utf-8"))
    sampled = next(n["inputs"] for n in api.values() if n["class_type"] == "KSampler")
    shift = next(n["inputs"]["shift"] for n in api.values() if n["class_type"] == "ModelSamplingAuraFlow")
    return sampled["steps"], sampled["cfg"], round(shift, 2), [n["inputs"]["lora_name"] for n in api.values() if n["class_type"] == "LoraLoaderModelOnly"]


def test_a_trainer_writes_what_it_was_trained_for(pairs, tmp_path, capsys):
    t = QwenImageEditTrainer(settings(pairs(), tmp_path, data=dict(image_size=[128, 128], control_area=128**2))).set_lora()
    t.make_loader()
    with pytest.raises(ValueError, match=r"`workflow` needs `format` comfyui, got 'diffusers'; call save_lora\(path, format='comfyui', workflow=True\)"):
        t.save_lora(tmp_path/"no", workflow=True)
    assert not (tmp_path/"no").exists()
    file = t.save_lora(tmp_path/"a"/"dusk.safetensors", format="comfyui", workflow=True)
    assert {p.name for p in file.parent.iterdir()} == {"dusk.safetensors", "dusk_workflow.json", "dusk_workflow_api.json"} and "dusk_workflow.json" in capsys.readouterr().out
    api = json.loads((file.parent/"dusk_workflow_api.json").read_text())
    assert not list(problems(api)) and "invert the colours" in [n["inputs"].get("prompt") for n in api.values()]
    assert [n["inputs"]["megapixels"] * 1024**2 for n in api.values() if n["class_type"] == "ImageScaleToTotalPixels"] == [128**2]
    steps, cfg, shift, loras = sampler_and_loras(file.parent)
    assert (steps, cfg, loras) == (20, 4.0, ["dusk.safetensors"]) and shift == pytest.approx(math.exp(0.5 + (64 - 256) * 0.4 / 7936), abs=0.01)
    t.save_lora(tmp_path/"b"/"dusk.safetensors", format="comfyui", workflow=True, schedule="lightning")
    assert sampler_and_loras(tmp_path/"b") == (4, 1.0, 3.0, ["dusk.safetensors"])


@pytest.mark.parametrize("section", ["predict", "train"])
def test_the_lora_for_few_steps_is_in_the_workflow(section, pairs, tmp_path):
    from qie_nb.lora.adapters import save_lora
    fast = save_lora(trained(seed=1), tmp_path/"Lightning-8steps.safetensors")
    given = dict(predict=dict(loras=[str(fast)])) if section == "predict" else dict(train=dict(eval_schedule=str(fast)))
    t = QwenImageEditTrainer(settings(pairs(), tmp_path, data=dict(image_size=[128, 128], control_area=128**2), **given)).set_lora()
    t.save_lora(tmp_path/"a"/"dusk.safetensors", format="comfyui", workflow=True)
    assert sampler_and_loras(tmp_path/"a") == (8, 1.0, 3.0, ["Lightning-8steps.safetensors", "dusk.safetensors"])


# --- the templates
SCHEDULES = [(20, 4.0, ""), (4, 1.0, "Lightning-4steps.safetensors"), (8, 1.0, ""), (20, 2.5, "x.safetensors")]
GRID = list(itertools.product(VARIANTS, range(4), [(512, 512), (1024, 768), (384, 640)], [False, True], [512**2, 1024**2, 700 * 500], SCHEDULES, ["", NASTY], [0, 384**2]))
# by the code that made each node, before there were templates
WRITTEN = "f6db64a7a1f01fc845757f38ef34899924930399f84c59057e8257b14a2cfc56"
SOME, WRITTEN_OF_SOME = GRID[::17], "43fa6d39865d6f5186e5485495d2dbe23dc03a6b5774c4c427714e81af9857af"


def digest_of(grid):
    digest = hashlib.sha256()
    for variant, controls, size, crop, area, (steps, scale, few), prompt, vl_area in grid:
        geometry = Geometry(size, crop, area, vl_area)
        f = WorkflowFacts(VARIANTS[variant].comfyui, "dusk.safetensors", geometry, controls, steps, scale, 2.1234, few, prompt)
        graph = workflow(f)
        written = [graph.ui(workflow_note(f)), graph.ui(), graph.api()]
        digest.update(json.dumps(written, ensure_ascii=False).encode())
    return digest.hexdigest()


def test_workflows_are_the_same_as_without_templates():
    values = [set(map(repr, column)) for column in zip(*GRID)]
    assert [set(map(repr, column)) for column in zip(*SOME)] == values, "each value of each field is among them"
    assert digest_of(SOME) == WRITTEN_OF_SOME


@pytest.mark.weekly
def test_all_workflows_are_the_same_as_without_templates():
    assert len(GRID) == 3456 and digest_of(GRID) == WRITTEN


@pytest.mark.parametrize("name", ["edit", "text_to_image"])
def test_a_template_has_only_inputs_that_the_nodes_take_and_links_backwards(name):
    seen = {}
    for key, node in template(name).items():
        types = {n: of for n, of, _ in inputs_of(node["class_type"])}
        for n, value in node["inputs"].items():
            if isinstance(value, list): assert NODES[seen[value[0]]][1][value[1]] in types[n].split(","), (key, n)
        assert node["inputs"].keys() <= types.keys() and "group" in node["_meta"]
        seen[key] = node["class_type"]


def test_each_node_is_used_by_some_run_and_only_named_ones_are_taken_out():
    cases = [WorkflowFacts(VARIANTS[v].comfyui, "a.safetensors", Geometry(size, crop, 512**2, 0), n, 4, scale, 2., few)
             for v in VARIANTS for n in range(4) for size in ((512, 512), (384, 640)) for crop in (False, True) for scale, few in ((1., ""), (4., "b.safetensors"))]
    edits = [set(unused_nodes(f)) for f in cases if f.controls]
    assert set.union(*edits) <= template("edit").keys() and not set.intersection(*edits)
    assert all(set(unused_nodes(f)) <= template("text_to_image").keys() for f in cases if not f.controls)


def test_a_node_is_taken_out_as_comfyui_bypasses_it():
    nodes = template("edit")
    assert passed_on(nodes["cfg_norm"]) == ["sampling", 0] and passed_on(nodes["latent_1"]) is None and passed_on(nodes["load_1"]) is None
    left = without(nodes, ["lora", "few_steps", "crop_1", "load_1"])
    assert left["sampling"]["inputs"]["model"] == ["unet", 0] and "image" not in left["scaled_1"]["inputs"] and nodes["sampling"]["inputs"]["model"] == ["lora", 0]
