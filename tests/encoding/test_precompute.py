"""What precompute costs, counted and not timed: operations, calls of the attention, files opened, images decoded, waits; and that none of it changes an entry."""
import collections, copy, importlib.util, threading, time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import qie_nb.data.samples
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.data.dataset import ImageDataset
from qie_nb.encoding.encode import encode_prompt, pixels_of
from qie_nb.encoding.encoder import Encoder, pick_batch
from qie_nb.core.files import DiskFull
from qie_nb.models.components import Components
from qie_nb.encoding.overlap import Ahead, Recent, Writer
from qie_nb.encoding.precompute import precompute
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.encoding.windows import NAME, Windows, attention_calls, windows_together
from helpers import write_pairs
from test_cache_costs import Counted
from test_prompts import picture, rig

spec = importlib.util.spec_from_file_location("precompute_benchmark", Path(__file__).parents[2]/"benchmarks"/"precompute.py")
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)


# --- operations
@pytest.mark.parametrize("variant, naive, ours, most", [("v1", 72.6, 33.2, 0.5), ("2511", 25.4, 10.8, 0.45)])
def test_a_sample_takes_less_than_half_of_the_naive_operations(variant, naive, ours, most):
    o = bench.operations(variant)
    assert o["ratio"] <= most and o["total"]["ours"] / o["total"]["naive"] <= most
    assert o["total"]["naive"] / 1e12 == pytest.approx(naive, rel=0.03) and o["total"]["ours"] / 1e12 == pytest.approx(ours, rel=0.04) # NUMBERS's, with a few more words
    assert all(o["ours"][k] < 0.52 * o["naive"][k] for k in o["ours"]) and o["naive"]["vision"] == 2 * o["ours"]["vision"]


def test_windows_together_are_the_same_operations():
    with torch.device("meta"): model = bench.qwen_vl()
    apart, together = (bench.vision_flops(model, torch.tensor([[1, 10, 14]]), on) for on in (False, True))
    assert apart == together > 1e11


@pytest.mark.parametrize("variant", ["v1", "2511"])
def test_precompute_runs_what_was_counted(variant, tmp_path):
    "A sample: its images once through the vision tower, once through the VAE, one pass in front, one for the caption and one for the empty prompt; no head."
    dataset = data_set(write_pairs(tmp_path/"set", ((64, 48),)), tmp_path/"cache", variant)
    encoder = Encoder(Components(str(tiny_folder(variant))), dataset.cache)
    te, seen, passes = encoder.components.get("text_encoder"), [], []
    encoder.components.get("vae").encoder.register_forward_pre_hook(lambda *a: seen.append("vae"))
    for name, m in dict(vision=te.model.visual, head=te.lm_head).items(): m.register_forward_pre_hook(lambda *a, name=name: seen.append(name))
    te.model.language_model.layers[0].register_forward_pre_hook(lambda m, a: passes.append(a[0].shape[1]))
    precompute(dataset, encoder)
    assert collections.Counter(seen) == dict(vae=2, vision=1) and len(passes) == 3 and max(passes[1:]) < passes[0]


# --- the windows
GRIDS = [(22, 30), (8, 8), (16, 24), (6, 10), (10, 8), (2, 2)] # patches down and across: ragged, one window, whole ones, less than one

def see(te, *grids):
    "Images of so many patches through the vision tower."
    torch.manual_seed(0)
    x = torch.randn(sum(h * w for h, w in grids), 1176)
    with torch.no_grad(): return te.model.visual(x, grid_thw=torch.tensor([[1, h, w] for h, w in grids])).pooler_output

@pytest.mark.parametrize("grids", [[g] for g in GRIDS] + [[(22, 30)] * 3, [(22, 30), (6, 10), (16, 24)]], ids=str)
def test_windows_together_are_the_windows_apart(grids):
    te = rig("2511").te
    apart = see(te, *grids)
    with windows_together(te):
        together = see(te, *grids)
        calls = attention_calls(te, lambda: see(te, *grids))
    assert (together - apart).abs().max() <= 1e-6 * apart.abs().max()
    lengths = {min(8, h - y) * min(8, w - x) for h, w in grids for y in range(0, h, 8) for x in range(0, w, 8)}
    assert calls == [len(lengths), len({h * w for h, w in grids})]
    assert len(attention_calls(te, lambda: see(te, *grids))) == 2 and torch.equal(see(te, *grids), apart), "outside it is what it was"

@pytest.mark.parametrize("variant, before, after", [("v1", 100, 3), ("2511", 16, 3)])
def test_calls_of_a_layer_for_a_image_of_1024(variant, before, after):
    assert bench.calls(variant) == dict(windows=[before, after], whole_image=[1, 1])

def test_the_lengths_are_asked_for_twice_a_pass_and_not_in_every_layer(monkeypatch):
    te, made = rig("2511").te, []
    real = Windows.__init__
    monkeypatch.setattr(Windows, "__init__", lambda self, ends, device: made.append(ends) or real(self, ends, device))
    blocks = torch.nn.ModuleList(copy.deepcopy(b) for _ in range(3) for b in te.model.visual.blocks)
    for b in blocks: b.attn.config = te.model.visual.config
    monkeypatch.setitem(te.model.visual._modules, "blocks", blocks)
    monkeypatch.setattr(te.model.visual, "fullatt_block_indexes", [1, 3])
    with windows_together(te): see(te, (22, 30))
    assert len(made) == 2

def test_windows_leave_no_trace_whatever_happens():
    te = rig("2511").te
    visual, attn = te.model.visual, te.model.visual.blocks[0].attn
    attn.forward = wrapper = lambda *a, real=attn.forward, **kw: real(*a, **kw) # as accelerate's hooks do it
    try:
        with pytest.raises(ZeroDivisionError), windows_together(te):
            assert visual.config._attn_implementation == NAME and attn.forward is not wrapper
            1 / 0
        assert visual.config._attn_implementation == "sdpa" and attn.forward is wrapper and "forward" not in vars(visual.blocks[1].attn)
        assert te.config.text_config._attn_implementation == "sdpa"
    finally: del attn.forward

class Other(torch.nn.Module):
    "A library that asks for no function by name, and looks at the windows itself."
    def __init__(self, real): super().__init__(); self.real, self.ends = real, []
    def forward(self, hidden_states, cu_seqlens, **kw):
        self.ends.append(cu_seqlens.tolist())
        kw.pop("windows", None)
        return self.real(hidden_states, cu_seqlens, **kw)

def test_another_librarys_layers_get_their_own_windows():
    te = rig("2511").te
    apart, blocks = see(te, (22, 30)), te.model.visual.blocks
    real = [b.attn for b in blocks]
    with pytest.MonkeyPatch.context() as mp:
        for b in blocks: mp.setitem(b._modules, "attn", Other(b.attn))
        with windows_together(te):
            mp.setattr(te.model.visual.config, "_attn_implementation", "sdpa") # its layers do not come by the name
            assert torch.equal(see(te, (22, 30)), apart)
        assert [len(e) for e in blocks[0].attn.ends] == [2, 13] and [len(e) for e in blocks[1].attn.ends] == [2], "tried once"
    assert [b.attn for b in blocks] == real
    for b in blocks: b.attn.config._attn_implementation = "eager"
    try:
        with windows_together(te): assert not any("forward" in vars(b.attn) for b in blocks), "anything but SDPA is left alone"
    finally: blocks[0].attn.config._attn_implementation = "sdpa"

@pytest.mark.parametrize("variant, n", [("v1", 1), ("2511", 2)])
@pytest.mark.parametrize("shared", [True, False])
def test_prompts_are_the_same_with_windows_together_and_apart(variant, n, shared):
    r, images = rig(variant), [picture(s, i) for i, s in enumerate(((280, 196), (168, 308))[:n])]
    run = lambda **kw: encode_prompt(r.te, r.proc, r.variant, "make it blue", images, shared=shared, **kw)[0]
    on, off = run(windows=True), run(windows=False)
    assert (on - off).abs().max() <= 1e-5 * off.abs().max()
    count = {}
    for name, kw in dict(default={}, on=dict(windows=True), off=dict(windows=False)).items(): count[name] = sum(attention_calls(r.te, lambda: run(**kw)))
    assert count["default"] == count["on" if shared else "off"] and count["on"] < count["off"]

def test_the_exact_encoder_leaves_the_windows_alone():
    parts, calls = Components(str(tiny_folder("2511"))), []
    im = [picture((280, 196), 0)]
    for e in (Encoder(parts), Encoder(parts, shared=False, flat=False), Encoder(parts, shared=False, windows=True)):
        calls.append(attention_calls(parts.get("text_encoder"), lambda: e.prompt("x", im, SimpleNamespace(vl=lambda size: size)))[0])
    assert calls[0] == calls[2] < calls[1]


# --- the job
WHO = dict(image_size=[64, 64], use_cache=True, caption_dropout_rate=0.1)

def data_set(root, cache, variant="2511", **kw): return ImageDataset(dict(dataset_path=str(root), cache_dir=str(cache)) | WHO | kw)
def run(root, cache, variant="2511", ahead=4, **kw):
    dataset = data_set(root, cache)
    encoder = Encoder(Components(str(tiny_folder(variant))), dataset.cache, **kw)
    return precompute(dataset, encoder, ahead=ahead), encoder
def files(folder): return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*.safetensors"))}
def several(root, n=6, **kw): return write_pairs(root, [((48, 32), (32, 48), (40, 40))[i % 3] for i in range(n)], caption=[f"make number {i} blue" for i in range(n)], **kw)

@pytest.fixture
def written(monkeypatch):
    "Entries in the order in which they were stored."
    order, real = [], EmbeddingCacheManager.save_cache
    monkeypatch.setattr(EmbeddingCacheManager, "save_cache", lambda self, kind, key, *a: (real(self, kind, key, *a), order.append((kind, key)))[0])
    return order

@pytest.mark.parametrize("batch_size", [1, 2])
def test_entries_and_their_order_are_the_same_with_nothing_beside(batch_size, tmp_path, written):
    root, orders = several(tmp_path/"set"), []
    for n, ahead in enumerate((0, 1, 4)):
        written.clear()
        report, _ = run(root, tmp_path/str(n), ahead=ahead, batch_size=batch_size)
        assert (report.encoded, report.tensors, report.skipped) == (6, len(written), [])
        orders.append(list(written))
    assert orders[0] == orders[1] == orders[2]
    assert files(tmp_path/"0") == files(tmp_path/"1") == files(tmp_path/"2")
    lazy = data_set(root, tmp_path/"lazy")
    encoder = Encoder(Components(str(tiny_folder("2511"))), lazy.cache, batch_size=batch_size)
    lazy.cache.add_identity(encoder.identity), lazy.refresh()
    for i in range(6): encoder.encode_sample(lazy, i)
    if batch_size == 1: assert files(tmp_path/"lazy") == files(tmp_path/"0")

@pytest.fixture
def decoded(monkeypatch):
    "How often each image was decoded, and by whom."
    count, real = collections.Counter(), qie_nb.data.samples.open_image
    def opened(source, name=None):
        count[name] += 1
        count["here"] += threading.current_thread() is threading.main_thread()
        return real(source, name)
    monkeypatch.setattr(qie_nb.data.samples, "open_image", opened)
    return count

@pytest.mark.parametrize("ahead", [0, 4])
def test_no_image_is_decoded_twice_and_none_in_the_main_thread(ahead, tmp_path, decoded, monkeypatch):
    monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home")), monkeypatch.setattr("qie_nb.core.files._SETTLED", -10.) # facts of files are kept at once
    root = several(tmp_path/"set", 7)
    for i in range(1, 6): (root/"control_images"/f"{i:04}.png").write_bytes((root/"control_images"/"0000.png").read_bytes()) # six edits of one image
    with Counted() as c: assert run(root, tmp_path/"cache", ahead=ahead)[0].encoded == 7
    here = decoded.pop("here", 0)
    assert set(decoded.values()) == {1} and len(decoded) == 7 + 2 and here == (0 if ahead else 9)
    opened = {p: n for p, n in c.opened.items() if p.endswith(".png")}
    assert len(opened) == 14 and max(opened.values()) <= 3, "its size, its digest, itself"

def test_images_are_read_while_the_encoders_work(tmp_path, monkeypatch, decoded):
    "In the first sample's encoding the next ones' images arrive; without reading ahead they would not, and this would wait in vain."
    root, came, real = several(tmp_path/"set"), [], Encoder._latents
    def latents(self, *a):
        end = time.monotonic() + 20
        while len(decoded) < 8 and not came and time.monotonic() < end: time.sleep(0.001)
        came.append(len(decoded))
        return real(self, *a)
    monkeypatch.setattr(Encoder, "_latents", latents)
    assert run(root, tmp_path/"cache", ahead=4)[0].encoded == 6 and 8 <= came[0] <= 2 * 5 + 1, "four samples ahead and no more"

@pytest.mark.parametrize("side", ["training_images", "control_images"])
def test_a_image_replaced_after_it_was_read_ahead_is_read_again(side, tmp_path, monkeypatch, decoded):
    root, real, done = several(tmp_path/"set"), Encoder._latents, []
    path = next((root/side).glob("0003*.png"))
    def latents(self, *a):
        end = time.monotonic() + 20
        while not decoded[repr(str(path))] and time.monotonic() < end: time.sleep(0.001)
        if not done: time.sleep(0.05); done.append(decoded[repr(str(path))]); picture(Image.open(path).size, 99).save(path)
        return real(self, *a)
    with monkeypatch.context() as mp:
        mp.setattr(Encoder, "_latents", latents)
        assert run(root, tmp_path/"cache")[0].encoded == 6 and done == [1]
    run(root, tmp_path/"fresh")
    assert files(tmp_path/"cache") == files(tmp_path/"fresh")

def test_an_error_is_its_samples_and_the_others_are_done(tmp_path, monkeypatch):
    root, real = several(tmp_path/"set"), qie_nb.data.samples.open_image
    def opened(source, name=None):
        if name.endswith("control_images/0003.png'"): raise ValueError(f"image {name} cannot be read")
        return real(source, name)
    monkeypatch.setattr(qie_nb.data.samples, "open_image", opened)
    for n, ahead in enumerate((0, 4)):
        report, _ = run(root, tmp_path/str(n), ahead=ahead)
        assert report.encoded == 5 and [i for i, _ in report.skipped] == ["0003"] and "0003.png" in report.skipped[0][1]
    assert files(tmp_path/"0") == files(tmp_path/"1") and len(files(tmp_path/"0")) == 5 * 7

@pytest.mark.parametrize("strict", [False, True])
def test_an_entry_that_cannot_be_stored_is_its_samples(strict, tmp_path, monkeypatch):
    "Found by the writing thread while the next sample is encoded."
    root, real = several(tmp_path/"set"), Encoder.images
    def images(self, pixels, size):
        out = real(self, pixels, size)
        if size == (64, 64) and torch.equal(pixels[0], bad): out[0, 0, 0, 0, 0] = float("nan")
        return out
    dataset = data_set(root, tmp_path/"cache", strict=strict)
    encoder = Encoder(Components(str(tiny_folder("2511"))), dataset.cache)
    bad = pixels_of(encoder.components.get("vae"), Image.fromarray(dataset.pictures(2)["image"]), (64, 64))
    monkeypatch.setattr(Encoder, "images", images)
    if strict:
        with pytest.raises(ValueError, match="pixel_latent.*holds NaN or inf and is not stored"): precompute(dataset, encoder)
        return
    report = precompute(dataset, encoder)
    assert report.encoded == 5 and [i for i, _ in report.skipped] == ["0002"] and "NaN" in report.skipped[0][1]
    kinds = collections.Counter(kind for _, kind, _, _ in dataset.cache.entries())
    assert kinds["prompt_embed"] == 5 and kinds["pixel_latent"] == 5 and encoder.writer is encoder.ahead is dataset.recent is None

def test_a_claim_is_held_until_its_entries_are_there(tmp_path, monkeypatch):
    root, real, free, seen = several(tmp_path/"set"), EmbeddingCacheManager.save_cache, {}, []
    @contextmanager
    def claim(folder, name, wait=0):
        free[name] = False
        try: yield True
        finally: free[name] = True
    def save(self, kind, key, tensor, parts, prefix):
        time.sleep(0.01) # slower than the encoders
        seen.append([name for name, is_free in free.items() if is_free])
        return real(self, kind, key, tensor, parts, prefix)
    monkeypatch.setattr("qie_nb.encoding.precompute.claim", claim), monkeypatch.setattr(EmbeddingCacheManager, "save_cache", save)
    dataset = data_set(root, tmp_path/"cache")
    encoder = Encoder(Components(str(tiny_folder("2511"))), dataset.cache)
    precompute(dataset, encoder)
    front = {dataset.keys(i)["prompt_prefix"].key: i for i in range(6)}
    order = [front[name] for name in free]
    for n, names in enumerate(seen): # seven entries a sample, in the order of the work
        assert all(order.index(front[name]) < n // 7 for name in names), "let go before its entries were stored"
    assert all(free.values()) and len(seen) == 42

class Stop(BaseException): pass

@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop, RuntimeError])
def test_an_interrupt_leaves_whole_entries_no_threads_and_no_claims(error, tmp_path, monkeypatch):
    root, real, calls = several(tmp_path/"set"), Encoder.images, []
    def images(self, *a):
        calls.append(1)
        if len(calls) == 6: raise error("stop")
        return real(self, *a)
    before = set(threading.enumerate())
    with monkeypatch.context() as mp:
        mp.setattr(Encoder, "images", images)
        with pytest.raises(error): run(root, tmp_path/"cache")
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith(("read ahead", "write behind"))]
    there = files(tmp_path/"cache")
    assert not left and len(there) >= 2 * 7, "two samples were done"
    run(root, tmp_path/"other")
    whole = files(tmp_path/"other")
    assert all(whole[k] == v for k, v in there.items()) and not EmbeddingCacheManager(tmp_path/"cache").verify()
    report, _ = run(root, tmp_path/"cache")
    assert report.tensors == len(whole) - len(there) and files(tmp_path/"cache") == whole

def test_a_full_disk_ends_the_job_with_its_sentence(tmp_path, monkeypatch):
    root, real, stored, failed = several(tmp_path/"set"), EmbeddingCacheManager.save_cache, [], []
    def save(self, *a):
        if len(stored) == 10 and not failed: failed.append(a[:2]); raise DiskFull(28, "'x' is full") # once: a smaller entry may find room
        stored.append(a[:2])
        return real(self, *a)
    monkeypatch.setattr(EmbeddingCacheManager, "save_cache", save)
    with pytest.raises(DiskFull, match="is full. In all this job has .* MB still to write; it goes on where it stopped"): run(root, tmp_path/"cache")
    assert len(stored) == len(files(tmp_path/"cache")) == 10, "nothing is stored behind the failure"


# --- the parts
def test_ahead_is_bounded_and_ends():
    begun, gate = [], threading.Event()
    with Ahead(lambda k: (begun.append(k), gate.wait(5), k)[2], range(100), 3, threads=3) as ahead:
        end = time.monotonic() + 5
        while len(begun) < 3 and time.monotonic() < end: time.sleep(0.001)
        assert sorted(begun) == [0, 1, 2] and len(ahead.waiting) == 3
        gate.set()
        assert [ahead(k) for k in range(10)] == list(range(10)) and len(ahead.waiting) == 3
    assert max(begun) <= 12

def test_two_threads_that_want_the_same_image_decode_it_once():
    recent, made, gate = Recent(), [], threading.Barrier(4)
    def want(): gate.wait(); return recent("a", lambda: (time.sleep(0.02), made.append(1))[1])
    threads = [threading.Thread(target=want) for _ in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert made == [1]

def test_the_main_thread_waits_for_no_copy(monkeypatch):
    "A tensor is brought to the host by the writing thread: the encoders' thread asks for no value."
    waits, put = [], []
    monkeypatch.setattr("qie_nb.encoding.overlap.to_host", lambda t: (t, lambda: waits.append(threading.current_thread().name)))
    with Writer(lambda *a: put.append(a[:2])) as w:
        for k in "ab": w.put("pixel_latent", k, torch.ones(1))
        w.wait()
    assert len(waits) == 2 and all(n.startswith("write behind") for n in waits) and put == [("pixel_latent", "a"), ("pixel_latent", "b")]

def test_encoding_with_a_writer_copies_nothing_in_the_main_thread(tmp_path, monkeypatch):
    root, here, real = several(tmp_path/"set", 2), [], torch.Tensor.cpu
    def cpu(t):
        if threading.current_thread() is threading.main_thread(): here.append(t.shape)
        return real(t)
    monkeypatch.setattr(torch.Tensor, "cpu", cpu), monkeypatch.setattr("qie_nb.encoding.overlap.to_host", lambda t: (t, lambda: None))
    assert run(root, tmp_path/"cache")[0].encoded == 2
    assert not here

@pytest.mark.parametrize("free, loaded, batch", [(90e9, (), 4), (40e9, (), 1), (26e9, ("vae", "text_encoder"), 2), (6e9, ("vae", "text_encoder"), 1)])
def test_the_encode_batch_goes_by_what_is_free_beside_the_encoders(free, loaded, batch, monkeypatch):
    monkeypatch.setattr("qie_nb.encoding.encoder.component_bytes", lambda folder, *a: dict(vae=0.25e9, text_encoder=33e9)[folder.name])
    parts = SimpleNamespace(areas=dict(control_area=1024*1024), parts=dict.fromkeys(loaded), folder=Path("."), dtype=torch.float32, quantize={})
    n, why = pick_batch("auto", dict(vae="cuda", text_encoder="cuda"), parts, lambda d: free)
    assert n == batch and "GB stay free" in why
    assert pick_batch("auto", dict(vae="cuda", text_encoder="cpu"), parts, lambda d: free)[0] == 1
    assert Encoder(Components(str(tiny_folder("2511"))), batch_size="auto").batch_size == 1
