"""What do the bfloat16 rows of the modulation table change in a float32 run? Writes results/row_dtype.json.

`python benchmarks/row_dtype.py gradients` compares the adapter's gradients with those of the exact layers in float32, at full width: two blocks of the
real size with random bfloat16 weights, one timestep a step. Rows are those of the nearest bfloat16 timestep, as in a bfloat16 run, so there are two
comparisons: with layers that are told that timestep (the rounding of rows), and with layers that are told the drawn one. 6 GB of memory.
`python benchmarks/row_dtype.py held_out` trains the demo's adapter on the learnt tiny model with rows of both dtypes, and measures the error as `make demo` does."""
import argparse, gc, json, os, platform, tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch
from torch.nn.functional import cosine_similarity

from qie_nb.config import LoraSection, make_config
from qie_nb.models.modulation import ModulationTable, model_timesteps, use_modulation_table

OUT = Path(__file__).parent/"results"/"row_dtype.json"
WIDTH = dict(num_layers=2, num_attention_heads=24, attention_head_dim=128, joint_attention_dim=3584, in_channels=64, out_channels=16)
TIMES, VARIANTS = (250., 731., 989.), {"v1, 2509": False, "2511": True} # zero_cond_t


def checkpoint(folder, zero_cond_t):
    from diffusers import QwenImageTransformer2DModel
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = QwenImageTransformer2DModel(**WIDTH, zero_cond_t=zero_cond_t)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return folder


def gradients(transformer, time, told): # {name: gradient}; `time`: 0 to 1000, `told`: what the model gets, 0 to 1
    g = torch.Generator().manual_seed(1)
    x0, eps, control = (torch.randn(1, 16, 64, generator=g) for _ in range(3))
    text, s = torch.randn(1, 8, WIDTH["joint_attention_dim"], generator=g), time / 1000
    x = torch.cat([(1 - s) * x0 + s * eps, control], 1)
    out = transformer(x, text, None, torch.tensor([told]), [[(1, 4, 4)] * 2], return_dict=False)[0][:, :16]
    transformer.zero_grad()
    (out - (eps - x0)).square().mean().backward()
    return {n: p.grad.flatten().clone() for n, p in transformer.named_parameters() if p.grad is not None}


def with_adapter(transformer):
    from qie_nb.lora.adapters import add_lora
    add_lora(transformer.requires_grad_(False), LoraSection(r=16))
    g = torch.Generator().manual_seed(3)
    for n, p in transformer.named_parameters():
        if "lora_" in n: p.data = torch.randn(p.shape, generator=g) * (0.02 if "lora_B" in n else p.shape[-1] ** -0.5)
    return transformer


def compared(a, b): # b: of the exact layers
    whole = [torch.cat([g[n] for n in b]) for g in (a, b)]
    one = lambda x, y: float(cosine_similarity(x.double(), y.double(), 0))
    return dict(cosine=one(*whole), least_cosine_of_a_matrix=min(one(a[n], b[n]) for n in b), matrices=len(b), norm=float(whole[0].norm() / whole[1].norm()))


def full_width():
    from diffusers import QwenImageTransformer2DModel
    told, rows = {t: model_timesteps([t], torch.bfloat16)[0] for t in TIMES}, {}
    for variant, zero in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            checkpoint(folder, zero)
            layers = with_adapter(QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float32))
            exact = {t: [gradients(layers, t, at) for at in (told[t], t / 1000)] for t in TIMES}
            del layers
            for dtype in (torch.bfloat16, torch.float32):
                table = ModulationTable("", dtype, WIDTH["num_layers"], folder)
                of = told if dtype == torch.bfloat16 else {t: model_timesteps([t], dtype)[0] for t in TIMES}
                table.make(tuple(sorted({0., *of.values()})))
                gc.collect()
                small = with_adapter(use_modulation_table(QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float32), table))
                for t in TIMES:
                    key = f"{variant}, timestep {t:g}, rows in {str(dtype)[6:]}"
                    if dtype == torch.bfloat16: rows[f"{key}, layers told {told[t] * 1000:g}"] = compared(gradients(small, t, told[t]), exact[t][0])
                    rows[f"{key}, layers told {t:g}"] = compared(gradients(small, t, t / 1000), exact[t][1])
                del small, table
        for name, r in rows.items():
            if name.startswith(variant): print(name, r, flush=True)
    return rows


def held_out(seeds=3, steps=150):
    from qie_nb.data.dataset import ImageDataset, find_samples
    from qie_nb.devices.edit_model import EditModel
    from qie_nb.tiny.photos import SEEDS, answers, demo_config, errors, truths, make_pairs
    from qie_nb.trainer import QwenImageEditTrainer
    out, found = Path(tempfile.mkdtemp()), {}
    make_pairs(out/"data", "duotone", 48, seed=0, split="train"), make_pairs(out/"held", "duotone", 12, seed=1, split="held_out")
    for seed in range(seeds):
        for dtype in (torch.float32, torch.bfloat16):
            c, name = demo_config(out, steps), str(dtype)[6:]
            c["train"] |= dict(output_dir=str(out/f"{name}_{seed}"), seed=seed, eval_steps=None, eval_interval=0, val_path=None, val_fraction=0)
            c["cache"]["cache_dir"], c["logging"] = str(out/"cache"), dict(report_to="none", log_dir=str(out/"runs"))
            with mock.patch.object(EditModel, "row_dtype", lambda self, folder=None: dtype):
                t = QwenImageEditTrainer(make_config(c)).fit()
                assert t.modulation_table.dtype == dtype and t.weight_dtype == torch.float32
                held = ImageDataset(t.config, samples=find_samples(out/"held"))
                held.set_areas(t.components.areas)
                found.setdefault(name, []).append(sum(e := errors(answers(t, held, SEEDS), truths(t, held))) / len(e))
            print(name, seed, found[name][-1], flush=True)
    return dict(steps=steps, error_in_grey_levels=found)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("part", choices=["gradients", "held_out"])
    part = p.parse_args().part
    result = json.loads(OUT.read_text()) if OUT.is_file() else {}
    machine = dict(device="cpu", cores=os.cpu_count(), machine=platform.machine()) | {n: version(n) for n in ("torch", "diffusers", "transformers", "peft")}
    result[part] = dict(made=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine, result=full_width() if part == "gradients" else held_out())
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__": main()
