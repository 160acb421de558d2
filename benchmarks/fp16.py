"""float16 inside products and attention (qie_nb.devices.fp16) against bfloat16 and float32: how far outputs and gradients are from float32's, what is not finite, step time and memory.

python benchmarks/fp16.py [--layers 60] [--size 512] [--kind nf4] [--modes float32 bfloat16 half float16] [--tame] [--out FILE]
The model has its published size, random weights on the modulation table, and outliers (`with_outliers`) unless --tame. All modes have the same weights, which bfloat16 holds exactly; those of a --kind are quantized
from them in each mode's own dtype. float32 with 60 layers takes 54.5 GB: fewer --layers for a smaller card (about 10 with --kind nf4 on a T4, whose bfloat16 is emulated: leave it out of --modes for times).
--tiny runs a small model on any device, to see that the script works. On an H100 one block of full width was within 3e-4 of float32 (results/gpu_h100.json, part 3)."""
import argparse, gc, json, math, platform, statistics, time
from importlib.metadata import version

LIBRARIES = ("torch", "diffusers", "peft", "bitsandbytes", "optimum-quanto")
MODES = ("float32", "bfloat16", "half", "float16") # the first is what the others are compared with; float16 is the whole model in it


class Rows:
    "A modulation table of one made-up time, with gates that let something through."
    def __init__(self, torch, layers, dim, dtype):
        self.dtype, self.row = dtype, (torch.randn(1, 12 * layers, dim, generator=torch.Generator().manual_seed(1)) * 0.3).bfloat16().to(dtype)
    def rows(self, times, device="cpu"): return self.row.expand(len(times), -1, -1).to(device)


def with_outliers(tr, residual=2.**20, power=16):
    "Weights with a trained model's outliers: two large channels of the residual stream, two large features of each MLP, one large value channel."
    import torch
    with torch.no_grad():
        for m in (tr.img_in, tr.txt_in):
            m.weight *= max(1., residual / 2.**14) # otherwise the norms would remove the other channels
            m.bias[3] += residual
            m.bias[7] -= residual
        for block in tr.transformer_blocks:
            for mlp in (block.img_mlp, block.txt_mlp):
                mlp.net[0].proj.weight[:2] *= 2.**power
                mlp.net[2].weight[:, :2] *= 2.**-(power - 2)
            for v, out in ((block.attn.to_v, block.attn.to_out[0]), (block.attn.add_v_proj, block.attn.to_add_out)):
                v.weight[1] *= 2.**10
                out.weight[:, 1] *= 2.**-10
    return tr


def made_up(a, mode, device):
    "The transformer, one block after the other, so that no memory holds it twice."
    import torch
    from accelerate import init_empty_weights
    from diffusers import QwenImageTransformer2DModel
    from qie_nb.devices.fp16 import enable_fp16
    from qie_nb.models.modulation import use_modulation_table
    from qie_nb.models.quantizations.known import quantizable_layers, quantize_linear
    dtype = dict(half=torch.float32).get(mode) or getattr(torch, mode)
    small = dict(num_attention_heads=2, attention_head_dim=32, joint_attention_dim=64, axes_dims_rope=(8, 12, 12)) if a.tiny else {}
    with init_empty_weights(include_buffers=False): tr = QwenImageTransformer2DModel(num_layers=a.layers, **small)
    use_modulation_table(tr, Rows(torch, a.layers, tr.inner_dim, dtype))
    tr.requires_grad_(False).eval()
    rng = torch.Generator(device).manual_seed(0)

    def fill(module):
        for m in module.modules():
            for k, p in m._parameters.items():
                if p is None or not p.is_meta: continue
                new = torch.empty(p.shape, dtype=torch.bfloat16, device=device)
                new.fill_(1) if p.ndim == 1 and k == "weight" else new.normal_(0, 0.02, generator=rng)
                m._parameters[k] = torch.nn.Parameter(new, requires_grad=False)
    blocks, tr.transformer_blocks = tr.transformer_blocks, torch.nn.ModuleList() # so that outliers can be put into a part
    fill(tr)
    if not a.tame: with_outliers(tr)
    torch.nn.Module.to(tr, dtype)
    ends = tr.img_in, tr.txt_in
    for block in blocks:
        fill(block)
        tr.transformer_blocks, tr.img_in, tr.txt_in = torch.nn.ModuleList([block]), torch.nn.Linear(1, 8), torch.nn.Linear(1, 8)
        if not a.tame: with_outliers(tr)
        torch.nn.Module.to(block, dtype)
        if a.kind:
            for name in quantizable_layers(block): block.set_submodule(name, quantize_linear(block.get_submodule(name), a.kind))
    tr.transformer_blocks, (tr.img_in, tr.txt_in) = blocks, ends
    for m in tr.modules():
        for k, b in m._buffers.items():
            if b is not None: m._buffers[k] = b.to(device)
    return enable_fp16(tr) if mode == "half" else tr


def batch(a, dtype, device, width):
    import torch
    n, g = a.size // 16, torch.Generator().manual_seed(0)
    make = lambda *s: torch.randn(*s, generator=g).bfloat16().to(device, dtype)
    return dict(hidden_states=make(1, 2 * n * n, 64), encoder_hidden_states=make(1, a.words, width), timestep=torch.tensor([0.5], device=device).to(dtype),
                img_shapes=[[(1, n, n), (1, n, n)]], return_dict=False)


def weight_norms(a, mode, device):
    "Output and gradients on the CPU, and a row of results."
    import torch
    from qie_nb.config import make_config
    from qie_nb.lora.adapters import add_lora, adapters_in_base_dtype
    tr, cuda = made_up(a, mode, device), device.type == "cuda"
    add_lora(tr, make_config().model.lora)
    for n, p in tr.named_parameters():
        if "lora_B" in n: p.data.normal_(std=0.01, generator=torch.Generator(device).manual_seed(p.numel()))
    if mode in ("bfloat16", "float16"): adapters_in_base_dtype(tr)
    tr.enable_gradient_checkpointing()
    params, given = [p for p in tr.parameters() if p.requires_grad], batch(a, tr.dtype if not a.kind else tr.img_in.weight.dtype, device, tr.config.joint_attention_dim)
    target = given["hidden_states"].shape[1] // 2
    wait = torch.cuda.synchronize if cuda else lambda: None
    if cuda: gc.collect(), torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(1 + a.steps):
        for p in params: p.grad = None
        wait()
        began = time.perf_counter()
        tr.lookup.expect(torch.tensor([0.5]))
        out = tr(**given)[0][:, :target].float()
        out.square().mean().backward()
        wait()
        times.append(time.perf_counter() - began)
    row = dict(mode=mode, seconds=statistics.median(times[1:]), finite_output=bool(out.isfinite().all()), finite_gradients=all(bool(p.grad.isfinite().all()) for p in params),
               kernel=getattr(tr, "attention_kernel", None), peak_bytes=torch.cuda.max_memory_allocated() if cuda else None)
    if mode == "half":
        tops = tr.fp16_stats.read()
        row |= dict(longest_input=float(tops[0].max()), longest_gradient=float(tops[1].max()), not_finite=tr.fp16_stats.first())
    own = (out - out.mean(1, keepdim=True)).detach().flatten().cpu() # without what all tokens have in common
    return row, dict(output=out.detach().flatten().cpu(), output_by_token=own, gradients=torch.cat([p.grad.flatten().cpu() for p in params]))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layers", type=int, default=60)
    p.add_argument("--size", type=int, default=512, help="side of target and control in pixels")
    p.add_argument("--words", type=int, default=250, help="tokens of the prompt")
    p.add_argument("--kind", default=None, help="quantization, e.g. nf4 or qint8")
    p.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    p.add_argument("--tame", action="store_true", help="without outliers")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--out", default=None, help="file for the JSON")
    a = p.parse_args()
    import torch
    if not torch.cuda.is_available() and not a.tiny: return print(json.dumps(dict(not_run="there is no CUDA GPU here; --tiny runs a small model on the CPU")))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    about = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    out, exact = dict(device=about.name if about else platform.processor(), capability=f"{about.major}.{about.minor}" if about else None, versions={n: version(n) for n in LIBRARIES}, settings=vars(a), results=[]), None
    torch.backends.cuda.matmul.allow_tf32 = False
    for mode in a.modes:
        try: row, got = weight_norms(a, mode, device)
        except torch.OutOfMemoryError as e: row, got = dict(mode=mode, out_of_memory=str(e).split(". ")[0]), None
        if mode == "float32": exact = got
        elif exact and got: row["errors"] = {n: e if math.isfinite(e := float((got[n] - t).norm() / t.norm())) else None for n, t in exact.items()}
        out["results"].append(row)
        gc.collect()
        if about: torch.cuda.empty_cache()
    text = json.dumps(out, indent=1)
    if a.out: open(a.out, "w").write(text)
    print(text)


if __name__ == "__main__": main()
