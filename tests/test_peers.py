"""The comparison with other trainers (benchmarks/peers): its interface, patches, environment-free parts and table, with a made-up trainer."""
import json, os, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT/"benchmarks"/"peers"))
import compare, run

MADE_UP = '''
from pathlib import Path
from run import Patch, run_module
TITLE, FOLDER, URL, COMMIT, PRESENT = "made-up", "made-up", "https://example.org/made-up", "abc1234", "made_up.py"
MADE_FOR, STATE, REQUIREMENTS, DTYPES = "this test", "none", [], ("float32",)
def patches(job): return [Patch("made_up", "STEPS = 1000", f"STEPS = {job['steps']}", "too many for a test")]
def source(job):
    import sys
    sys.path.insert(0, job["source"])
def cache(job):
    Path(job["cache"]).mkdir(parents=True)
    for p in Path(job["pairs"]).iterdir(): (Path(job["cache"])/p.name).write_bytes(bytes(1000))
def train(job, meter):
    source(job)
    run_module("made_up", [])
def lora(out): return Path(out)/"lora.safetensors"
def embedding(job, sample): ...
def latent(job, sample):
    import torch
    return job["cache"] + "/a", torch.zeros(900, dtype=torch.uint8)
'''
TRAINER = '''
import torch
STEPS = 1000
def main():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], lr=0.1)
    for _ in range(STEPS):
        noise = torch.randn_like(torch.zeros(1, 16, 1, 4, 4))
        torch.nn.functional.mse_loss(noise * p[0], noise).backward()
        optimizer.step()
        optimizer.zero_grad()
'''


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    "A peer's file, its checkout and two folders of pairs."
    (tmp_path/"peers").mkdir()
    (tmp_path/"peers"/"peer_made_up.py").write_text(MADE_UP)
    (tmp_path/"made-up").mkdir()
    (tmp_path/"made-up"/"made_up.py").write_text(TRAINER)
    for n, names in ((2, "ab"), (8, "abcdefgh")):
        (tmp_path/f"pairs-{n}").mkdir()
        for c in names: (tmp_path/f"pairs-{n}"/c).touch()
    monkeypatch.syspath_prepend(str(tmp_path/"peers"))
    yield tmp_path
    for name in ("peer_made_up", "made_up"): sys.modules.pop(name, None)


@pytest.mark.parametrize("name", compare.PEERS)
def test_each_peer_has_the_interface(name):
    peer = compare.load(name)
    assert peer.URL.startswith("https://github.com/") and "float32" in peer.DTYPES
    job = dict(model="MODEL", variant="2511", dim=512, text=64, heads=4, size=(64, 48), dtype="float32")
    assert all(p.old != p.new and len(p.why) > 5 for p in peer.patches(job))


def test_simpletuner_gets_links_to_the_pairs(tmp_path):
    peer, pairs = compare.load("simpletuner"), tmp_path/"pairs"
    for sub in ("training_images", "control_images"):
        (pairs/sub).mkdir(parents=True)
        (pairs/sub/"0000.png").write_bytes(b"old")
    job = dict(pairs=str(pairs), cache=str(tmp_path/"cache"), size=(64, 48))
    for _ in range(2): targets, controls, text = json.loads(peer.data_config(job, tmp_path/"data").read_text())
    (pairs/"control_images"/"0000.png").write_bytes(b"new")
    seen = [Path(d["instance_data_dir"]) for d in (targets, controls)]
    assert [(p/"0000.png").read_bytes() for p in seen] == [b"old", b"new"] and pairs not in (p.parent for p in seen)
    assert targets["conditioning_data"] == [controls["id"]] and controls["caption_strategy"] is None and text["default"]
    assert targets["resolution"] == 48 and targets["resolution_type"] == "pixel"


def test_a_peer_without_a_function_is_refused(made_up):
    (made_up/"peers"/"peer_made_up.py").write_text(MADE_UP.replace("def latent", "def other"))
    with pytest.raises(TypeError, match="peer_made_up.py lacks latent"): compare.load("made_up")


def test_a_missing_checkout_is_named_with_its_address(made_up):
    peer = compare.load("made_up")
    assert compare.source_of(peer, made_up) == made_up/"made-up"
    assert compare.source_of(peer, made_up/"elsewhere") is None and compare.source_of(peer, None) is None
    assert compare.not_found(peer) == "made-up: not found; clone it from https://example.org/made-up at commit abc1234 into PEERS/made-up"


def test_patches_replace_text_and_say_when_it_has_changed():
    patch = run.Patch("module", "size = 1024", "size = 256", "slow")
    assert run.apply("size = 1024\nsize = 1024", "module", [patch]) == "size = 256\nsize = 256"
    assert run.apply("size = 1024", "another", [patch]) == "size = 1024"
    with pytest.raises(LookupError, match="module has changed: it has no 'size = 1024'"): run.apply("size = 2048", "module", [patch])


def test_modules_are_loaded_with_their_patches_and_files_stay(made_up, monkeypatch):
    monkeypatch.syspath_prepend(str(made_up/"made-up"))
    monkeypatch.setattr(sys, "meta_path", [run.Patches([run.Patch("made_up", "STEPS = 1000", "STEPS = 2", "")]), *sys.meta_path])
    import made_up as module
    assert module.STEPS == 2 and "STEPS = 1000" in (made_up/"made-up"/"made_up.py").read_text()


def test_two_bytes_of_a_latent_are_flipped(made_up):
    peer, job = compare.load("made_up"), dict(cache=str(made_up/"cache"), pairs=str(made_up/"pairs-8"))
    peer.cache(job)
    assert run.action_damage(peer, job) == dict(file="a")
    assert sum(b != 0 for b in (made_up/"cache"/"a").read_bytes()) == 2 and not any((made_up/"cache"/"b").read_bytes())


def test_precompute_is_measured_without_what_does_not_grow(made_up):
    peer = compare.load("made_up")
    job = dict(cache=str(made_up/"cache"), pairs=str(made_up/"pairs-8"), few=str(made_up/"pairs-2"), difference=6, repeats=2)
    r = run.action_cache(peer, job)
    assert r["files"] == 8 and r["bytes"] == 8000 and len(r["seconds_a_sample"]) == 2
    assert [p.name for p in made_up.glob("cache*")] != ["cache"] and (made_up/"cache-0-pairs-2").is_dir()


def test_the_meter_sees_what_a_transformer_gets_without_filling_tokens(monkeypatch):
    import torch
    class Transformer:
        def forward(self, **kw): return len(kw)
    meter, seen = run.Meter({}), []
    monkeypatch.setattr(meter, "seen", lambda *what: seen.append(what))
    meter.watch(Transformer)
    embeds = torch.arange(6.).view(1, 3, 2)
    got = dict(hidden_states="tokens", timestep="sigma", encoder_hidden_states=embeds)
    assert [Transformer().forward(**got, **kw) for kw in ({}, dict(encoder_hidden_states_mask=torch.tensor([[1, 1, 0]])))] == [3, 4]
    assert [s[:2] for s in seen] == [("tokens", "sigma")] * 2 and seen[0][2].equal(embeds) and seen[1][2].equal(embeds[:, :2])


def test_the_meter_reports_what_control_images_cost_in_each_turn():
    orders, reports = os.pipe(), os.pipe()
    os.write(orders[1], b"1")
    meter = run.Meter(dict(turns=[orders[0], reports[1]], warm=1))
    meter.fresh = 5. # before the steps, when the cache is filled
    meter.after_step()
    os.write(orders[1], b"1")
    meter.fresh += .5
    meter.after_step()
    first, second = map(json.loads, os.read(reports[0], 4000).splitlines())
    assert (first["fresh"], second["fresh"], meter.fresh) == (0, .5, 0)
    for fd in orders + reports: os.close(fd)


def test_what_training_after_a_change_is_called():
    old = dict(failed=None, cache_changed=False, encoded=0, fresh=0.)
    names = [compare.outcome(old | changed, "encoded again") for changed in ({}, dict(encoded=1), dict(cache_changed=True), dict(fresh=.5), dict(fresh=.5, encoded=1), dict(failed="KeyError: x\ny"))]
    assert names == ["trained on the old entry", "encoded again", "encoded again", "new control latent, old embedding", "encoded again", "error: KeyError: x"]


def test_ai_toolkit_caches_into_the_cache_folder_and_reads_the_pairs(tmp_path):
    peer = compare.load("ai_toolkit")
    for part in ("training_images", "control_images"):
        (tmp_path/"pairs"/part).mkdir(parents=True)
        (tmp_path/"pairs"/part/"0000.png").write_text(part)
    job = dict(cache=str(tmp_path/"cache"/"a"), pairs=str(tmp_path/"pairs"), out="OUT", model="MODEL", dtype="float32", area=256 * 192, result="RESULT.json")
    for _ in range(2): # its folder of links is made anew for each job, the cache stays
        folder = peer.dataset(job)
        assert [(folder/part/"0000.png").read_text() for part in ("training_images", "control_images")] == ["training_images", "control_images"]
        (folder/"training_images"/"_t_e_cache"/"x").touch()
    assert [p.name for p in (tmp_path/"cache"/"a").rglob("x")] == ["x"]
    import yaml
    process = yaml.safe_load(peer.config(job, 5).read_text())["config"]["process"][0]
    assert process["train"]["steps"] == 5 and process["datasets"][0]["resolution"] == 222
    assert peer.caption("a, b") == "a,  b"


@pytest.mark.weekly # starts two benchmarks
def test_steps_are_done_by_turns(made_up, monkeypatch):
    bench = compare.Bench("made_up", made_up/"made-up", Path(sys.executable), made_up/"work", made_up)
    monkeypatch.setitem(os.environ, "PYTHONPATH", "")
    (made_up/"work"/"made_up"/"cache"/"2511").mkdir(parents=True)
    job = dict(path=[str(made_up/"peers")])
    start = bench.start
    monkeypatch.setattr(bench, "start", lambda *a, **kw: start(*a, **(job | kw)))
    r = compare.steps({"made_up": (bench, {}), "again": (bench, {})}, "float32", rounds=2, count=3, warm=2)["again"]
    assert r["cpu_seconds"]["runs"] == 2 and r["peak_mb"] > 50 and r["of_ours"]["runs"] == 2
    from safetensors.torch import load_file
    case = load_file(made_up/"work"/"made_up"/"case-2511-float32.safetensors")
    assert case["noise"].shape == (1, 4, 64) and case["noise"].equal(case["target"]) and case["pred"].equal(case["noise"])


RESULT = dict(
    about=dict(date="2026-11-24T10:00:00+00:00", device="a CPU", capability="AVX2", bfloat16=False, load_average=0.1,
               peers={n: dict(title=n, url="https://x", commit="abc", made_for="this", state="", versions=dict(torch="2"), patches=p)
                      for n, p in (("qie_nb", []), ("other", [dict(where="a.b", old="1", new="2", why="no GPU")]))}),
    missing=["third: not found; clone it"],
    steps=dict(float32=dict(qie_nb=dict(cpu_seconds=dict(median=1., min=.9, max=1.1, runs=3), of_ours=dict(median=1., min=1., max=1., runs=3), peak_mb=900),
                            other=dict(cpu_seconds=dict(median=2., min=2., max=2., runs=3), of_ours=dict(median=2., min=1.9, max=2.1, runs=3), peak_mb=800))),
    conditioning=dict(qie_nb=dict(difference=0.), other=dict(tokens=5, pipeline_tokens=7)),
    damaged=dict(qie_nb=dict(train="found, encoded again"), other=dict(error="KeyError: x")),
    stale_caption=dict(qie_nb=dict(train="encoded again"), other=dict(train="error: FileNotFoundError: a | b")))


def test_the_table_shows_each_kind_of_result():
    rows = {r[0]: r[1:] for r in compare.rows_of(RESULT)[1]}
    assert rows["CPU time of a step, float32 (others: ratio to qie_nb)"] == ["1.000 s (0.900 to 1.100)", "2.00 (1.90 to 2.10)"]
    assert rows["peak memory in steps, float32, MB"] == ["900", "800"]
    assert rows["prompt embedding against the pipeline"] == ["equal", "5 tokens, the pipeline 7"]
    assert rows["two flipped bytes in a cached latent"] == ["found, encoded again", "failed"]
    assert rows["caption changed after caching, then training"] == ["encoded again", "error"]
    assert rows["10 steps, twice"] == ["-", "-"]
    text = compare.table(RESULT)
    assert "AVX2, no bfloat16 arithmetic: float32 only" in text and text.endswith("- third: not found; clone it")
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    details = compare.details(RESULT)
    assert "| abc | torch 2 | 1 |" in details
    assert "| none |" in details


def test_the_table_shows_a_caption_changed_by_the_trainer_and_control_images_encoded_in_steps():
    steps = dict(RESULT["steps"]["float32"], other=dict(RESULT["steps"]["float32"]["other"], encoding=dict(median=.5, min=.4, max=.6, runs=3)))
    changed = RESULT | dict(steps=dict(float32=steps), conditioning=dict(qie_nb=dict(difference=0., tokens=7, pipeline_tokens=7), other=dict(difference=3.5, tokens=8, pipeline_tokens=7)))
    rows = {r[0]: r[1:] for r in compare.rows_of(changed)[1]}
    assert rows["prompt embedding against the pipeline"] == ["equal", "3.5e+00 on its caption; 8 tokens, the pipeline 7"]
    assert rows["in it, encoding the before image"] == ["-", "0.50 s (0.40 to 0.60)"]
    assert "in it, encoding the before image" not in {r[0] for r in compare.rows_of(RESULT)[1]}


def test_the_pages_have_the_tables_of_the_results():
    page, details = compare.pages(RESULT).values()
    assert "2.00 (1.90 to 2.10)" in page and page.count("<!-- end -->") == 1
    assert "| abc | torch 2 | 1 |" in details and details.count("<!-- end -->") == 1


def test_results_name_no_folder_of_the_machine():
    if compare.OUT.is_file(): assert "/tmp/" not in compare.OUT.read_text() and str(ROOT) not in compare.OUT.read_text()
