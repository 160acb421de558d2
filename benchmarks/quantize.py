"""What quantized bases cost and keep: training on the learnt tiny model, and host memory while a checkpoint streams in.

python benchmarks/quantize.py [training] [memory] [--gb 2] [--kinds nf4,...]; writes benchmarks/results/quantize.json and prints tables.
Memory is measured where /proc/self/status has RssAnon (Linux); each kind in a process of its own, forked after the imports."""
import argparse, gc, json, multiprocessing, os, platform, tempfile, threading, time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

OUT = Path(__file__).parent/"results"/"quantize.json"
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate", "optimum-quanto", "bitsandbytes", "torchao", "safetensors")


# --- host memory of a streamed load
def anonymous() -> int:
    "Anonymous bytes of this process that are in memory."
    return 1024 * next(int(r.split()[1]) for r in Path("/proc/self/status").read_text().splitlines() if r.startswith("RssAnon"))


class Peak:
    "Within, the largest `anonymous()`, looked at every two milliseconds."
    def __enter__(self):
        self.most, self.on = anonymous(), True
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self):
        while self.on: self.most = max(self.most, anonymous()); time.sleep(0.002)

    def __exit__(self, *_): self.on = False; self.thread.join(); self.most = max(self.most, anonymous())


def made_up(folder, gb, shards=5):
    "A sharded bfloat16 checkpoint of QwenImageTransformer2DModel, with the real model's widths from 1 GB on; written without building it."
    import torch
    from safetensors.torch import save_file
    from diffusers import QwenImageTransformer2DModel
    from qie_nb.models.loading import empty_model
    heads = 24 if gb >= 1 else 8
    config = dict(_class_name="QwenImageTransformer2DModel", num_layers=1, attention_head_dim=128, num_attention_heads=heads, joint_attention_dim=3584)
    folder.mkdir(parents=True)
    def names(layers):
        (folder/"config.json").write_text(json.dumps(config | dict(num_layers=layers)))
        return dict(empty_model(QwenImageTransformer2DModel, folder, torch.bfloat16).named_parameters())
    size = lambda params: sum(2 * p.numel() for p in params.values())
    one, two = size(names(1)), size(names(2))
    params = names(max(1, round((gb * 1e9 - one) / (two - one)) + 1))
    noise = (torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    make = lambda p: noise.repeat(-(-p.numel() // len(noise)))[:p.numel()].view(p.shape).contiguous()
    parts, total = [{}], size(params)
    for n, p in params.items():
        if size(parts[-1]) > total / shards: parts.append({})
        parts[-1][n] = p
    file = lambda i: f"diffusion_pytorch_model-{i + 1:05}-of-{len(parts):05}.safetensors"
    for i, part in enumerate(parts): save_file({n: make(p) for n, p in part.items()}, folder/file(i))
    index = dict(metadata=dict(total_size=total), weight_map={n: file(i) for i, part in enumerate(parts) for n in part})
    (folder/"diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def measure(folder, kind, how, queue):
    import torch
    from diffusers import QwenImageTransformer2DModel
    from qie_nb.models.quantizations.known import held_bytes, quantize_linear
    from qie_nb.models.loading import load_quantized, trim_malloc
    if kind: quantize_linear(torch.nn.Linear(128, 128).bfloat16().requires_grad_(False), kind)(torch.randn(2, 128).bfloat16()) # its imports
    gc.collect()
    trim_malloc() # what the imports freed would otherwise take in the first weights unseen
    base, began = anonymous(), time.perf_counter()
    with Peak() as peak:
        if how == "stream": model = load_quantized(QwenImageTransformer2DModel, folder, kind, torch.bfloat16)
        else: model = QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    shards = [p.stat().st_size for p in folder.glob("*.safetensors")]
    held, most = held_bytes(model), peak.most - base
    bound = 1.1 * (max(shards) + held)
    queue.put(dict(checkpoint=sum(shards), largest_shard=max(shards), held=held, baseline=base, peak=most, bound=round(bound),
                   within=most <= bound, seconds=round(time.perf_counter() - began, 1)))


def memory(a):
    import diffusers, peft, torch, transformers # before the fork: the baseline is after the imports
    torch.set_num_threads(1)
    fork, out = multiprocessing.get_context("fork"), {}
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)/"transformer"
        maker = fork.Process(target=made_up, args=(folder, a.gb)) # its memory goes with it
        maker.start()
        maker.join()
        plain = [("none, streamed", None, "stream"), ("none, from_pretrained", None, "load")]
        for name, kind, how in [*((k, k, "stream") for k in a.kinds), *(plain if a.gb >= 1 else [])]:
            queue = fork.Queue()
            child = fork.Process(target=measure, args=(folder, kind, how, queue))
            child.start()
            out[name] = queue.get()
            child.join()
    return dict(gb=a.gb, rows=out)


# --- training
def training(a):
    import torch
    from qie_nb.training.callbacks import Callback
    from qie_nb.config import make_config
    from qie_nb.tiny.photos import demo_config, write_pairs
    from qie_nb.evaluation.evaluate import held_out_loss
    from qie_nb.models.quantizations.known import held_bytes
    from qie_nb.trainer import QwenImageEditTrainer
    torch.set_num_threads(1)

    class Losses(Callback):
        def on_train_begin(self, t): self.losses, self.bytes, self.held = [], held_bytes(t.transformer), [self.judge(t)]
        def on_step_end(self, t): self.losses.append(float(t.state.loss))
        def on_train_end(self, t): self.held.append(self.judge(t))
        def judge(self, t): return held_out_loss(t, t.held_out)["held_out_loss"]

    rows, mean = {}, lambda v: round(sum(v) / len(v), 5)
    with tempfile.TemporaryDirectory() as tmp:
        root = Path(tmp)
        write_pairs(root, 48, 12)
        for kind in ["none", *a.kinds]:
            config = demo_config(root, a.steps)
            config["model"]["quantize"] = kind
            config["train"] |= dict(output_dir=str(root/kind), eval_steps=None)
            config["logging"] = dict(log_dir=str(root/kind/"runs"), report_to="none", log_images=False)
            if kind == "none": QwenImageEditTrainer(make_config(config)).cache_embeddings()
            seen, began = Losses(), time.perf_counter()
            QwenImageEditTrainer(make_config(config), callbacks=[seen]).fit()
            rows[kind] = dict(first20=mean(seen.losses[:20]), last20=mean(seen.losses[-20:]), held_out_before=round(seen.held[0], 5),
                              held_out_after=round(seen.held[-1], 5), weights_and_adapter_bytes=seen.bytes, steps=len(seen.losses),
                              losses=[round(v, 5) for v in seen.losses], seconds=round(time.perf_counter() - began, 1))
            print(kind, {k: v for k, v in rows[kind].items() if k != "losses"}, flush=True)
    return dict(rows=rows, base="the learnt tiny model, float32, 48 pairs of the demo's edit, batch 4, rank 16")


# --- all of it
def about():
    import torch
    cpu = next((r.split(":")[1].strip() for r in Path("/proc/cpuinfo").read_text().splitlines() if r.startswith("model name")), platform.processor())
    return dict(device=f"{cpu}, {os.cpu_count()} cores, one thread used", accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                versions=dict(python=platform.python_version()) | {p: version(p) for p in LIBRARIES})


def table(r):
    if s := r.get("training"):
        print(f"\n{'kind':14}{'MB':>7}{'first 20':>10}{'last 20':>10}{'held out':>18}")
        for k, v in s["rows"].items():
            print(f"{k:14}{v['weights_and_adapter_bytes']/1e6:>7.2f}{v['first20']:>10.4f}{v['last20']:>10.4f}"
                  f"{v['held_out_before']:>10.4f}{v['held_out_after']:>8.4f}")
    if s := r.get("memory"):
        print(f"\n{'MB':24}{'checkpoint':>11}{'shard':>8}{'held':>8}{'peak':>8}{'bound':>8}{'seconds':>9}")
        for k, v in s["rows"].items():
            print(f"{k:24}{v['checkpoint']/1e6:>11.0f}{v['largest_shard']/1e6:>8.0f}{v['held']/1e6:>8.0f}{v['peak']/1e6:>8.0f}{v['bound']/1e6:>8.0f}"
                  f"{v['seconds']:>9.1f}  {'within' if v['within'] else 'ABOVE'}")


PARTS = dict(training=training, memory=memory)


def main():
    from qie_nb.models.quantizations.known import QUANTIZATIONS
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; default all")
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--gb", type=float, default=2., help="of the made-up checkpoint")
    p.add_argument("--kinds", type=lambda s: s.split(","), default=list(QUANTIZATIONS))
    p.add_argument("--out", type=Path, default=OUT)
    a = p.parse_args()
    if wrong := set(a.parts) - PARTS.keys() | set(a.kinds) - QUANTIZATIONS.keys(): p.error(f"unknown {', '.join(wrong)}")
    result = json.loads(a.out.read_text()) if a.out.is_file() else {}
    for name in a.parts or PARTS:
        load, began = os.getloadavg()[0], time.perf_counter()
        got = PARTS[name](a)
        when = dict(date=datetime.now(timezone.utc).isoformat(timespec="seconds"), seconds_taken=round(time.perf_counter() - began, 1),
                    load_average=[round(load, 2), round(os.getloadavg()[0], 2)])
        result[name] = about() | when | got
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(result, indent=1) + "\n")
    table(result)


if __name__ == "__main__": main()
