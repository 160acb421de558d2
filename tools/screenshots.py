"""README's screenshots of the widgets in JupyterLab: `make screenshots` writes them to docs/."""
import io, json, re, sys, tempfile
from pathlib import Path

from PIL import Image, ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]/"tests/end_to_end"))
from browser.lab import Lab, Page, chrome
from test_browser import notebook

MOST = 290_000 # bytes of an image

SET = '''
import tempfile, warnings
from pathlib import Path
from qie_nb.data.dataset import ImageDataset
from qie_nb.tiny.photos import squares, EDITS, make_pairs
from qie_nb.widgets.before_after import before_after
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.widgets import cache_status, sample_viewer
work = Path(tempfile.mkdtemp())
folder = make_pairs("pairs", "duotone", 48)
config = dict(
    model=dict(pretrained_model_name_or_path="tiny", lora=dict(r=16)), data=dict(dataset_path=str(folder), image_size=[96, 96], batch_size=4),
    train=dict(output_dir=str(work), max_train_steps=200, device="cpu", mixed_precision="no", gradient_checkpointing=False, save_interval=0,
               val_fraction=0.1, eval_interval=0, eval_steps=30, eval_images=2, eval_num_inference_steps=8),
    cache=dict(cache_dir="cache"), optimizer=dict(lr=5e-3, weight_decay=0.0), logging=dict(log_dir="runs"))
trainer = QwenImageEditTrainer(config)
trainer.cache_embeddings()'''
AFTER = '''
image = squares()[1]
edited = trainer.predict(image, EDITS["duotone"].instruction, num_inference_steps=8, true_cfg_scale=1.0)
before_after(image, edited, ["photograph", "what the LoRA makes of it"], height=300)'''


def write(path, png):
    "As it is where that is small, else with 256 colours."
    im, out = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    im = im.crop((0, 6, im.width, im.height)) # the frame of the output above may reach in; `take` leaves room for it
    im = ImageOps.expand(im.crop(ImageOps.invert(im).getbbox()), 24, "white") # what is not white
    im.save(out, "PNG", optimize=True)
    if out.tell() > MOST:
        out = io.BytesIO()
        im.quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    Path(path).write_bytes(out.getvalue())
    print(path, im.size, f"{out.tell() / 1e3:.0f} kB")


def take(page, box, path):
    page.page.add_style_tag(content=".jp-OutputPrompt, .jp-OutputArea-prompt {visibility: hidden} .jp-OutputArea-output {padding-top: 8px !important} * {caret-color: transparent}")
    box.scroll_into_view_if_needed()
    page.page.mouse.move(0, 0)
    page.page.wait_for_timeout(700)
    write(path, box.screenshot())


def main(docs):
    with tempfile.TemporaryDirectory() as tmp, chrome() as browser:
        folder, home = Path(tmp)/"notebooks", Path(tmp)/"home"
        folder.mkdir(), home.mkdir()
        (folder/"a.ipynb").write_text(json.dumps(notebook([SET, 'sample_viewer(ImageDataset(config), trainer)', 'cache_status(ImageDataset(config))', "_ = trainer.fit()", AFTER])))
        with Lab(folder, home) as lab:
            page = Page(browser, lab, "a.ipynb", tmp, scale=2).kernel()
            page.run_all(wait=False)
            p, area = page.page, lambda text: page.page.locator(f".jp-OutputArea-output:has({text})").first
            panel = area("button:has-text('stop and save')")
            panel.wait_for(timeout=300_000)
            p.wait_for_function("() => { const m = document.querySelector('.jp-Notebook').innerText.match(/step (\\d+) of 200/); return m && +m[1] >= 128; }", timeout=600_000)
            take(page, panel, docs/"panel.png")
            page.finished(600)
            assert not page.errors(), page.errors()
            viewer = area("button:has-text('next')")
            viewer.locator("label:has-text('whole text') input, input[type=checkbox]").first.uncheck()
            p.wait_for_timeout(1500)
            take(page, viewer, docs/"viewer.png")
            status = area("button:has-text('verify')")
            status.locator("button:has-text('verify')").click()
            p.wait_for_timeout(3000)
            take(page, status, docs/"cache.png")
            both = area("[role=slider] img")
            both.locator("[role=slider]").focus()
            for _ in range(8): p.keyboard.press("ArrowLeft")
            p.wait_for_timeout(1000)
            both.locator("[role=slider]").blur() # no ring around it
            take(page, both, docs/"slider.png")
            page.close()


if __name__ == "__main__": main(Path(sys.argv[1]))
