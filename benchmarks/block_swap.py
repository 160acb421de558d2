"""Streamed blocks against blocks that stay on the GPU: step time, peak memory, and how fast copies are.

python benchmarks/block_swap.py [--layers 60] [--size 1024] [--places 2 3] [--inputs] [--modes resident streamed] [--kind nf4] [--out FILE]
CUDA only; random weights of full size on the modulation table, one image and one control, LoRA r16, full checkpointing. Prints JSON. Not run on a GPU itself; part 7 of first_gpu.py was.
--layers below 60 makes both fit a smaller card: the ratio of the times hardly depends on it. Host memory: 0.46 GB a layer in bfloat16, pinned."""
import argparse, gc, json, platform, statistics, time
from importlib.metadata import version

LIBRARIES = ("torch", "diffusers", "peft", "accelerate")


class Rows:
    "A modulation table of one made-up time: what it says is of no matter to speed."
    def __init__(self, torch, layers, dim, dtype):
        self.dtype, self.row = dtype, (torch.randn(1, 12 * layers, dim) * 0.02).to(dtype).pin_memory()
    def rows(self, times, device="cpu"): return self.row.expand(len(times), -1, -1).to(device)


def made_up(layers, device, kind, streamed, places):
    "The transformer of the published size with random normal weights; blocks are made one after the other, so that neither memory ever holds them twice."
    import torch
    from accelerate import init_empty_weights
    from diffusers import QwenImageTransformer2DModel
    from qie_nb.models.modulation import use_modulation_table
    from qie_nb.models.quantizations.known import quantizable_layers, quantize_linear
    from qie_nb.devices.strategies.block_swap import PinnedBlock, enable_block_swap
    from qie_nb.devices.strategies.host_memory import pinned
    with init_empty_weights(include_buffers=False): tr = QwenImageTransformer2DModel(num_layers=layers)
    use_modulation_table(tr, Rows(torch, layers, tr.inner_dim, torch.bfloat16))
    tr.requires_grad_(False).eval()

    def fill(module):
        for m in module.modules():
            for k, p in m._parameters.items():
                if p is None or not p.is_meta: continue
                new = torch.empty(p.shape, dtype=torch.bfloat16, device=device)
                new.fill_(1) if p.ndim == 1 and k == "weight" else new.normal_(0, 0.02)
                m._parameters[k] = torch.nn.Parameter(new, requires_grad=False)
    packed = []
    for block in tr.transformer_blocks:
        fill(block)
        if kind:
            for name in quantizable_layers(block): block.set_submodule(name, quantize_linear(block.get_submodule(name), kind))
        if streamed: packed.append(PinnedBlock(block, lambda n: pinned(n, device)))
    fill(tr)
    for m in tr.modules():
        for k, b in m._buffers.items():
            if b is not None: m._buffers[k] = b.to(device)
    return enable_block_swap(tr, device, packed, slots=places) if streamed else tr


def batch(size, layers, device):
    import torch
    n = size // 16
    g = torch.Generator().manual_seed(0)
    make = lambda *s: torch.randn(*s, generator=g).bfloat16().to(device)
    return dict(hidden_states=make(1, 2 * n * n, 64), encoder_hidden_states=make(1, 250, 3584), timestep=torch.tensor([0.5], device=device).bfloat16(),
                img_shapes=[[(1, n, n), (1, n, n)]], return_dict=False)


def measure(args, device, mode, places=3):
    "Seconds of a step (median), and bytes."
    import torch
    from qie_nb.config import make_config
    from qie_nb.lora.adapters import add_lora
    from qie_nb.models.quantizations.known import held_bytes
    from qie_nb.devices.strategies.offload import offload_checkpoint_inputs
    torch.manual_seed(0)
    tr = made_up(args.layers, device, args.kind, mode == "streamed", places)
    add_lora(tr, make_config().model.lora)
    tr.enable_gradient_checkpointing()
    if args.inputs: offload_checkpoint_inputs(tr, device)
    params = [p for p in tr.parameters() if p.requires_grad]
    optimizer, given = torch.optim.AdamW(params, lr=1e-5, fused=True), batch(args.size, args.layers, device)
    gc.collect(), torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.warmup + args.steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        if hasattr(tr, "lookup"): tr.lookup.expect(torch.tensor([0.5]))
        tr(**given)[0].float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    times = times[args.warmup:]
    out = dict(mode=mode, places=places if mode == "streamed" else None, seconds=statistics.median(times), fastest=min(times), slowest=max(times), peak_bytes=torch.cuda.max_memory_allocated(),
               reserved_bytes=torch.cuda.max_memory_reserved(), weights_bytes=held_bytes(tr))
    if mode == "streamed":
        size = tr.block_swap.pinned[0].flat.nbytes
        out |= dict(block_bytes=size, copied_bytes_a_step=2 * size * (args.layers - len(tr.block_swap.slots)), host_bytes=size * args.layers)
    return out


def bandwidth(device, size):
    "Bytes a second from pinned memory to the GPU, one block at a time, and the same while the GPU multiplies; the rate of those products alone and beside the copies."
    import torch
    from qie_nb.devices.strategies.host_memory import Streams, pinned
    host, place, streams = pinned(size, device), torch.empty(size, dtype=torch.uint8, device=device), Streams(device)
    a = torch.randn(8192, 3072, device=device, dtype=torch.bfloat16)
    b = torch.randn(3072, 12288, device=device, dtype=torch.bfloat16)

    def timed(work, n=20):
        work(), torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(n): work()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / n
    def copy():
        with torch.cuda.stream(streams.side): place.copy_(host, non_blocking=True)
    many = lambda: [a @ b for _ in range(40)]
    alone, products, both = timed(copy), timed(many), timed(lambda: (copy(), many()))
    return dict(block_bytes=size, copy_bytes_per_second=size / alone, products_seconds=products, both_seconds=both, overlap=(alone + products - both) / min(alone, products))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layers", type=int, default=60)
    p.add_argument("--size", type=int, default=1024, help="side of target and control in pixels")
    p.add_argument("--places", type=int, nargs="+", default=[2, 3])
    p.add_argument("--modes", nargs="+", default=["resident", "streamed"], choices=["resident", "streamed"])
    p.add_argument("--kind", default=None, help="quantization, e.g. nf4")
    p.add_argument("--inputs", action="store_true", help="checkpointed inputs wait in host memory too")
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--out", default=None, help="file for the JSON")
    args = p.parse_args()
    import torch
    if not torch.cuda.is_available(): return print(json.dumps(dict(not_run="there is no CUDA GPU here")))
    device = torch.device("cuda", torch.cuda.current_device())
    about = torch.cuda.get_device_properties(device)
    out = dict(device=about.name, memory_bytes=about.total_memory, host=platform.processor(), versions={n: version(n) for n in LIBRARIES}, settings=vars(args), copies=bandwidth(device, 454_000_000), results=[])
    for mode in args.modes:
        for places in args.places if mode == "streamed" else [0]:
            try: out["results"].append(measure(args, device, mode, places))
            except torch.cuda.OutOfMemoryError as e: out["results"].append(dict(mode=mode, places=places, out_of_memory=str(e).split(". ")[0]))
            gc.collect(), torch.cuda.empty_cache()
    if args.out: open(args.out, "w").write(json.dumps(out, indent=1))
    print(json.dumps(out, indent=1))


if __name__ == "__main__": main()
