"""Data as people have it: each row of a table builds a folder and expects what is found, or the sentence that says what is wrong."""
import json, subprocess, sys

import pytest
from PIL import Image

from qie_nb.config import DataSection
from qie_nb.data.dataset import ImageDataset
from qie_nb.data.pair_checks import LARGE, SHAPES, TINY, TURNED, look, pair_warnings, size_warnings, swap_summary
from qie_nb.data.samples import config_samples, find_samples
from helpers import noise_image
from test_samples import tree


def names(samples): return [(s.target.name, *(c.name for c in s.controls)) for s in samples]


def make(root, files):
    "`1/a.png,b.png` makes two files in a folder."
    for group in files.split():
        *folder, held = group.rsplit("/", 1)
        tree(root, ["/".join([*folder, name]).replace("~", " ") for name in held.split(",")])
    return root


H = "image,edit_image,prompt\n"

# files | settings | pairs (target control ...; ...) | a part of the layout or of a note
FOUND = """my~pairs/training_images/a.png,a.txt my~pairs/control_images/a.png __MACOSX/._a.png | | a.png a.png | data: in 'my pairs/', the only folder with images in
x/y/after/a.png,a.txt x/y/before/a.png x/readme.txt | | a.png a.png | in x/: in y/: folders after/ + before/
After~Photos/a.jpg,a.txt Before~Photos/a.jpg | | a.jpg a.jpg | pairs: targets in 'After Photos', controls in 'Before Photos' (guessed from the names; set `data.target_dir` and `data.control_dir` to choose)
my_dataset/a.png,a.txt my_dataset_control/a.png | | a.png a.png | targets in 'my_dataset', controls in 'my_dataset_control' (guessed
dataset/a.png,a.txt control_2/a.jpg control_1/a.png | | a.png a.png a.jpg | controls in 'control_1', 'control_2' (guessed
dataset/a.png,a.txt v2_control_1/a.jpg v1_control_2/a.png | | a.png a.jpg a.png | controls in 'v2_control_1', 'v1_control_2' (guessed
image_dir/a.png,a.txt control_dir/a.png | | a.png a.png | targets in 'image_dir', controls in 'control_dir' (guessed
A/a.png,a.txt B/a.png | target_dir=A control_dir=B | a.png a.png | folders A/ + B/
zip/A/a.png zip/B/a.png zip/C/a.jpg | target_dir=B control_dir=C,A prompt=x | a.png a.jpg a.png | in zip/: folders B/ + C/, A/, `data.prompt` for 1 of 1
A/a.png,a.txt B/a.png | target_dir=a | a.png a.png | targets in 'A', controls in 'B' (guessed
after/a.png before/a.png prompt.txt | | a.png a.png | prompt.txt of the data set for 1 of 1
after/a.png,b.png,b.txt before/a.png,b.png | prompt=x | a.png a.png;b.png b.png | , `data.prompt` for 1 of 2
after/IMG_1.JPG,IMG_1.TXT before/img_1.jpeg | prompt=x | IMG_1.JPG img_1.jpeg | folders after/ + before/
after/IMG_1_after.jpg before/IMG_1_before.jpg | prompt=x | IMG_1_after.jpg IMG_1_before.jpg | folders after/ + before/
after/a.png before/a.png,a.txt | | a.png a.png | captions: beside the controls, because no target has one
a_before.png a_after.png prompt.txt | | a_after.png a_before.png | one folder, pairs by their names: targets _after, controls _before, prompt.txt
photo-out.png photo-in.png photo.txt | | photo-out.png photo-in.png | targets -out, controls -in
before_01.png after_01.png | prompt=x | after_01.png before_01.png | targets after_, controls before_
IMG_1.jpg IMG_1_edited.jpg | prompt=x | IMG_1_edited.jpg IMG_1.jpg | pairs: 'IMG_1_edited.jpg' is the target of 'IMG_1.jpg', and so on (guessed from the names)
a.png a.txt control/a.png | | a.png a.png | controls in 'control' (guessed
after/2024/a.png,b.png after/2025/a.png before/2024/a.png,b.png before/2025/a.png | prompt=x | a.png a.png;b.png b.png;a.png a.png | folders after/ + before/
After/Photos-001/a.png,a.txt Before/Photos-002/a.png | | a.png a.png | folders After/ + Before/
1/before.jpg,after.jpg,prompt.txt 2/before.jpg,after.jpg,prompt.txt | | after.jpg before.jpg;after.jpg before.jpg | a folder for each pair
original/a.png edit/a.png | prompt=x | a.png a.png | targets in 'edit', controls in 'original' (guessed
input/a.png output/a.jpg images/a.gif | prompt=x | a.jpg a.png | folders output/ + input/
target/a.jpg target_mask/a.png source/a.gif reference/a.png | prompt=x | a.jpg a.png a.gif | 2 controls per pair, in this order: reference, source; set `data.control_dir` to change it
a.jpg,a.txt,b.jpg,b.txt control/a.png,b.png | | a.jpg a.png;b.jpg b.png | controls in 'control' (guessed
IMG_1.jpg IMG_1-Edit.jpg | prompt=x | IMG_1-Edit.jpg IMG_1.jpg | 'IMG_1-Edit.jpg' is the target
after/a.png,b.cr2,a.nef before/a.png,b.png | prompt=x | a.png a.png | not used: 'b.cr2' (format not read; convert to JPEG or PNG)
after/a.png after/more/b.png before/a.png before/more/b.png | prompt=x | a.png a.png | not used: 'more' (a folder (1 .png); move its images up)"""


@pytest.mark.parametrize("row", FOUND.splitlines())
def test_layouts_that_are_found(row, tmp_path):
    files, settings, pairs, said = (part.strip() for part in row.split("|"))
    settings = dict(part.split("=") for part in settings.split())
    if "," in settings.get("control_dir", ""): settings["control_dir"] = settings["control_dir"].split(",")
    samples = config_samples(DataSection(dataset_path=str(make(tmp_path, files)), **settings))
    assert names(samples) == [tuple(pair.split()) for pair in pairs.split(";")]
    assert said in "\n".join([samples.layout, *samples.notes])


# files | settings | the sentence
REFUSED = """A/a.png,a.txt B/a.png | | No pairs found in '.*'. It contains: A/ \\(1 .png, 1 .txt\\), B/ \\(1 .png\\). Put the images before .* `data.control_dir` and `data.target_dir`$
edits/a.png,a.txt images/a.png | | No control images found in '.*'. It contains: edits/ .*, images/ .*Set `data.target_dir` to the folder of the images after the edit and `data.control_dir` to that
1_A.png 1_B.png | | It contains: 2 .png \\(1_A.png, 1_B.png\\). Name the images of a pair x_before and x_after, or put
cats/after/a.png,a.txt cats/before/a.png dogs/after/a.png,a.txt dogs/before/a.png | | Set `data.dataset_path` to one of the data sets 'cats', 'dogs', or to a list of them
after/a.png,b.png,c.png,d.png before/a.png,e.png | prompt=x | 3 of 4 targets have no control image of the same name in before/: 'b.png', 'c.png', 'd.png'; before/ has 'e.png' without a target; give both
after/a.png before/x.txt | prompt=x | 1 of 1 targets have no control image .*; before/ has no images that we can read \\(1 .txt\\); add the controls or remove the targets
after/a.png,b.png,c.png,d.png,e.png,e.txt before/a.png,b.png,c.png,d.png,e.png note.txt | | 4 of 5 samples have no caption: 'a', 'b', 'c' and 1 more \\(unused text files: 'note.txt'\\); write each into .*after/a.txt', or one for all into prompt.txt .*`data.prompt`
A/a.png B/a.png | target_dir=C | `data.target_dir` 'C' is not a folder in '.*'. It contains: A/ \\(1 .png\\), B/ \\(1 .png\\); choose one
A/a.png B/a.png | target_dir=A control_dir=a | `data.target_dir` and `data.control_dir` both name '.*A'; choose two folders
after/a.mp4 pairs.zip | | It contains: after/ \\(1 .mp4\\), pairs.zip, but no images that we can read. Unpack pairs.zip first
data/train.parquet | | For parquet files: load it with `data = datasets.load_dataset\\('parquet'
before/a.png after/a.png edited/a.png output/a.png | prompt=x | 'after', 'edited' and 'output' may all hold the targets; set `data.target_dir`
source/a.png result/a.png Edited~Photos/a.png | prompt=x | 'Edited Photos' and 'result' may both hold the targets; set
after/a.png,b.png before/a.png,b.png labels/a.txt notes.md | | have no caption: 'a', 'b' \\(unused text files: 'labels', 'notes.md'\\)
after/a.nef before/a.nef | | It contains: .*, but no images that we can read. Convert the .nef files to JPEG or PNG first$
after/x/a.png after/y/b.png before/a.png,b.png | prompt=x | no control .* in before/: 'x/a.png', 'y/b.png'; before/ has 'a.png', 'b.png' without a target; give both .* the same name and folder
edit/IMG_1.NEF raw/IMG_1.jpg | target_dir=edit control_dir=raw | `data.target_dir` 'edit' has no images that we can read \\(1 .nef\\); convert them to JPEG or PNG$
after/a.png before/a.nef | prompt=x | before/ has no images that we can read \\(1 .nef\\); add the controls
after/a.nef before/a.png | prompt=x | Convert the .nef files
data-00000.arrow | | For a data set of save_to_disk: load it with `data = datasets.load_from_disk\\('.*'\\)` and train on .* of qie_nb.data$"""


@pytest.mark.parametrize("row", REFUSED.splitlines())
def test_what_is_refused_lists_what_was_found(row, tmp_path):
    files, settings, sentence = (part.strip() for part in row.split("|"))
    make(tmp_path, files)
    with pytest.raises(ValueError, match=sentence) as e:
        config_samples(DataSection(dataset_path=str(tmp_path), **dict(part.split("=") for part in settings.split())))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("path, sentence", [
    ("pairs.zip", "is an archive; it cannot be read as a zip"),
    ("a.png", "is an image; give the folder of your pairs"),
    ("https://huggingface.co/datasets/me/cats",
     "is a web address; .* load it with `data = datasets.load_dataset"),
    ("me/cats",
     "does not exist; if it is a data set of the Hugging Face hub, load it with "
     "`data = datasets.load_dataset\\('me/cats'\\)`"),
    ("C:\\Users/me", "is a path on a Windows computer; copy the folder to this machine"),
    ("~nosuchuser/x", "'~nosuchuser/x' does not exist; set it"),
    ("$NO_SUCH/x", "does not exist"),
    ("piars",
     "does not exist in '.*', which has: 1 .png, 1 .zip; set it to the folder of your pairs"),
])
def test_what_is_no_folder(path, sentence, tmp_path, monkeypatch):
    for name in ("pairs.zip", "a.png"): (tmp_path/name).write_bytes(b"PK")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence): find_samples(path if "/" in path else tmp_path/path)


def test_unused_files_are_listed_truly(tmp_path):
    ignored = lambda **kw: find_samples(tmp_path, prompt="x", **kw).ignored
    make(tmp_path, "a.jpg,b.jpg control/a.png,b.png")
    assert not ignored()
    make(tmp_path, "after/a.png,a.txt,b.png control/b.txt")
    assert ("control/b.txt", "a caption beside a control; only those of the targets are read") in ignored()


def heic(path): path.write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))


def test_heic_is_named(tmp_path, capsys):
    make(tmp_path, "after/a.png,b.png before/a.png,b.png")
    heic(tmp_path/"before"/"b.png"); heic(tmp_path/"after"/"a.HEIC")
    d = ImageDataset(dict(dataset_path=str(tmp_path), prompt="x"))
    assert [s.id for s in d.samples] == ["a"] and d.found.ignored == [("after/a.HEIC", "a.png is used")]
    assert "b.png' is in HEIC format; pip install pillow-heif, or convert it to JPEG" in capsys.readouterr().out


def test_heic_is_read_with_pillow_heif(tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif")
    make(tmp_path, "after/b.png before/b.png")
    pillow_heif.from_pillow(Image.new("RGB", (8, 6))).save(tmp_path/"before"/"b.png", format="HEIF")
    assert ImageDataset(dict(dataset_path=str(tmp_path), prompt="x"))[0]["control"][0].size == (8, 6)


def test_large_images_are_read_without_warnings(tmp_path):
    path = tmp_path/"big.png"
    Image.new("1", (12000, 8000)).save(path)
    code = f"import warnings; warnings.simplefilter('error'); from qie_nb.data.images import read_image_size; print(read_image_size({str(path)!r}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "(12000, 8000)"
    assert [m for m, _ in size_warnings([(12000, 8000)])] == [LARGE]


def test_marks_of_sizes_come_with_reasons(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("qie_nb.data.prompts._printed", set()) # notes are printed once per process
    make(tmp_path, "after/a.png,b.png,c.jpg before/a.png,b.png,c.jpg")
    exif = Image.Exif(); exif[0x0112] = 6
    for seed, (name, size, kw) in enumerate([
        ("after/a.png", (1, 1), {}), ("before/a.png", (40, 30), {}),
        ("after/b.png", (423, 634), {}), ("before/b.png", (800, 300), {}),
        ("after/c.jpg", (423, 634), dict(exif=exif)), ("before/c.jpg", (423, 634), {}),
    ]):
        noise_image(size, seed=seed).save(tmp_path/name, **kw)
    d = ImageDataset(dict(dataset_path=str(tmp_path), image_size=512, prompt="x"))
    marks = lambda i: dict(pair_warnings(s := d.samples[i], [look(p) for p in (s.target, *s.controls)], geometry=d.geometry))
    assert "1x1 and is enlarged 512 times" in dict(size_warnings(d.sizes[0], d.geometry)[:1])[TINY]
    assert marks(1) == {SHAPES: "the target is 423x634 and the control 800x300: parts of the image cannot stay where they are"}
    assert marks(2)[TURNED] == "the target is 634x423 and the control 423x634; EXIF turns one of them: one of them may lie on its side"
    assert "very small: 1 of 3 pairs ('a')" in d.size_marks() and "only 3 pairs: most edits need 20 or more" in capsys.readouterr().out


# --- prompts
def test_own_caption_then_prompt_file_then_setting(tmp_path):
    make(tmp_path, "after/a.png,b.png before/a.png,b.png")
    (tmp_path/"after"/"a.txt").write_text("make it red")
    found = lambda **kw: {s.id: (s.prompt, s.prompt_from) for s in find_samples(tmp_path, **kw)}
    assert found(prompt="make it blue") == dict(a=("make it red", tmp_path/"after"/"a.txt"), b=("make it blue", "`data.prompt`"))
    (tmp_path/"Prompt.txt").write_text("make it green\n")
    assert found(prompt="make it blue")["b"] == ("make it green", "Prompt.txt of the data set")
    assert {p for p, _ in found(trigger_word="ohwx").values()} == {"ohwx, make it red", "ohwx, make it green"}
    both = find_samples([tmp_path, make(tmp_path/"2", "after/c.png before/c.png")], prompt="make it blue")
    assert [s.prompt for s in both] == ["make it red", "make it green", "make it blue"]


def test_only_the_resulting_prompt_is_in_the_key(tmp_path):
    make(tmp_path, "after/a.png before/a.png")
    def keys(**kw):
        d = ImageDataset(dict(dataset_path=str(tmp_path), **kw))
        d.refresh(dict(vae="v", dtype="d", template="t", text_encoder="e"))
        return {name: e.key for name, e in d.keys(0).items()}
    first, other = keys(prompt="ohwx, blue"), keys(prompt="red")
    assert first == keys(prompt="blue", trigger_word="ohwx") == keys(prompt="[trigger], blue", trigger_word="ohwx")
    assert {name for name in first if first[name] != other[name]} == {"prompt_embed"}
    (tmp_path/"prompt.txt").write_text("ohwx, blue\n")
    assert keys(prompt="red") == first


def test_tables_without_prompts_and_of_another_machine(tmp_path):
    make(tmp_path, "images/a.png control/a.png")
    write = lambda folder, **more: (tmp_path/"metadata.jsonl").write_text(json.dumps(dict(image=f"{folder}images/a.png", edit_image=f"{folder}control/a.png") | more))
    write("")
    with pytest.raises(ValueError, match="no column for the prompt; .*or set `data.prompt`, one instruction for all"): find_samples(tmp_path)
    assert find_samples(tmp_path, prompt="x")[0].prompt == "x"
    for folder in ("/home/me/set/", "C:\\Users\\me\\"):
        write(folder, prompt="x")
        found = find_samples(tmp_path)
        assert names(found) == [("a.png", "a.png")] and "of another machine is read as" in found.notes[0]
    (tmp_path/"control"/"a.png").rename(tmp_path/"a.png") # never a file of the same name from elsewhere
    with pytest.raises(FileNotFoundError, match="names 'control/a.png', which does not exist"): find_samples(tmp_path)
    write("", image="a.png", edit_image="/home/me/control/a.png", prompt="x")
    with pytest.raises(ValueError, match="names '/home/me/control/a.png' outside the data set"): find_samples(tmp_path)
    with pytest.raises(ValueError, match="`columns` names 'old', which 'metadata.jsonl' does not have"): find_samples(tmp_path, columns=dict(target="old"))


@pytest.mark.parametrize("text, expected", [
    (H + '1.png,2.png,5" wide\n3.png,2.png,"a ""b"""', ['5" wide', 'a "b"']),
    (H + '1.png,2.png,"make it" blue\n', "is not valid CSV \\(row 1: ',' expected after '\"'; look for a stray"),
    (H + '1.png,2.png,a\n3.png,2.png,"b\n2.png,1.png,c', "is not valid CSV \\(row 2: unexpected end of data; look for a stray"),
    (H + "1.png,2.png,make it blue, then red", "'m.csv': row 1 has 4 fields, the header 3; put a prompt with commas in quotes"),
    (H + '1.png, 2.png, "a, b",,\n,,\n , ,\n3.png, 2.png, c', ["a, b", "c"]),
    ("sep=;\n" + H.replace(",", ";") + "1.png;2.png;a\n", ["a"]),
    ("source_img,target_img,mask_img,instruction\n1.png,2.png,3.png,a", ["a"]), ("src_image,tgt,text\n1.png,2.png,a", ["a"])])
def test_csv_by_hand_and_by_excel(text, expected, tmp_path):
    (make(tmp_path, "1.png,2.png,3.png")/"m.csv").write_text(text)
    if isinstance(expected, list): assert [s.prompt for s in find_samples(tmp_path)] == expected
    else:
        with pytest.raises(ValueError, match=expected): find_samples(tmp_path)


# a table beside two folders | prompts or the sentence
BROKEN = "is not valid (CSV|JSON) \\("
@pytest.mark.parametrize("name, text, expected", [
    ("captions.csv", "filename,caption\n1.png,blue\nafter/2.png,red", ["blue", "red"]), ("captions.json", '{"1.png": "blue", "IMG_2": "red"}', ["blue", "x"]),
    ("after/metadata.jsonl", '{"file_name": "2.png", "text": "red"}', ["x", "red"]), ("metadata.csv", "file_name,text\nafter/1.png,blue\nbefore/2.png,red", ["blue", "red"]),
    ("captions/c.json", '{"1.png": {"caption": "blue"}, "2.png": {"caption": "red"}}', ["blue", "red"]),
    ("c.csv", "image,prompt\nbefore/1.png,red\nafter/1.png,blue\n2.png,red", ["blue", "red"]),
    ("captions.csv", 'filename,caption\n1.png,a\n1.png,b', "row 2 of 'captions.csv' gives '1.png' a second prompt; keep one of them"),
    ("captions.txt", "1: blue", "'captions.txt' is not read, `data.prompt` is used; name each caption like its image, or give a table with the columns image and prompt"),
    ("captions.csv", 'filename,caption\n1.png,"blue\n2.png,red', BROKEN), ("pairs.jsonl", '{"image": "after/1.png"', BROKEN), ("card.json", "[1]", ["x", "x"])])
def test_tables_of_captions_beside_folders(name, text, expected, tmp_path):
    (make(tmp_path, "after/1.png,2.png before/1.png,2.png captions/x.md")/name).write_text(text)
    if expected == BROKEN or "second" in expected:
        with pytest.raises(ValueError, match=expected): find_samples(tmp_path, prompt="x")
        return
    found = find_samples(tmp_path, prompt="x")
    if isinstance(expected, str): assert found.notes == [expected]
    else:
        assert [s.prompt for s in found] == expected and (name == "card.json" or name.split("/")[-1] in found.layout)
        make(tmp_path, "after/1.txt,2.txt") # captions of their own come first
        assert {s.prompt for s in find_samples(tmp_path)} == {"make it blue"}


def test_a_table_of_captions_in_one_folder(tmp_path):
    (make(tmp_path, "1_before.png,1_after.png,2_before.png,2_after.png")/"c.csv").write_text("image,prompt\n1,blue\n2_after.png,red\n")
    assert [s.prompt for s in find_samples(tmp_path)] == ["blue", "red"] and not find_samples(tmp_path).ignored
    assert find_samples(tmp_path).layout.endswith(", c.csv")
    make(tmp_path, "1.txt,2.txt")
    assert find_samples(tmp_path).ignored == [("c.csv", "no image")]


def test_a_table_of_captions_for_folders_with_a_pair_each(tmp_path):
    make(tmp_path, "1/before.png,after.png 2/before.png,after.png")
    for name in ("c.csv", "d.md"): (tmp_path/name).write_text("image,prompt\n1/after.png,blue\n2/after.png,red\n")
    found = find_samples(tmp_path)
    assert [s.prompt for s in found] == ["blue", "red"] and found.ignored == [("d.md", "not in one of the folders")]


def test_a_broken_table_is_named_before_others(tmp_path):
    for name, text in (("a.csv", "x,y\n1,2"), ("pairs.json", "[{")): (tmp_path/name).write_text(text)
    with pytest.raises(ValueError, match="'pairs.json' is not valid JSON"): find_samples(tmp_path)


def test_what_a_table_does_not_name_is_listed(tmp_path):
    make(tmp_path, "after/1.png,2.png before/1.png extra/3.png")
    for name in ("metadata.csv", "other.csv"): (tmp_path/name).write_text(H + "after/../after/1.png,before/1.png,a")
    listed = [("after/2.png", "not in metadata.csv"), ("extra", "a folder that is not used (1 .png)"), ("other.csv", "another table")]
    assert find_samples(tmp_path).ignored == find_samples(tmp_path/"metadata.csv").ignored == listed
    assert find_samples([tmp_path]).ignored[0][0] == "0/after/2.png"
    with pytest.raises(ValueError, match="`data.dataset_path` is an empty list; name at least one folder"): find_samples([])
    (tmp_path/"metadata.csv").write_text("image,edit_image\nafter/1.png,before/1.png")
    assert "after" not in find_samples(tmp_path, prompt="x").notes[0]


def test_variables_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("PAIRS", str(make(tmp_path, "A/a.png,a.txt B/a.png")))
    assert len(find_samples("$PAIRS", target_dir="${PAIRS}/A", control_dir="B")) == 1


@pytest.mark.parametrize("word, prompt, expected", [("ohwx, ", "a photo", "ohwx, a photo"), ("  ", "a photo", "a photo"), ("ohwx", "a [TRIGGER] photo", "a ohwx photo"), ("cat", "the Cat sleeps", "the Cat sleeps"), ("cat", "a concatenation", "cat, a concatenation"),
                                                    (None, "a [trigger] photo", "1 caption says [trigger], but `data.trigger_word` is not set; set it, or remove [trigger]")])
def test_trigger_words(word, prompt, expected, tmp_path):
    found = find_samples(make(tmp_path, "after/a.png before/a.png"), prompt=prompt, trigger_word=word)
    assert (found[0].prompt if word else found.notes[0]) == expected and "word '  '" not in found.layout


def test_the_check_for_swaps_gives_no_all_clear():
    assert swap_summary(0, 40).startswith("no sign of swapped pairs in file names,") and swap_summary(2, 40).startswith("2 of 40 pairs look swapped")


def test_results_of_a_run_beside_the_usual_folders_are_not_taken_for_targets(tmp_path):
    for d in ("training_images", "control_images", "output"):
        (tmp_path/d).mkdir()
        Image.new("RGB", (48, 32)).save(tmp_path/d/"a.png")
    found = find_samples(tmp_path, prompt="x")
    assert found[0].target.parent.name == "training_images" and [str(name) for name, _ in found.ignored] == ["output"]
