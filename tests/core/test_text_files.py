"""The one reader of text: what is no text is named, every name is there once, and a path is what a person meant."""
import json, os, socket
from pathlib import Path

import pytest

from qie_nb.core.files import is_address, path_from, visible
from qie_nb.core.text_files import CAPTION_BYTES, BadFile, in_one_sentence, kind_of_bytes, parse_csv, parse_json
from qie_nb.core.text_files import parse_json_lines, parse_yaml, read_text


def fault(parse, *args, **kw):
    "The sentence of the ValueError, which is one line."
    with pytest.raises(ValueError) as e: parse(*args, **kw)
    assert "\n" not in str(e.value) and len(str(e.value)) < 400
    return str(e.value)


# --- what is no text
def pipe(path): os.mkfifo(path)
def link_to_zero(path): path.symlink_to("/dev/zero")
def folder(path): path.mkdir()
def socket_file(path): socket.socket(socket.AF_UNIX).bind(str(path))
def large(path):
    with open(path, "wb") as f: f.truncate(100_000_000)


@pytest.mark.parametrize("make, sentence", [
    (pipe, "is a pipe; put a text file there"), (link_to_zero, "links to a device; put a text file there"), (folder, "is a folder;"),
    (socket_file, "is a socket;"), (large, r"is larger than the 1.0 MB that we read (100.0 MB);")])
def test_only_regular_files_of_a_bounded_size_are_read(make, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path) # a socket's name is short
    make(Path("0.txt"))
    assert f"caption '0.txt' {sentence}" in fault(read_text, Path("0.txt"), "caption", CAPTION_BYTES)


def test_a_file_that_has_no_size_is_read_up_to_the_limit():
    status = Path("/proc/self/maps")
    if not status.exists(): pytest.skip("no /proc")
    assert "\n" in read_text(status) and "is larger than" in fault(read_text, status, most=9)


@pytest.mark.parametrize("data, text", [
    (b"\xef\xbb\xbf\xef\xbb\xbfblue", "blue"), ("blue\r\n猫\r".encode("utf-16"), "blue\n猫\n"), (b"\xfe\xff" + "猫".encode("utf-16-be"), "猫"),
    ("猫".encode("utf-32"), "猫"), (b"", ""), ("👩\u200d🎨".encode(), "👩\u200d🎨"), (b"BM is a bitmap", "BM is a bitmap"), (b"PK and MZ", "PK and MZ")])
def test_encodings(data, text, tmp_path):
    (tmp_path/"a").write_bytes(data)
    assert read_text(tmp_path/"a") == text


@pytest.mark.parametrize("data, sentence", [
    (b"make\0it", "contains a NUL (byte 4); remove that letter"), (b"b\0l\0u\0e\0", "is not UTF-8; save it as UTF-8"), ("变蓝".encode("gbk"), "is not UTF-8; save it as UTF-8"),
    (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer; run `git lfs pull`"), (b"\xef\xbb\xbf\n<!DOCTYPE html>", "is a web page; download the file again"),
    (b"PK\3\4\0\0\xff", "is a ZIP archive;"), (b"\x89PNG\r\n\x1a\n\0", "is a PNG image;"), (b"\x80\4\x95\0", "is a pickle;"), (b"%PDF-1.7", "is a PDF;"), (b"\x1f\x8b\x08\0", "is a gzip archive;")])
def test_what_is_no_text_is_named(data, sentence, tmp_path):
    (tmp_path/"a").write_bytes(data)
    assert fault(read_text, tmp_path/"a", "table").startswith(f"table '{tmp_path/'a'}' {sentence}")


def test_faults_of_one_kind_are_counted(tmp_path):
    errors = []
    for n in range(9):
        (tmp_path/f"{n}.txt").write_bytes(b"x\0" + b"y" * 50 if n > 6 else "变蓝".encode("gbk"))
        with pytest.raises(BadFile) as e: read_text(tmp_path/f"{n}.txt", "caption")
        errors.append(e.value)
    assert in_one_sentence(errors) == ("7 captions are not UTF-8 ('0.txt', '1.txt', '2.txt' and 4 more); save them as UTF-8; "
                                       "2 captions contain a NUL ('7.txt', '8.txt'); remove that letter")
    assert in_one_sentence(errors[:1]) == str(errors[0])


@pytest.mark.parametrize("head, kind", [
    (b"\0\0\0\x18ftypheic", "a HEIC image"), (b"RIFF\0\0\0\0WEBPVP8 ", "a WebP image"), (b'\x10\0\0\0\0\0\0\0{"__metadata__"', "a safetensors file"),
    (b"\0" * 257 + b"ustar", "a tar archive"), (b"PAR1", "a parquet file"), (b"make it blue", ""), (b"", "")])
def test_kinds(head, kind): assert kind_of_bytes(head) == kind


@pytest.mark.parametrize("text, seen", [
    ("\u200b\ufeff", ""), ("\u00a0 blue\u200e\u00ad", "blue"), ("\u3164", ""), ("نمی\u200cخواهم", "نمی\u200cخواهم"), ("👩\u200d🎨", "👩\u200d🎨"),
    ("🏴\U000e0067\U000e0062\U000e007f", "🏴\U000e0067\U000e0062\U000e007f"), ("❤\ufe0f", "❤\ufe0f"), ("a\u00a0b", "a\u00a0b")])
def test_letters_without_a_shape_go_at_the_ends_only(text, seen): assert visible(text) == seen


# --- JSON
@pytest.mark.parametrize("text, sentence", [
    ('{"train": {"max_train_steps": 500},\n "train": {"output_dir": "out"}}', "has 'train' twice (lines 1 and 2); keep one of them"),
    ('{"a": {"lr": 1,\n"lr": 1}}', "has 'lr' twice (lines 1 and 2)"), ('{"\\u0061": 1, "a": 2}', "has a name twice"), ('[{"a": 1, "a": 2}]', "has 'a' twice (line 1)"),
    ('{"lr": Infinity}', "has the value Infinity; write a finite number"), ('{"a": [1,}', "is not valid JSON (line 1, column 10: Expecting value); fix it"),
    ("[" * 100_000, "is not valid JSON (nested too deeply)"), ("[" + "9" * 5000 + "]", "has a number of 5000 digits"), ("", "is not valid JSON")])
def test_json_that_is_refused(text, sentence): assert sentence in fault(parse_json, text)


def test_json_that_is_read():
    value = {"a": {"lr": 1}, "b": {"lr": 2}, "c": [{"lr": 1}, {"lr": 2}], "lr": 10**100}
    assert parse_json(json.dumps(value)) == value
    assert parse_json('[NaN, Infinity]', nan=True)[1] == float("inf")


ROWS = [dict(image="a.png", prompt="it's, blue"), dict(image="b.png", prompt='a "b" {c}')]


@pytest.mark.parametrize("text", ["\n".join(map(json.dumps, ROWS)), "\n\n".join(map(json.dumps, ROWS)) + "\n", json.dumps(ROWS), json.dumps(ROWS, indent=2),
                                  "\n".join(json.dumps(r, indent=1) for r in ROWS), ",\n".join(map(json.dumps, ROWS)) + ",\n", "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]", "".join(map(json.dumps, ROWS))])
def test_json_lines_in_other_dress(text): assert [v for _, v in parse_json_lines(text)] == ROWS


@pytest.mark.parametrize("text, sentence", [
    ("{'image': 'a.png'}\n{'image': 'b.png'}", "has a Python dict in line 1; write each line with json.dumps"), ('{"a": 1}\n{"a": 1, "a": 2}', "has 'a' twice (line 2)"),
    ('{"a": 1}\n{"a": ', "is not valid JSON (line 2, column 7"), ('{"a": 1}\n{\n"b": 1,\n"b": 2}', "has 'b' twice (lines 3 and 4)")])
def test_json_lines_that_are_refused(text, sentence): assert sentence in fault(parse_json_lines, text)


# --- CSV
HEAD = "image,edit_image,prompt\n"
@pytest.mark.parametrize("text, sentence", [
    ("image,edit_image,edit_image\na,b,c", "has the column 'edit_image' twice (line 1); rename or remove one"), ("\n\nimage,prompt,prompt \na,b,c", "has the column 'prompt' twice (line 3)"),
    ("# my pairs\n" + HEAD + "a.png,b.png,c", "has line 1 ('# my pairs') above its header; remove that line"), ("# me, 2024, x\n" + HEAD + "a.png,b.png,c", "has line 1 ('# me, 2024, x') above its header"),
    ("My pairs\n" + HEAD + "a.png,b.png,c", "has line 1 ('My pairs') above its header"), (HEAD + 'a,b,"c" d', "is not valid CSV (row 1: ")])
def test_csv_that_is_refused(text, sentence): assert sentence in fault(parse_csv, text)


@pytest.mark.parametrize("text", [HEAD + "a.png,b.png,c", "sep=,\n\n" + HEAD + "a.png,b.png,c\n,,\n", "image | edit_image|prompt\na.png|b.png|c", "# image,edit_image,prompt\na.png,b.png,c", '"image","edit_image","prompt"\n"a.png","b.png","c"'])
def test_csv_that_is_read(text): assert parse_csv(text) == [(1, dict(image="a.png", edit_image="b.png", prompt="c"))]


# --- YAML
@pytest.mark.parametrize("text, sentence", [
    ("train:\n  max_train_steps: 500\ndata: {batch_size: 2}\ntrain:\n  output_dir: out\n", "has 'train' twice (lines 1 and 4); keep one of them"),
    ("optimizer:\n  lr: 0.001\n  'lr': 0.0001\n", "has 'lr' twice (lines 2 and 3)"), ("a: {x: 1, x: 2}", "has 'x' twice (line 1)"), ("- a: 1\n  a: 2", "has 'a' twice"),
    ("max_train_steps: 0500", "has 0500 in line 1, which YAML reads as octal; write 500, or '0500' in quotes"), ("dirs: [0123]", "has 0123 in line 1"),
    ("train:\n\u00a0\u00a0seed: 3\n", "has a no-break space (U+00A0) in line 2; use plain spaces"), ("train:\n  lr\u200b: 3\n", "has a zero width space (U+200B) in line 2"),
    ("train:\n  seed:\u00a03\n", "has a no-break space (U+00A0) in line 2"), ("train:\n  a: bf16\u200b\n", "has a zero width space (U+200B) in line 2"), ("train:\n  a: 1\n \u3000 b: 2", "has an ideographic space (U+3000)"),
    ("train:\n\tseed: 3\n", "has a tab in line 2; use spaces"), ("a: \"C:\\images\"", "a backslash in double quotes"), ("a: \7", "has a control character (U+0007) in line 1"), ("a: [1", "is not valid YAML (line"),
    ("a: " + "[" * 5000, "nested too deeply"), ("a: &a [*a]", "nested too deeply or too large"), ("n: " + "9" * 5000, "has a number of 5000 digits"), ("a: !!python/object:os.system x", "is not valid YAML"),
    ("a0: &a0 {x: 1}\n" + "".join(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}\n" for n in range(40)), "nested too deeply or too large")])
def test_yaml_that_is_refused(text, sentence): assert sentence in fault(parse_yaml, text)


def test_yaml_that_is_read():
    text = ("a: &b {x: 1}\nc: {<<: *b, x: 2}\nday: 2024-01-01\nratio: 4:3\nlr: 1.0e-4\nn: 1_000\nhex: 0x1F\nno: no\n"
            "prompt: |\n  一\n  \u3000二\nzero: 0\nname: '0123'\nfrench: «\u00a0bleu\u00a0»\nempty:\n")
    assert parse_yaml(text) == {"a": {"x": 1}, "c": {"x": 2}, "day": "2024-01-01", "ratio": "4:3", "lr": 1e-4, "n": 1000, "hex": 31, False: False,
                                "prompt": "一\n\u3000二\n", "zero": 0, "name": "0123", "french": "«\u00a0bleu\u00a0»", "empty": None}
    assert parse_yaml("") is None and parse_yaml("# nothing") is None


# --- paths
def test_paths_as_people_write_them(tmp_path, monkeypatch):
    (tmp_path/"my pairs").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path)); monkeypatch.setenv("SETS", str(tmp_path))
    here = tmp_path/"my pairs"
    for text in (here, str(here), f' "{here}"\n', f"'{here}'", f"“{here}”", "~/my pairs", "$SETS/my pairs", f"file://{tmp_path}/my%20pairs", str(here).replace(" ", "\\ "), f"\u200b{here}\u00a0"):
        assert path_from(text, "`x`") == here
    assert path_from(".", "`x`") == Path(".") == path_from(Path(), "`x`") and path_from("C:/a", "`x`") == Path("C:/a")
    (tmp_path/" a ").touch()
    assert path_from(f"{tmp_path}/ a ", "`x`") == tmp_path/" a ", "a name of blanks, if it is there"


@pytest.mark.parametrize("text, sentence", [("", "`x` is empty; write a path there, or . for the working folder"), (" '' ", "`x` is empty"), ("\u200b", "`x` is empty"), ("gs://b/run", "`x` 'gs://b/run' is an address; download it"),
                                            ("https://a.b/c", "is a web address"), (Path("s3://b/run"), "`x` 's3:/b/run' is an address"), ("a\0b", "contains a NUL"), (5, "must be a path, got 5")])
def test_what_is_no_path(text, sentence): assert sentence in fault(path_from, text, "`x`")


def test_addresses(): assert [is_address(t) for t in ("hf://me/x", "s3:/b", "C:/a", "a/b:/c", "x:y")] == [True, True, False, False, False]
