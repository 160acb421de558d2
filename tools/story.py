"""The images and numbers of docs/story.md and docs/results.md: `python tools/story.py`.

Thirty pairs, two of them shifted, become a LoRA of the tiny model: checked, aligned, trained,
compared on held-out pairs, and used on two photographs. Then results that went wrong: the LoRA at
other strengths, and LoRAs of blurred and shifted pairs. Images of at most 60 kB are written to
docs/story/, and the blocks between marks in both pages are filled. Some minutes on a CPU."""
import io, re, sys, tempfile, time
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from qie_nb.data.alignment_check import align_pairs, check_alignment
from qie_nb.evaluation.compare import compare_edits, compare_validation
from qie_nb.evaluation.eval_images import drift_of, image_error
from qie_nb.predict import grid
from qie_nb.tiny.photos import EDITS, PhotoEdit, crops, make_pairs, squares
from qie_nb.trainer import QwenImageEditTrainer

DOCS = Path(__file__).resolve().parents[1]/"docs"
MOST = 60_000           # bytes of an image
EDIT = EDITS["duotone"] # the tiny model was not trained on it
PAIRS, HELD_OUT = 30, 5
SHIFTED = {"0004": 6, "0011": 9} # pairs of the story, and by how many pixels of 192
SHIFT, BLUR = 4, 2.0    # pixels of 96: what the bad pairs of the second part have
SAMPLING = dict(num_inference_steps=8, true_cfg_scale=1.0)


def write_image(name:str, rows:list, titles:list, scale:float=1.5):
    "Rows of images as one JPEG in docs/story/."
    raw = io.BytesIO()
    grid(rows, titles, scale).savefig(raw, format="png", dpi=100)
    quality = 95
    while True:
        out = io.BytesIO()
        Image.open(raw).convert("RGB").save(out, "JPEG", quality=quality, optimize=True)
        if out.tell() <= MOST:
            break
        quality -= 5
    path = DOCS/"story"/f"{name}.jpg"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(out.getvalue())
    print(path.name, f"{len(out.getvalue()) / 1e3:.0f} kB, quality {quality}")


def write_block(page:str, mark:str, text:str):
    "The text between a mark of a page and its end."
    path = DOCS/f"{page}.md"
    pattern = f"(<!-- {mark}: made by tools/story.py -->\n).*?(<!-- end -->)"
    filled, n = re.subn(pattern, lambda m: m[1] + text + "\n" + m[2], path.read_text(), flags=re.S)
    if n != 1:
        raise SystemExit(f"docs/{page}.md needs the mark {mark!r} once, it has {n}")
    path.write_text(filled)


def shift(image, pixels:int): # PIL image
    "The image moved to the right; what leaves it comes in at the left."
    return Image.fromarray(np.roll(np.asarray(image), pixels, axis=1))


def opened(path:Path): # PIL image
    "An image in RGB."
    return Image.open(path).convert("RGB")


def thirty_pairs(folder:Path) -> Path:
    "The pairs of the story; two targets are shifted, as by a careless crop."
    make_pairs(folder, EDIT, PAIRS, size=(192, 192))
    for name, pixels in SHIFTED.items():
        path = folder/"training_images"/f"{name}.png"
        shift(opened(path), pixels).save(path)
    return folder


def trained(work:Path, pairs:Path, **train): # `QwenImageEditTrainer` after its run
    "A run with the tiny preset."
    run = dict(output_dir=str(work), keep_checkpoints=9) # five of thirty pairs are held out
    trainer = QwenImageEditTrainer(dict(
        preset="tiny", data=dict(dataset_path=str(pairs)), cache=dict(cache_dir=str(work/"cache")),
        train=run | train, logging=dict(log_dir=str(work/"runs"), panel=False)))
    trainer.cache_embeddings()
    return trainer.fit()


def look_at_pairs(pairs:Path):
    "Four pairs, and the report of the check."
    names = ["0000", "0001", "0002", "0003"]
    rows = []
    for folder in ("control_images", "training_images"):
        rows.append([opened(pairs/folder/f"{name}.png") for name in names])
    write_image("pairs", rows, names)
    report = check_alignment(pairs)
    text = str(report).replace(str(pairs.parent) + "/", "")
    write_block("story", "check", f"```text\n{text}\n```")
    return report


def show_alignment(before:Path, after:Path):
    "A shifted pair, and what the check made of it."
    name = next(iter(SHIFTED))
    row = []
    for pairs in (before, after):
        for folder in ("control_images", "training_images"):
            row.append(opened(pairs/folder/f"{name}.png"))
    write_image("aligned", [row], ["before", "after, shifted", "before, cropped", "after, aligned"])


def show_training(trainer, work:Path, seconds:float):
    "Held-out pairs at the checkpoints of the run."
    steps = (50, 100, 150)
    folders = [str(work/"checkpoints"/f"step_{n:08}") for n in steps]
    photographs = squares()
    shown = compare_edits(trainer, photographs, EDIT.instruction, checkpoints=["base", *folders],
                          targets=[EDIT(p) for p in photographs], height=96, width=96, **SAMPLING)
    rows = [[p, *images, EDIT(p)] for p, images in zip(photographs, shown.images)]
    titles = ["before", "without LoRA", *(f"step {n}" for n in steps), "after"]
    write_image("steps", rows, titles)
    errors = mean_errors(shown.images, photographs)
    cells = " | ".join(f"{e:.0f}" for e in errors)
    table = "| | without LoRA | step 50 | step 100 | step 150 |\n|---|---|---|---|---|\n"
    table += f"| error, grey levels | {cells} |"
    took = f"The run took {seconds / 60:.1f} minutes on two shared CPU cores."
    write_block("story", "steps", f"{table}\n\n{took}")


def mean_errors(images:list, photographs:list) -> list: # of each column
    "Distance from the true edit in grey levels, root mean square."
    rows = []
    for row, photograph in zip(images, photographs):
        want = np.asarray(EDIT(photograph))
        rows.append([image_error(image, want) for image in row])
    return np.mean(rows, axis=0).tolist()


def show_held_out(trainer):
    "Pairs that were not trained on."
    shown = compare_validation(trainer, HELD_OUT, **SAMPLING)
    rows = []
    for control, images, target in zip(shown.controls, shown.images, shown.targets):
        rows.append([control, *images, target])
    write_image("held_out", rows[:3], ["before", "without LoRA", "with LoRA", "after"])
    errors = [[image_error(image, np.asarray(target)) for image in images]
              for images, target in zip(shown.images, shown.targets)]
    without, with_lora = np.mean(errors, axis=0)
    fall = f"the error falls from {without:.0f} to {with_lora:.0f} grey levels of 255"
    said = f"Over the {len(errors)} held-out pairs {fall} (root mean square)."
    write_block("story", "held out", said)


def drift_row(name:str, images:list, photographs:list) -> str:
    "A line of the table of results: error, detail and shift, as an evaluation measures them."
    drifts, errors = [], []
    for image, photograph in zip(images, photographs):
        want = np.asarray(EDIT(photograph))
        drifts.append(drift_of(image, np.asarray(photograph), want))
        errors.append(image_error(image, want))
    def mean(key):
        found = [d[key] for d in drifts if d.get(key) is not None]
        return f"{np.mean(found):.2f}" if found else "-"
    figures = f"{np.mean(errors):.0f} | {mean('detail_ratio')} | {mean('drift_shift_px')}"
    return f"| {name} | {figures} |"


def show_results(trainer, work:Path):
    "The good LoRA at four strengths, and LoRAs of bad pairs."
    photographs = squares()
    size = dict(height=96, width=96, **SAMPLING)
    strengths = {"right": 1, "too weak": 0.3, "too strong": 2, "nothing changed": 0}
    shown = compare_edits(trainer, photographs, EDIT.instruction, checkpoints=["now"],
                          scales=list(strengths.values()), **size)
    columns = {name: [row[k] for row in shown.images] for k, name in enumerate(strengths)}
    def blurred(array):
        image = EDIT(Image.fromarray((array * 255).astype(np.uint8)))
        return np.asarray(image.filter(ImageFilter.GaussianBlur(BLUR)), dtype=np.float32) / 255
    def moved(array):
        return np.roll(EDIT.formula(array), SHIFT, axis=1)
    for name, formula in (("blurred", blurred), ("shifted", moved)):
        folder = work/name
        make_pairs(folder/"pairs", PhotoEdit(EDIT.instruction, formula, known=False), 48)
        run = dict(eval_steps=None, eval_at_start=False, save_steps=None)
        other = trained(folder, folder/"pairs", **run)
        shown = compare_edits(other, photographs, EDIT.instruction, checkpoints=["now"], **size)
        columns[name] = [row[0] for row in shown.images]
    order = ["right", "too weak", "too strong", "blurred", "shifted", "nothing changed"]
    rows = [[p, *(columns[name][k] for name in order)] for k, p in enumerate(photographs)]
    write_image("results", rows, ["before", *order], 1.4)
    lines = ["| | error | fine detail | shift, px |", "|---|---|---|---|"]
    lines += [drift_row(name, columns[name], photographs) for name in order]
    write_block("results", "results", "\n".join(lines))


def main():
    work = Path(tempfile.mkdtemp())
    pairs = thirty_pairs(work/"my_pairs")
    report = look_at_pairs(pairs)
    aligned = work/"aligned_pairs"
    align_pairs(pairs, aligned, report)
    show_alignment(pairs, aligned)
    began = time.time()
    trainer = trained(work/"run", aligned)
    show_training(trainer, work/"run", time.time() - began)
    show_held_out(trainer)
    [photograph] = crops(1, seed=4, split="held_out")
    edit = trainer.predict(photograph, EDIT.instruction, height=96, width=96, **SAMPLING)
    write_image("predicted", [[photograph, edit]], ["your photograph", "edit"], 2.2)
    show_results(trainer, work)


if __name__ == "__main__":
    sys.exit(main())
