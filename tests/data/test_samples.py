"""Every usual layout of a data set is found; bad rows are refused with their number; text stays text."""
import json, os, unicodedata
from pathlib import Path

import datasets
import pandas as pd
import pytest
from PIL import Image

from helpers import on_call, write_pairs
from qie_nb.config import make_config
from qie_nb.data.images import Geometry, source_digest
from qie_nb.data.samples import ONE_IMAGE, ImageChanged, Sample, Samples, config_samples
from qie_nb.data.samples import find_samples, load_images, split_held_out, usable

IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp")


def write_image(path, red=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (red, 50, 90)).save(path)
    return path


def tree(root, names):
    "Images and captions by their names; each image has a colour of its own."
    for n, name in enumerate(names.split() if isinstance(names, str) else names):
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        if name.lower().endswith((".txt", ".caption")): (root/name).write_text("make it blue")
        elif not name.lower().endswith(IMAGES): (root/name).touch()
        else: write_image(root/name, n)
    return root


def table(root, rows, name="metadata.jsonl"):
    root.mkdir(exist_ok=True)
    if name.endswith(".csv"): pd.DataFrame(rows).to_csv(root/name, index=False)
    else: (root/name).write_text("\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows))
    return root


def facts(samples, root): # [(id, target, controls, prompt)] by names
    rel = lambda p: p.relative_to(root).as_posix()
    return [(s.id, rel(s.target), " ".join(map(rel, s.controls)), s.prompt) for s in samples]


def hub(**columns):
    "A `datasets.Dataset` of columns; one with `image` in its name has images, with `images` lists of them."
    types = {name: datasets.List(datasets.Image()) if "images" in name else datasets.Image() for name in columns if "image" in name}
    text = {name: datasets.Value("string") for name in columns if name not in types}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(types | text))


# --- folders
# target | controls | caption | description of the layout
LAYOUTS = """training_images/a.png | control_images/a.png | training_images/a.txt | folders training_images/ + control_images/
target/a.jpg | control/a.png control_2/a.webp | target/a.txt | folders target/ + control/, control_2/
after/a.png | before/a.png | captions/a.txt | folders after/ + before/, captions/
targets/a.png | control_images/a.png control_images/a_1.png control_images/a_2.png | targets/a.caption |
targets/a.png | controls/a.png controls/a_control_1.png controls/a_control_2.png | targets/a.txt |
images/a.png | control/a.png control_2/a.png control_10/a.png | images/a.txt |
a_end.png | a_start.png | a.txt | one folder, pairs by their names: targets _end, controls _start
a_target.jpg | a_control.png | a_target.txt |
a_T.png | a_R.png | a.txt |
x-output.png | x-input.png | x.txt |
images/a_target.png | images/a_input.png | images/a.txt |
train/images/a.png | train/control/a.png | train/images/a.txt | in train/: folders images/ + control/"""


@pytest.mark.parametrize("row", LAYOUTS.splitlines())
def test_folder_layouts(row, tmp_path):
    target, controls, caption, layout = map(str.strip, row.split("|"))
    samples = find_samples(tree(tmp_path, f"{target} {controls} {caption}"))
    assert [f[1:] for f in facts(samples, tmp_path)] == [(target, controls, "make it blue")] and not samples.ignored
    assert layout in ("", samples.layout) and usable(samples)[1] == [((8, 6),) * (1 + len(controls.split()))]


def test_numbered_controls_and_numbered_samples(tmp_path):
    tree(tmp_path, "images/cat.png images/cat.txt images/cat_1.png images/cat_1.txt control/cat.png control/cat_1.png control/cat_2.png control/cat_2024.png")
    samples = find_samples(tmp_path)
    assert {s.id: [c.stem for c in s.controls] for s in samples} == {"cat": ["cat", "cat_2"], "cat_1": ["cat_1"]}
    assert samples.ignored == [("control/cat_2024.png", "a control without a target")]


def test_ignored_files_are_listed_with_reasons(tmp_path):
    tree(tmp_path, "images/a.png images/a.txt images/a_mask.png control/a.png control/b.png images/c.txt contrl_2/a.png images/._a.png loose.png captions/d.txt")
    for name in ("notes.md", ".DS_Store"): (tmp_path/"images"/name).touch()
    (tmp_path/"images"/"dir.png").mkdir()
    os.close(os.open(os.fsencode(tmp_path/"images") + b"/caf\xe9.png", os.O_CREAT))
    samples = find_samples(tmp_path)
    assert dict(samples.ignored) == {
        "control/b.png": "a control without a target", "contrl_2": "a folder that is not used (1 .png)", "captions/d.txt": "a caption without an image", "images/._a.png": "hidden",
        "images/c.txt": "a caption without an image", "images/caf\\xe9.png": "its name is not UTF-8",
        "images/dir.png": "a folder", "images/notes.md": "no image", "loose.png": "not in one of the folders"}
    assert "1 sample (folders images/ + control/), 1 control each, masks for 1 of 1; 9 files ignored: captions/d.txt (a cap".encode() in repr(samples).encode()


@pytest.mark.parametrize("names, sentence", [
    ("images/a.png images/a.txt",
     "No control images found in .* It contains: images/ \\(1 .png, 1 .txt\\). "
     "Put the images before the edit into control_images/$"),
    ("images/a.png images/a.txt images/a.caption control/a.png",
     "two captions have the name 'a': a.caption and a.txt in"),
    ("a_start.png a_end.png a_after.png a.txt",
     "two samples have the name 'a': a_after.png and a_end.png in"),
    ("a_start.png a_end.png",
     "1 of 1 samples have no caption: 'a'; set one instruction for all in `data.prompt`, or "
     "write each into a text file of its image's name, e.g. '.*a_end.txt'"),
])
def test_unusable_folders(names, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence): find_samples(tree(tmp_path, names))


def test_captions_are_utf_8(tmp_path):
    tree(tmp_path, "images/a.png control/a.png")
    for written in ("make it blue\r\n\u732b".encode("utf-16"), b"\xfe\xff" + "make it blue\r\n\u732b".encode("utf-16-be")):
        (tmp_path/"images"/"a.txt").write_bytes(written)
        assert find_samples(tmp_path)[0].prompt == "make it blue\n\u732b"
    (tmp_path/"images"/"a.txt").write_bytes(b"b\0l\0u\0e\0")
    with pytest.raises(ValueError, match="a.txt' is not UTF-8; save it as UTF-8"): find_samples(tmp_path)
    (tmp_path/"images"/"a.txt").write_bytes(b"\xef\xbb\xbf \xe6\x8a\x8a\xe7\x8c\xab \r\n")
    assert find_samples(tmp_path)[0].prompt == "把猫"


# --- names of files
NAMES = dict(longest="猫" * 83 + "xx", emoji="👩‍🎨🖌️", spaces=" a  b ", dots="a.b.c", quotes="a'b\"c", html="<b>&amp;",
             colon="C:x", backslash="a\\b", newline="a\nb", glob="[a]*?", semicolon="a;b,c", hangul=unicodedata.normalize("NFC", "한국어"))


@pytest.mark.parametrize("stem", NAMES.values(), ids=NAMES)
def test_unusual_file_names(stem, tmp_path):
    name = f"{stem}.png"
    assert len(os.fsencode(name)) <= 255
    folders = find_samples(tree(tmp_path, (f"images/{name}", f"images/{stem}.txt", f"control/{name}")))
    row = dict(image=f"images/{name}", edit_image=f"control/{name}", prompt="make it blue")
    for samples in (folders, find_samples(table(tmp_path, [row])), find_samples(table(tmp_path, [row], "t.csv")/"t.csv")):
        assert [s.id for s in samples] == [stem] and len(usable(samples)[0]) == 1
        assert load_images(samples[0], Geometry((32, 32)))["image"].shape == (32, 32, 3)


@pytest.mark.parametrize("target, control", [("NFC", "NFD"), ("NFD", "NFC"), ("NFD", "NFD")])
def test_unicode_normalisation_of_names(target, control, tmp_path):
    a, b = (unicodedata.normalize(form, "café한") for form in (target, control))
    samples = find_samples(tree(tmp_path, f"images/{a}.png captions/{b}.txt control/{b}.png"))
    assert [s.id for s in samples] == [unicodedata.normalize("NFC", "café한")] and not samples.ignored
    table(tmp_path, [dict(image=f"images/{b}.png", edit_image=f"control/{a}.png", prompt="p")], "t.csv")
    assert [s.id for s in usable(find_samples(tmp_path/"t.csv"))[0]] == [s.id for s in samples]
    (tmp_path/"t.csv").unlink()
    if target == control: return
    write_image(tmp_path/"images"/f"{b}.png")
    with pytest.raises(ValueError, match=r"two samples have the name 'café한': .* \(the same name in two Unicode normalisations, NFC and NFD\)"): find_samples(tmp_path)


# --- tables
HEAD, GOOD = "image,edit_image,prompt\n", dict(image="t.png", edit_image="c.png", prompt="p")
# columns of target, control and prompt; further ones are not used
COLUMNS = """image,edit_image,prompt file_name,control,text target,source,caption output,input,instruction after,before,prompt path_target,path_control,prompt image,conditioning_image,text
image,kontext_images,prompt target_image,image,prompt edited_image,original_image,edit_prompt target_file_name,input_file_name,prompt targetImage,editImage,editPrompt image,reference_image,text,licence""".split()


@pytest.mark.parametrize("names", COLUMNS)
@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
def test_column_names(names, kind, tmp_path):
    tree(tmp_path, "t.png c.png")
    samples = find_samples(table(tmp_path, [dict(zip(names.split(","), ("t.png", "c.png", "p", "free")))], f"anything.{kind}"))
    assert facts(samples, tmp_path) == [("t", "t.png", "c.png", "p")]
    assert all(f"`{c}`" in samples.layout for c in names.split(",")[:3]) and samples.layout.startswith(f"anything.{kind}: target `")
    assert ("licence" in names) == samples.layout.endswith("; not used: licence")


@pytest.mark.parametrize("row", [dict(edit_image=["c.png", "d.png"]), dict(edit_image_1="c.png", edit_image_2="d.png"), dict(edit_image="c.png", edit_image_2="d.png"),
                                 dict(control_10="d.png", control_9="c.png"), dict(edit_images='["c.png", "d.png"]'), dict(edit_images="['c.png', 'd.png']"), dict(control="c.png; d.png"), dict(control="c.png,d.png")], ids=str)
def test_several_controls_in_a_row(row, tmp_path):
    tree(tmp_path, "t.png c.png d.png")
    for name in ("m.jsonl", "m.csv"): # a list becomes its repr in CSV
        assert facts(find_samples(table(tmp_path, [dict(image="t.png", prompt="p") | row], name)/name), tmp_path)[0][2] == "c.png d.png"


def test_fewer_controls_and_commas_in_names(tmp_path):
    rows = [GOOD | dict(edit_image_2="d.png"), GOOD | dict(image="u.png", edit_image="c,d;e.png", edit_image_2="")]
    samples = find_samples(table(tree(tmp_path, "t.png u.png c.png d.png c,d;e.png"), rows, "m.csv"))
    assert [len(s.controls) for s in samples] == [2, 1] and ", 1 to 2 controls each" in repr(samples)


def test_a_later_control_does_not_take_the_place_of_an_empty_one(tmp_path):
    rows = [dict(image="t.png", prompt="p", control_1=c, control_2="d.png") for c in ("c.png", "")]
    for name in ("m.jsonl", "m.csv"):
        with pytest.raises(ValueError, match=f"row 2 of '{name}' has an image in 'control_2' but none in 'control_1'; fill 'control_1'"):
            find_samples(table(tree(tmp_path, "t.png c.png d.png"), rows, name)/name, allow_missing_control=True)
    file = str(tmp_path/"t.png")
    rows = hub(image=[file] * 2, edit_image=[file, None], edit_image_2=[file] * 2, prompt=["p"] * 2)
    with pytest.raises(ValueError, match="row 1 of the data set has an image in 'edit_image_2' but none in 'edit_image'"): find_samples(rows)


@pytest.mark.parametrize("held", [lambda r: r, lambda r: dict(data=r), lambda r: dict(version=1, samples=r, tags=["a"]), lambda r: {f"id{n}": x for n, x in enumerate(r)}])
def test_json_layouts(held, tmp_path):
    rows = [GOOD | dict(image=f"{t}.png") for t in "ut"]
    (tree(tmp_path, "t.png u.png c.png")/"set.json").write_text(json.dumps(held(rows)), encoding="utf-8-sig")
    assert [s.id for s in find_samples(tmp_path/"set.json")] == [s.id for s in find_samples(tmp_path)] == ["t", "u"]


@pytest.mark.parametrize("where, name", [("", "metadata.jsonl"), ("train/", "metadata.csv")])
def test_hub_image_folder(where, name, tmp_path):
    tree(tmp_path, f"{where}a.png {where}in/a.png")
    table(tmp_path/where, [dict(file_name="a.png", edit_image_file_name="in/a.png", text="p")], name)
    (tmp_path/"dataset_infos.json").write_text("{}")
    assert facts(find_samples(tmp_path), tmp_path) == [("a", f"{where}a.png", f"{where}in/a.png", "p")]


def test_hub_snapshot_links_to_its_blobs(tmp_path):
    store, snapshot = tmp_path/"datasets--me--cats", tmp_path/"datasets--me--cats"/"snapshots"/"1f"
    write_image(store/"blobs"/"t.png").rename(store/"blobs"/"aa")
    snapshot.mkdir(parents=True)
    for name in ("t.png", "c.png"): (snapshot/name).symlink_to("../../blobs/aa")
    table(snapshot, [GOOD])
    assert usable(find_samples(snapshot))[1] == [((8, 6), (8, 6))]
    write_image(tmp_path/"secret.png")
    (snapshot/"d.png").symlink_to("../../../secret.png")
    with pytest.raises(ValueError, match="row 1 of 'metadata.jsonl' names 'd.png' outside the data set"): find_samples(table(snapshot, [GOOD | dict(edit_image="d.png")]))


def test_equal_stems_get_their_path(tmp_path):
    rows = [GOOD | dict(image=f"{t}.png") for t in ("y/a", "b", "x/a", "x/a")]
    with pytest.raises(ValueError, match="two samples have the id 'x/a': rows 3 and 4 of 'metadata.jsonl'; rename or remove one"):
        find_samples(table(tree(tmp_path, "x/a.png y/a.png b.png c.png"), rows))


def test_unknown_columns_need_a_mapping(tmp_path):
    table(tree(tmp_path, "t.png c.png"), [dict(neu="t.png", alt="c.png", wunsch="p")], "set.csv")
    columns = dict(target="neu", control="alt", prompt="wunsch")
    for path in (tmp_path, tmp_path/"set.csv"):
        assert facts(find_samples(path, columns=columns), tmp_path) == [("t", "t.png", "c.png", "p")]
        with pytest.raises(ValueError, match="'set.csv' has no column for the target; it has neu, alt, wunsch; .*or use find_samples\\(path, columns=\\{'target': ...\\}\\)"): find_samples(path)
    for wrong, sentence in ((columns | dict(control="old"), "'old', which 'set.csv' does not have; .*from: neu, alt, wunsch"), (dict(edge="neu"), "'edge'")):
        with pytest.raises(ValueError, match=f"`columns` names {sentence}"): find_samples(path, wrong)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_csv_delimiters(mark, tmp_path):
    rows = mark.join(("image", "edit_image", "prompt")), mark.join(("t.png", "c.png", '"blue,\r\nnot; red"')), ""
    (tree(tmp_path, "t.png c.png")/"t.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    assert facts(find_samples(tmp_path), tmp_path) == [("t", "t.png", "c.png", "blue,\nnot; red")]


@pytest.mark.parametrize("name, text, sentence", [
    ("m.json", "[" * 100_000, "'m.json' is not valid JSON"), ("m.json", "5", "row 1 of 'm.json' must be an object"),
    ("m.csv", "", "'m.csv' has no rows"), ("m.csv", HEAD + "x" * 200_000, "'m.csv' is not valid CSV .*field larger than"),
    ("m.csv", HEAD + ",c.png,p", "row 1 of 'm.csv' must name an image file, got ''; write its path there"), ("m.csv", HEAD + "t.png,c.png, ", "1 of 1 samples have no caption or an empty one: 't'; fill row 1 of 'm.csv', or set one instruction for all in `data.prompt`"),
    ("m.csv", HEAD + "t.png,c.png,p\nt.png,x.png,p\ny.png,c.png,p", r"row 2 of 'm.csv' names 'x.png', which does not exist in .*; fix the path or remove the row \(2 of 3 rows are wrong\)"),
    ("m.jsonl", GOOD | dict(edit_image=5), "has no control image"),
    ("m.jsonl", GOOD | dict(edit_image=[["c.png"]]), "row 1 of 'm.jsonl' must name an image file, got"),
    ("m.jsonl", GOOD | dict(prompt="\ud800"), "caption of sample 't' is not valid Unicode; fix it in row 1"), ("m.jsonl", "\udcff", "'.*m.jsonl' is not UTF-8; save it")])
def test_unusable_tables(name, text, sentence, tmp_path):
    (tree(tmp_path, "t.png c.png")/name).write_bytes((text if isinstance(text, str) else json.dumps(text)).encode("utf-8", "surrogateescape"))
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as e: find_samples(tmp_path/name)
    assert "\n" not in str(e.value) and len(str(e.value)) < 600


# --- hostile tables
PATHS = ["../secret.png", "images/../../secret.png", "/dev/stdin", "SECRET", "images\\..\\..\\secret.png", "C:\\Windows\\win.ini", "\\\\server\\share\\a.png", "//server/share/a.png",
         "file:///etc/passwd", "file:secret.png", "data:image/png;base64,AAAA", "link.png", "linked/secret.png", "loop.png", "t.png\0.txt", "x" * 5000,
         "a/" * 3000 + "a.png", "", "   ", "..", ".", "~/secret.png", "${HOME}/a.png", "\ud800.png", "pipe.png"]


@pytest.fixture
def hostile(tmp_path):
    root = tree(tmp_path/"set", "t.png c.png images/a.png")
    write_image(tmp_path/"secret.png")
    (root/"link.png").symlink_to("../secret.png")
    (root/"linked").symlink_to(tmp_path)
    (root/"loop.png").symlink_to("loop.png")
    os.mkfifo(root/"pipe.png")
    return root


@pytest.mark.parametrize("path", PATHS, ids=[ascii(p[:30]) for p in PATHS])
def test_paths_outside_the_set_are_refused(path, hostile):
    path = path.replace("SECRET", str(hostile.parent/"secret.png"))
    for bad in (dict(image=path), dict(edit_image=path), dict(edit_image=["c.png", path])):
        with pytest.raises((ValueError, FileNotFoundError)) as e: find_samples(table(hostile, [GOOD | dict(image="images/a.png"), GOOD | bad]))
        message = str(e.value)
        assert message.startswith("row 2 of 'metadata.jsonl' ") and "\n" not in message and "\0" not in message and len(message) < 400
        message.encode()


def test_html_is_escaped():
    html = "\"></td><svg onload=alert(1)>&lt;script&gt;<!--<script>"
    page = Samples([Sample(html, Path("t.png"), (Path("c.png"),), html)], f"not used: {html}", [(html, html)])._repr_html_()
    assert not any(tag in page for tag in ("<script", "<svg", "<!--"))


def test_other_paths_inside_the_set(tmp_path):
    tree(tmp_path, "images/t.png control/c.png")
    row = GOOD | dict(image=str(tmp_path/"images"/"t.png"), edit_image="images/../control/c.png")
    assert len(find_samples(table(tmp_path, [row]))) == 1


# --- data sets of the hub
def images_of(n): return [Image.new("RGB", (8, 6), (i, 0, 0)) for i in range(n)]


def test_dataset_with_lists_of_controls():
    data = hub(target_image=images_of(3), control_images=[images_of(2), images_of(1), images_of(3)], prompt=list("abc"), quality=list("123"))
    for given in (data, datasets.DatasetDict(test=data.select([0]), train=data), datasets.DatasetDict(only=data)):
        samples = find_samples(given)
        assert [(s.id, len(s.controls), s.prompt) for s in samples] == [("000000", 2, "a"), ("000001", 1, "b"), ("000002", 3, "c")]
    assert samples.layout == "datasets.Dataset: target `target_image`, control `control_images`, prompt `prompt`; not used: quality"
    keep, sizes, skipped = usable(samples)
    assert sizes[2] == ((8, 6),) * 4 and not skipped and keep[2].controls[1].name == "control_images[2][1]"
    shuffled = find_samples(data.select([2, 0]))
    assert [(s.prompt, len(s.controls)) for s in shuffled] == [("c", 3), ("a", 2)]
    assert source_digest(shuffled[1].target) == source_digest(find_samples(data)[0].target)
    assert load_images(shuffled[0], Geometry((32, 32)))["control"][2].size == (8, 6)


def test_of_several_splits_one_must_be_called_train():
    data = hub(input_image=images_of(2), edited_image=images_of(2), edit_prompt=list("ab"))
    with pytest.raises(ValueError, match="the data set has the splits .* and no train; give one of them"):
        find_samples(datasets.DatasetDict(first=data, second=data))


def test_dataset_combined_with_a_folder(tmp_path):
    data = hub(input_image=images_of(4), edited_image=images_of(4)[::-1], edit_prompt=list("abcd"))
    both = find_samples([tree(tmp_path, "images/a.png images/a.txt control/a.png control/b.png"), data])
    assert both.ignored == [("0/control/b.png", "a control without a target")] and [s.id for s in both][:2] == ["0/a", "1/000000"]
    assert both.layout.startswith("0: folders images/ + control/; 1: datasets.Dataset: ")


@pytest.mark.parametrize("change, sentence", [
    (lambda d: d.remove_columns("prompt"), "the data set has no column for the prompt; it has image, edit_image; name it prompt or"),
    (lambda d: d.select([]), "the data set has no rows"),
    (lambda d: d.to_iterable_dataset(), "a streamed data set has no length; load it without `streaming=True`"),
    (lambda d: d.remove_columns("edit_image").add_column("edit_image", ["a.png", "b.png"]), r"column 'edit_image' of the data set has no images; use `cast_column\('edit_image', datasets.Image\(\)\)`"),
    (lambda d: d.remove_columns("prompt").add_column("prompt", ["x", None]), "1 of 2 samples have no caption or an empty one: '000001'; fill row 1, column 'prompt', or set"),
])
def test_unusable_datasets(change, sentence):
    with pytest.raises(ValueError, match=sentence): find_samples(change(hub(image=images_of(2), edit_image=images_of(2), prompt=["x", "y"])))


def test_broken_images_of_a_dataset_are_skipped(tmp_path):
    good = write_image(tmp_path/"a.png").read_bytes()
    cells = [dict(bytes=b, path=p) for b, p in ((good, "a.png"), (b"no", None), (None, "/nowhere/x.png"), (None, "https://example.org/a.png"))] + [None]
    data = hub(image=cells, control_image=[dict(bytes=good, path=None)] * 5, prompt=["p"] * 5)
    keep, _, skipped = usable(find_samples(data))
    assert [s.id for s in keep] == ["000000"]
    assert dict(skipped) == {f"00000{i}": f"image 'image[{i}]' cannot be read ({why}); replace it or remove the pair"
                             for i, why in ((1, "not an image or broken"), (2, "it does not exist"), (3, "it does not exist"), (4, "it is empty"))}


def test_no_data_set():
    for given, sentence in ((dict(repo_id="x"), "`data.dataset_path` is of type dict; it must be a folder, a table or"),
                            (__file__, "test_samples.py' is no table; it must be a folder or one of .jsonl, .json, .csv")):
        with pytest.raises(ValueError, match=sentence): find_samples(given)


# --- usable samples
def test_broken_images_are_skipped(tmp_path):
    samples = find_samples(tree(tmp_path, [name for n in "abc" for name in (f"images/{n}.png", f"images/{n}.txt", f"control/{n}.png")]))
    for path in (samples[1].controls[0], samples[2].target): path.write_bytes(path.read_bytes()[:-20])
    keep, sizes, skipped = usable(samples)
    assert [s.id for s in keep] == ["a"] and sizes == [((8, 6), (8, 6))] and keep.layout == samples.layout
    assert [(i, why.split("' cannot be read (")[0][-12:]) for i, why in skipped] == [("b", "ontrol/b.png"), ("c", "images/c.png")]
    with pytest.raises(ValueError, match="none of 2 samples can be used; the first: image .*b.png' cannot be read"): usable(samples[1:])
    assert usable([]) == ([], [], [])


def test_an_image_replaced_by_one_of_another_shape_changes_the_batch_of_its_sample(tmp_path):
    from helpers import settings, write_pairs
    from qie_nb.trainer import QwenImageEditTrainer
    data = QwenImageEditTrainer(settings(write_pairs(tmp_path/"set", ((96, 32), (96, 32))), tmp_path)).make_loader().dataset
    before = data.bucket(0), data.keys(0)["pixel_latent"]
    file = tmp_path/"set"/"training_images"/"0000.png"
    Image.open(file).resize((32, 96)).save(file)
    after = data.keys(0)["pixel_latent"], data.bucket(0)
    assert after[0] != before[1] and after[1][0] == before[0][0][::-1] and data.bucket(1) == before[0]


def test_a_changed_image_is_refused(tmp_path, monkeypatch):
    sample = find_samples(tree(tmp_path, "images/a.png images/a.txt control/a.png control_2/a.png"))[0]
    digests = [source_digest(p) for p in (sample.target, *sample.controls)]
    opened = []
    on_call(monkeypatch, Path, "open", lambda path, *a, **kw: opened.append(path))
    load_images(sample, Geometry((32, 32)), digests)
    assert sorted(opened) == sorted([sample.target, *sample.controls]), "each file is read once"
    write_image(sample.controls[1], 200)
    with pytest.raises(ImageChanged, match="control_2/a.png' has changed"): load_images(sample, Geometry((32, 32)), digests)
    assert load_images(sample, Geometry((32, 32)))["control"][1].getpixel((0, 0))[0] == 200
    with pytest.raises(ValueError): load_images(sample, Geometry((32, 32)), digests[:1])


def test_all_pairs_of_an_image_are_on_one_side_of_the_split(tmp_path):
    "Three edits of each of twelve images, which are copies under names of their own."
    samples = [Sample(f"{k}{n:02}", write_image(tmp_path/f"t{k}{n}.png", 99), (write_image(tmp_path/f"{k}{n}.png", n),), k) for n in range(12) for k in "abc"]
    held_images = []
    for seed in range(6):
        for fraction in (0.1, 0.25, ONE_IMAGE):
            train, held = split_held_out(samples, fraction, seed)
            image = lambda s: s.id[1:]
            assert len(held) == 3 * (3 if fraction == 0.25 else 1) and {image(s) for s in train}.isdisjoint(map(image, held)) and len(train) + len(held) == 36
            again = split_held_out(samples[::-1], fraction, seed)[1]
            assert {s.id for s in again} == {s.id for s in held}, "the order does not matter"
        held_images.append(frozenset(map(image, held)))
    assert len(set(held_images)) > 2, "another seed holds out others"


@pytest.mark.parametrize("images, fraction, held", [(19, 0.1, 2), (14, 0.1, 1), (3, 0.1, 1), (4, 0.9, 3), (2, 1.0, 1)])
def test_how_many_images_are_held_out(images, fraction, held, tmp_path):
    "The nearest whole number; at least one, and never all."
    samples = [Sample(str(n), write_image(tmp_path/f"t{n}.png", 99), (write_image(tmp_path/f"{n}.png", n),), "x") for n in range(images)]
    assert list(map(len, split_held_out(samples, fraction, 0))) == [images - held, held]


def test_excluded_pairs_are_left_out_of_the_data_set_and_of_no_other(tmp_path):
    roots = [write_pairs(tmp_path/name, ((16, 16),) * 3) for name in ("set", "val")]
    data = make_config(dict(data=dict(dataset_path=str(roots[0]), exclude=["0001"]))).data
    assert [s.id for s in config_samples(data)] == ["0000", "0002"]
    assert len(config_samples(data, str(roots[1]))) == 3, "held-out pairs of a folder of their own"
    with pytest.raises(ValueError, match="`data.exclude` has 'x', which no pair"):
        config_samples(data.model_copy(update=dict(exclude=["x"])))
