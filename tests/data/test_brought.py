"""Data sets as people bring them: read right, refused for the right reason, or noted; each row failed once."""
import json, os

import datasets
import pandas as pd
import pytest
from PIL import Image

from qie_nb.config import Config, load_config_from_yaml
from qie_nb.data.samples import config_samples, find_samples, samples_of, usable
from qie_nb.data.prompts import add_trigger
from test_layouts import make, names
from test_samples import hub, images_of, tree

PAIRS = "training_images/1.png,2.png,3.png control_images/1.png,2.png,3.png"
ROWS = [dict(image=f"training_images/{n}.png", edit_image=f"control_images/{n}.png", prompt="make it blue") for n in (1, 2, 3)]


def refused(path, **kw):
    "The sentence of the error."
    with pytest.raises((ValueError, FileNotFoundError)) as e: find_samples(path, **kw)
    assert "\n" not in str(e.value) and len(str(e.value)) < 700
    return str(e.value)


def facts(path, **kw): return [(s.id, s.target.name, [c.name for c in s.controls], s.prompt) for s in find_samples(path, **kw)]


PLAIN = [(str(n), f"{n}.png", [f"{n}.png"], "make it blue") for n in (1, 2, 3)]


@pytest.fixture
def pairs(tmp_path): return make(tmp_path/"set", PAIRS)


def lines(root, rows, name="metadata.jsonl"): (root/name).write_text("\n".join(map(json.dumps, rows)))


# --- captions
def test_a_pipe_a_device_and_a_large_file_as_caption(pairs):
    caption = pairs/"training_images"/"1.txt"
    os.mkfifo(caption)
    assert f"caption '{caption}' is a pipe; put a text file there" in refused(pairs, prompt="x")
    caption.unlink(); caption.symlink_to("/dev/zero")
    assert "links to a device" in refused(pairs, prompt="x")
    caption.unlink(); caption.write_bytes(b"")
    os.truncate(caption, 100_000_000)
    assert "is larger than the 1.0 MB that we read (100.0 MB)" in refused(pairs, prompt="x")
    caption.unlink(); os.mkfifo(pairs/"prompt.txt")
    assert "prompt.txt' is a pipe" in refused(pairs)


def test_captions_with_one_fault_are_counted(pairs):
    for n in (1, 2, 3): (pairs/"training_images"/f"{n}.txt").write_bytes("变蓝".encode("gbk"))
    assert refused(pairs) == "3 captions are not UTF-8 ('1.txt', '2.txt', '3.txt'); save them as UTF-8"
    for n in (1, 2): (pairs/"training_images"/f"{n}.txt").write_text("version https://git-lfs.github.com/spec/v1")
    assert refused(pairs).startswith("2 captions are each a Git LFS pointer ('1.txt', '2.txt'); run `git lfs pull`; caption '")
    for n in (1, 2, 3): (pairs/"training_images"/f"{n}.txt").write_bytes(b"a\0b")
    assert refused(pairs) == "3 captions contain a NUL ('1.txt', '2.txt', '3.txt'); remove that letter"


def test_letters_that_cannot_be_seen(pairs):
    for n, data in enumerate(("\u200b\ufeff", "\ufeff\ufeffmake it blue\u00a0", "👩\u200d🎨"), 1): (pairs/"training_images"/f"{n}.txt").write_text(data)
    assert "1 of 3 samples have no caption or an empty one: '1'" in refused(pairs)
    assert [f[3] for f in facts(pairs, prompt="x\u200b")] == ["x", "make it blue", "👩\u200d🎨"]
    lines(pairs, [r | dict(prompt="\u200b") for r in ROWS])
    assert "3 of 3 samples have no caption or an empty one" in refused(pairs)


@pytest.mark.parametrize("words, note", [
    ("nan None make~it~blue", "2 captions say 'nan', as a program writes an empty cell ('1', '2')"), ("a a null", "1 caption says 'null'"), ("a a banana", None)])
def test_words_of_programs_for_an_empty_cell(words, note, pairs):
    lines(pairs, [r | dict(prompt=w.replace("~", " ")) for r, w in zip(ROWS, words.split())])
    found = find_samples(pairs).notes
    assert found == [] if note is None else note in found[0]


def test_a_missing_number_is_an_empty_cell(pairs):
    (pairs/"metadata.jsonl").write_text("\n".join(json.dumps(r | dict(prompt=float("nan"), mask=float("nan"), score=float("inf"))) for r in ROWS))
    assert "NaN" in (pairs/"metadata.jsonl").read_text() and "3 of 3 samples have no caption" in refused(pairs)
    assert [f[3] for f in facts(pairs, prompt="x")] == ["x"] * 3


def test_a_prompt_file_with_a_line_for_each_pair(pairs):
    (pairs/"prompt.txt").write_text("blue\n\nred\ngreen\n")
    note, = find_samples(pairs).notes
    assert note.startswith("prompts: prompt.txt has 3 lines, as many as there are pairs, and all lines together are the instruction of each pair; for a line each,")
    (pairs/"prompt.txt").write_text("blue\nred\n")
    assert not find_samples(pairs).notes


def test_captions_in_a_table_that_is_called_a_text(pairs):
    (pairs/"captions.txt").write_text("image,prompt\n" + "".join(f"{n}.png,make it blue\n" for n in (1, 2, 3)))
    assert facts(pairs) == PLAIN and find_samples(pairs).layout.endswith(", captions.txt")
    for n in range(60): (pairs/f"note{n}.txt").write_text("x") # so many are captions, and not looked into
    assert "3 of 3 samples have no caption" in refused(pairs)


# --- trigger words
@pytest.mark.parametrize("word, prompt, has", [
    ("ohwx", "把ohwx风格应用到图片", True), ("ohwx", "ohwx를 그려", True), ("ohwx", "これをohwxにする", True), ("ohwx", "ทำให้ohwxแดง", True), ("猫", "把猫变蓝", True), ("ohwx", "сделай ohwxом", True),
    ("ohwx", "ohwxs", False), ("ohwx", "ohwx2", False), ("ohwx", "my_ohwx", False), ("cat", "a concatenation", False), ("кот", "который", False), ("cafe", "cafe\u0301", False), ("café", "the cafe\u0301", True), ("<s1>", "a<s1>b", True)])
def test_where_a_word_ends(word, prompt, has): assert add_trigger(prompt, word) == (prompt if has else f"{word}, {prompt}")


def test_a_trigger_word_that_cannot_be_seen(pairs):
    found = find_samples(pairs, prompt="x", trigger_word="\u200b")
    assert found[0].prompt == "x" and "`data.trigger_word` has no letter that can be seen" in found.notes[0]
    assert find_samples(pairs, prompt="x", trigger_word="ohwx\u200b")[0].prompt == "ohwx, x"


# --- folders
def test_a_control_that_two_files_may_be(tmp_path):
    make(tmp_path, "after/A.png before/a.png,A_before.png")
    assert "may both be the control of 'A'; give one of them the target's name" in refused(tmp_path, prompt="x")
    make(tmp_path, "before/A.png") # the name itself
    assert names(find_samples(tmp_path, prompt="x")) == [("A.png", "A.png")]


def test_a_name_in_another_case_is_taken_only_if_one_file_fits(tmp_path):
    make(tmp_path/"1", "after/Cat.png,CAT.png before/cat.png")
    said = "2 of 2 targets have no control image of the same name in before/: 'CAT.png', 'Cat.png'"
    assert refused(tmp_path/"1", prompt="x").startswith(said)
    make(tmp_path/"2", "after/Cat.png,cat.txt,CAT.txt before/cat.png")
    found = find_samples(tmp_path/"2", prompt="x")
    assert names(found) == [("Cat.png", "cat.png")] and found[0].prompt == "x"
    (tmp_path/"2"/"after"/"CAT.txt").unlink()
    assert find_samples(tmp_path/"2")[0].prompt == "make it blue"


def test_a_second_control_that_is_missing_for_some(pairs):
    make(pairs, "control_images_2/1.png,2_.png,3.png")
    found = find_samples(pairs, prompt="x")
    assert [len(s.controls) for s in found] == [2, 1, 2]
    assert found.notes == ["controls: 1 of 3 targets has no image in control_images_2/ ('2.png'), which has '2_.png' without a target; give both the same name"]
    (pairs/"control_images_2"/"2_.png").unlink()
    assert find_samples(pairs, prompt="x").notes == ["controls: 1 of 3 targets has no image in control_images_2/ ('2.png')"]
    make(pairs, "control_images_2/2.png")
    assert not find_samples(pairs, prompt="x").notes


def test_names_of_onetrainer(tmp_path):
    make(tmp_path/"1", "0.png,0-condlabel.png,0-masklabel.png 1.png,1-condlabel.png")
    found = find_samples(tmp_path/"1", prompt="x")
    assert names(found) == [("0.png", "0-condlabel.png"), ("1.png", "1-condlabel.png")] and [bool(s.mask) for s in found] == [True, False]
    make(tmp_path/"2", "training_images/0.png,0-masklabel.png control_images/0.png")
    assert find_samples(tmp_path/"2", prompt="x")[0].mask.name == "0-masklabel.png"


def test_numbered_controls_of_two_digits(tmp_path):
    make(tmp_path, "after/q.png before/q_1.png,q_2.png,q_10.png")
    assert names(find_samples(tmp_path, prompt="x")) == [("q.png", "q_1.png", "q_2.png", "q_10.png")]
    make(tmp_path, "after/r.png")
    assert "before/ has no image for them (3 .png, all used); add the controls" in refused(tmp_path, prompt="x")


def test_images_under_other_names(pairs):
    for side in ("training_images", "control_images"):
        for name in ("a.jpe", "b.jpg_large", "c.jpg!d", "d.jpg?width=600", "e"): Image.new("RGB", (8, 6)).save(pairs/side/name, format="JPEG")
    (pairs/"training_images"/"f").write_text("no image")
    found = find_samples(pairs, prompt="x")
    assert found.notes == ["not used: 'e' (JPEG under another name; rename it to end in .jpg)"]
    assert ("training_images/f", "no image") in found.ignored and len(found) == 7
    alone = pairs/"alone"/"after"; alone.mkdir(parents=True)
    Image.new("RGB", (8, 6)).save(alone/"a", format="JPEG")
    assert "Rename the images, e.g. a (JPEG under another name; rename it to end in .jpg)" in refused(pairs/"alone", prompt="x")


@pytest.mark.parametrize("name", ["g.jpe", "g.png"])
def test_a_pipe_among_the_images(name, pairs):
    for side in ("training_images", "control_images"): os.mkfifo(pairs/side/name)
    keep, sizes, skipped = usable(find_samples(pairs, prompt="x"))
    assert len(keep) == 3 and [i for i, _ in skipped] == ["g"], skipped


# --- paths
@pytest.mark.parametrize("path, sentence", [
    ("", "`data.dataset_path` is empty; set it to the folder of your pairs"), (" ", "is empty"), ("''", "is empty"), ("gs://b/x", "'gs://b/x' is an address; download it to this machine, and give the folder"),
    ("hf://datasets/me/cats", "load_dataset('me/cats')"), ("/dev/zero", "is neither a folder nor a file")])
def test_what_is_no_data_set(path, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(make(tmp_path, PAIRS)) # which must not be read
    for given in (path, ["..", path][1:]): assert sentence in refused(given, prompt="x")


def test_paths_that_are_pasted(pairs, monkeypatch):
    monkeypatch.setenv("HOME", str(pairs.parent))
    for text in (f' "{pairs}" ', f"'{pairs}'\n", f"file://{pairs}", "~/set"): assert len(find_samples(text, prompt="x")) == 3
    assert len(find_samples(pairs, prompt="x", target_dir='"training_images"', control_dir=" control_images ")) == 3
    config = Config(train=dict(samples=[dict(image=' "~/set/control_images/1.png" ', prompt="x")]))
    assert samples_of(config.train.samples)[0].target == pairs/"control_images"/"1.png"
    with pytest.raises(ValueError, match="`train.samples` 1: image 'https://a.b/c.png' is a web address; download it, and give its path"):
        samples_of(Config(train=dict(samples=[dict(image="https://a.b/c.png", prompt="x")])).train.samples)


def test_links_are_read_with_a_table_as_without(pairs, tmp_path):
    linked = tmp_path/"elsewhere"/"linked"
    linked.mkdir(parents=True)
    for side in ("training_images", "control_images"): (linked/side).symlink_to(pairs/side)
    without = facts(linked, prompt="make it blue")
    lines(linked, ROWS)
    assert facts(linked) == without == PLAIN
    files = tmp_path/"files"
    for r in ROWS:
        for name in (r["image"], r["edit_image"]):
            (files/name).parent.mkdir(parents=True, exist_ok=True)
            (files/name).symlink_to(pairs/name)
    lines(files, ROWS)
    assert facts(files) == PLAIN
    lines(files, [r | dict(edit_image="training_images/../../set/control_images/1.png") for r in ROWS])
    assert "outside the data set" in refused(files)


def test_absolute_paths_of_this_machine(pairs, tmp_path):
    lists = tmp_path/"lists"; lists.mkdir()
    lines(lists, [{k: str(pairs/v) if "/" in v else v for k, v in r.items()} for r in ROWS], "a.jsonl")
    sentence = refused(lists/"a.jsonl")
    link = f"link the folder into the data set (ln -s '{pairs}/training_images' '{lists}')"
    assert f"outside the data set; {link}" in sentence
    short = len(link) + len(str(tmp_path)) <= 200 # this folder may have any name
    assert (f", or move the table to '{tmp_path}' (3 of 3 rows are wrong)" in sentence) == short
    for side in ("training_images", "control_images"): os.symlink(pairs/side, lists/side)
    found = find_samples(lists/"a.jsonl")
    assert facts(lists/"a.jsonl") == PLAIN and found.notes == [f"paths: '{pairs}/' through links is read as '{lists}'"]
    (tmp_path/"b").mkdir()
    (lists/"a.jsonl").rename(tmp_path/"a.jsonl")
    assert facts(tmp_path/"a.jsonl") == PLAIN


# --- tables
def test_a_file_called_metadata_is_the_table_only_if_it_has_the_columns(pairs):
    (pairs/"metadata.csv").write_text("filename,camera,iso\n1.png,X100,200\n")
    found = find_samples(pairs, prompt="make it blue")
    unread = "data: 'metadata.csv' is not read, because it has no known columns"
    assert facts(pairs, prompt="make it blue") == PLAIN
    assert found.notes[0].startswith(f"{unread} for target and control; if it is")
    assert f".txt'; {unread}" in refused(pairs)
    (pairs/"metadata.json").write_text('{"version": 1, "tags": ["a"]}')
    assert len(find_samples(pairs, prompt="x", allow_missing_control=True)) == 3
    lines(pairs, ROWS, "pairs.jsonl")
    assert find_samples(pairs).layout.startswith("pairs.jsonl")


def dressed(kind):
    "The rows in another form: {file name: text}."
    columns = {k: [r[k] for r in ROWS] for k in ROWS[0]}
    csv_text = pd.DataFrame(ROWS).to_csv(index=False)
    return dict(pandas=("metadata.json", json.dumps({k: dict(zip("012", v)) for k, v in columns.items()})), lists=("metadata.json", json.dumps(columns)),
                split=("metadata.json", pd.DataFrame(ROWS).to_json(orient="split")), index=("metadata.json", pd.DataFrame(ROWS).to_json(orient="index")), table=("metadata.json", pd.DataFrame(ROWS).to_json(orient="table")),
                list=("metadata.jsonl", json.dumps(ROWS)), indented=("metadata.jsonl", json.dumps(ROWS, indent=2)), commas=("metadata.jsonl", ",\n".join(map(json.dumps, ROWS)) + ","),
                lines=("metadata.json", "\n".join(map(json.dumps, ROWS))), csv=("metadata.json", csv_text), csv_lines=("metadata.jsonl", csv_text), json_csv=("metadata.csv", json.dumps(ROWS)), text=("pairs.txt", csv_text),
                text_lines=("pairs.txt", "\n".join(map(json.dumps, ROWS))), wrapped=("metadata.jsonl", json.dumps(dict(data=ROWS))), tsv=("metadata.csv", csv_text.replace(",", "\t")), bars=("metadata.csv", csv_text.replace(",", "|")), ndjson=("metadata.ndjson", "\n".join(map(json.dumps, ROWS))))[kind]


@pytest.mark.parametrize("kind", "pandas lists split index table list indented commas lines csv csv_lines json_csv text text_lines wrapped tsv bars ndjson".split())
def test_a_table_is_what_its_text_is(kind, pairs):
    name, text = dressed(kind)
    (pairs/name).write_text(text)
    assert facts(pairs) == facts(pairs/name) == PLAIN
    assert (f"data: {name!r} is read as a table, by its content" in find_samples(pairs).notes) == name.endswith("txt")


@pytest.mark.parametrize("name, text, sentence", [
    ("metadata.csv", "image,edit_image,edit_image,prompt\n1,2,3,x", "'metadata.csv' has the column 'edit_image' twice (line 1)"), ("metadata.csv", "image,edit_image,prompt,prompt\n1,2,3,x", "has the column 'prompt' twice"),
    ("metadata.jsonl", '{"image": "a", "prompt": "x",\n "prompt": "y"}', "'metadata.jsonl' has 'prompt' twice (lines 1 and 2)"), ("metadata.jsonl", '{"image": "a"}\n{"image": "a", "image": "b"}', "'metadata.jsonl' has 'image' twice (line 2)"),
    ("metadata.json", '{"data": [{"image": "a", "image": "b"}]}', "'metadata.json' has 'image' twice"), ("metadata.jsonl", "{'image': 'a.png'}", "'metadata.jsonl' has a Python dict in line 1"),
    ("metadata.csv", "# by me\nimage,edit_image,prompt\na.png,b.png,x", "'metadata.csv' has line 1 ('# by me') above its header"), ("metadata.json", '{"image": ["a"], "prompt": ["x", "y"]}', "has columns of different lengths; write it with `to_json(orient='records')`"),
    ("metadata.csv", "version https://git-lfs.github.com/spec/v1\noid sha256:0", "metadata.csv' is a Git LFS pointer; run `git lfs pull`"), ("metadata.json", "<!doctype html>", "is a web page; download the file again")])
def test_tables_that_are_refused(name, text, sentence, pairs):
    (pairs/name).write_text(text)
    assert sentence in refused(pairs, prompt="x")


def test_blanks_and_quotes_around_cells(pairs):
    (pairs/"metadata.csv").write_text("image , edit_image , prompt \n" + "".join(f"{r['image']} , \u00a0{r['edit_image']} , {r['prompt']} \n" for r in ROWS))
    assert facts(pairs) == PLAIN
    lines(pairs, [r | dict(image=f" '{r['image']}' ", edit_image=[f"{r['edit_image']}\n"]) for r in ROWS])
    (pairs/"metadata.csv").unlink()
    assert facts(pairs) == PLAIN
    make(pairs, "training_images/1.png~") # a name that ends in a blank comes first
    lines(pairs, [ROWS[0] | dict(image="training_images/1.png ")])
    assert find_samples(pairs)[0].target.name == "1.png "


@pytest.mark.parametrize("columns, note", [
    ("image_before image_after prompt", None), ("image1 image2 prompt", "`image1` is before the edit and `image2` after it (guessed"), ("img_1 img_2 caption", "`img_1` is before the edit"), ("edit_image image prompt_en", None), ("image_source image_target text", None),
    ("image_control image caption_en", None), ("source target prompt_cn", None), ("imageBefore imageAfter instruction_english", None)])
def test_further_spellings_of_columns(columns, note, pairs):
    before, after, prompt = columns.split()
    lines(pairs, [{after: r["image"], before: r["edit_image"], prompt: r["prompt"]} for r in ROWS])
    assert facts(pairs) == PLAIN
    notes = find_samples(pairs).notes
    assert notes == [] if note is None else note in notes[0]


def test_an_instruction_comes_before_a_prompt(pairs):
    rows = [r | dict(prompt="a blue car", instruction="make it blue") for r in ROWS]
    lines(pairs, rows)
    assert facts(pairs) == PLAIN
    assert find_samples(pairs).notes == ["prompts: column `instruction` is read and `prompt` is not, as that of an edit; set `data.columns` to {prompt: prompt} to change it"]
    chosen = find_samples(pairs, columns=dict(prompt="prompt"))
    assert chosen[0].prompt == "a blue car" and not chosen.notes
    (pairs/"metadata.jsonl").unlink()
    lines(pairs, [r | {"Edit Image": "x.png"} for r in ROWS])
    assert find_samples(pairs).notes == ["columns: `edit_image` is read and `Edit Image` is not; set `data.columns` to choose"]
    data = hub(image=images_of(2), edit_image=images_of(2), prompt=["x", "y"], instruction=["a", "b"])
    assert [s.prompt for s in find_samples(data)] == ["a", "b"] and "column `instruction` is read" in find_samples(data).notes[0]


def test_columns_can_be_named_in_a_configuration(pairs, tmp_path):
    (pairs/"set.csv").write_text("neu,alt,tiefe,wunsch\n" + "".join(f"{r['image']},{r['edit_image']},{r['image']},{r['prompt']}\n" for r in ROWS))
    (tmp_path/"run.yaml").write_text(f"data:\n  dataset_path: {pairs}/set.csv\n")
    read = lambda: config_samples(load_config_from_yaml(tmp_path/"run.yaml").data)
    with pytest.raises(ValueError, match="no column for the target; .* or set `data.columns` to {target: ...}"): read()
    (tmp_path/"run.yaml").write_text(f"data:\n  dataset_path: {pairs}/set.csv\n  columns: {{target: neu, control: [alt, tiefe], prompt: wunsch}}\n")
    assert [len(s.controls) for s in read()] == [2, 2, 2] and read()[0].target.name == "1.png"
    (tmp_path/"run.yaml").write_text(f"data:\n  dataset_path: {pairs}\n  prompt: x\n  columns: {{}}\n")
    assert len(read()) == 3


def test_bad_rows_are_one_sentence(pairs):
    lines(pairs, [r | dict(image="x.png") for r in ROWS * 50])
    assert refused(pairs).endswith("(150 of 150 rows are wrong)")
