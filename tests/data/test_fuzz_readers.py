"""Changed inputs for each reader: what it reads equals what a simple reader written here reads, or it raises one sentence.

2,000 examples each in the weekly lane, 50 in the everyday lane. No input may hang, raise another error, or take much memory."""
import codecs, csv, io, json, shutil, tempfile, tracemalloc, unicodedata
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qie_nb.core.text_files import parse_csv, parse_json, parse_json_lines, parse_yaml, read_text
from qie_nb.data.samples import find_samples

both = pytest.mark.parametrize("examples", [50, pytest.param(2000, marks=pytest.mark.weekly)])
MOST_MEMORY = 64 << 20 # bytes above what was there; inputs have a few hundred


def run(examples, strategy, check):
    "Run `check` on examples; the everyday ones are the same each time."
    settings(max_examples=examples, derandomize=examples < 100, deadline=None, database=None,
             suppress_health_check=list(HealthCheck))(given(strategy)(check))()


def read(reader, *args, **kw):
    "What a reader returns, or the `Sentence` that it raises; any other error fails."
    tracemalloc.start()
    try:
        return reader(*args, **kw)
    except (ValueError, FileNotFoundError) as e:
        text = str(e)
        assert "\n" not in text and "Traceback" not in text and 0 < len(text) < 2000, text
        return Sentence(text)
    finally:
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
        tracemalloc.stop()


class Sentence(str):
    "A refusal."


# --- changes
PIECES = st.sampled_from(['"', "'", ",", ":", "{", "}", "[", "]", "\n", "\r\n", "\t", " ", "\0", "\ufeff", "\u200b", "\u00a0", "#", "-", "&a ", "*a", "<<: ", "|", ">", "\\", "NaN", "Infinity",
                          "1e999", "0500", "null", "~", "sep=;\n", "é", "e\u0301", "猫", "\ud83d".encode("utf-8", "surrogatepass").decode("utf-8", "replace"), "[[[[[[", "9" * 2000, "!!python/object:x ", "%YAML 9", "---\n", "..."])


@st.composite
def changed(draw, text, most=3):
    "A text with up to three insertions, deletions, or parts that are there twice."
    for _ in range(draw(st.integers(0, most))):
        a = draw(st.integers(0, len(text)))
        b = min(len(text), a + draw(st.integers(0, 12)))
        text = text[:a] + draw(st.sampled_from([draw(PIECES), "", text[a:b] * 2, text[a:b] + draw(PIECES)])) + text[b:]
    return text


# --- bytes
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@st.composite
def files(draw):
    "Bytes of a text in one of the encodings that people use, sometimes damaged."
    text = draw(WORDS)
    data = draw(st.sampled_from([text.encode(), codecs.BOM_UTF8 + text.encode(), codecs.BOM_UTF8 * 2 + text.encode(), text.encode("utf-16"), text.encode("utf-16-be"), text.encode("gbk", "ignore"), text.encode("latin-1", "ignore")]))
    for _ in range(draw(st.integers(0, 2))):
        a = draw(st.integers(0, len(data)))
        data = data[:a] + draw(st.one_of(st.just(b"\0"), st.binary(max_size=3))) + data[a + draw(st.integers(0, 2)):]
    return draw(st.sampled_from([b"", b"", b"", b"PK\3\4", b"\x89PNG", b"<!doctype html>", b"\x80\4"])) + data


def simple_text(data):
    "Decoded by its mark, or None."
    for mark, name in ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"), (b"", "utf-8")):
        if data.startswith(mark):
            try: return "\n".join(data.decode(name).lstrip("\ufeff").replace("\r\n", "\n").split("\r"))
            except UnicodeDecodeError: return None


@both
def test_text(examples, tmp_path):
    def check(data):
        (tmp_path/"a.txt").write_bytes(data)
        got, expected = read(read_text, tmp_path/"a.txt", "caption"), simple_text(data)
        if isinstance(got, Sentence): assert expected is None or "\0" in expected or b"PK" in data or b"<!doctype" in data or data[:1] in b"{%"
        else: assert got == expected and "\0" not in got
    run(examples, files(), check)


# --- JSON
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-10**6, 10**6), st.floats(allow_nan=False, allow_infinity=False), WORDS)
NAMES = st.sampled_from("image edit_image prompt train lr seed a b".split())
VALUES = st.recursive(LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)), max_leaves=8)


def twice(pairs):
    assert len(dict(pairs)) == len(pairs), "twice"
    return dict(pairs)


def simple_json(text):
    "Python's reader, for texts without a name twice; raises."
    return json.loads(text, object_pairs_hook=twice)


def same(a, b):
    "Equal, with NaN equal to itself."
    return repr(a) == repr(b)


@both
def test_json(examples):
    def check(text):
        got = read(parse_json, text)
        try: expected = simple_json(text)
        except (ValueError, AssertionError, RecursionError): expected = None
        if isinstance(got, Sentence): assert expected is None or "Infinity" in text or "NaN" in text or "9" * 1000 in text
        else: assert same(got, expected)
    run(examples, VALUES.map(json.dumps).flatmap(changed), check)


def simple_values(text):
    "JSON values in a row, and the entries of a list that stands alone; raises."
    try: values = [simple_json(line) for line in text.split("\n") if line.strip()]
    except (ValueError, AssertionError):
        values, at, decoder = [], 0, json.JSONDecoder(object_pairs_hook=twice)
        while True:
            while text[at:at + 1] and text[at] in ", \t\n\r\f\v\x1c\x1d\x1e\x1f\x85\u00a0\u1680\u2000\u2028\u2029\u202f\u205f\u3000": at += 1
            if at == len(text): break
            value, at = decoder.raw_decode(text, at)
            values.append(value)
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


@both
def test_json_lines(examples):
    def check(text):
        got = read(parse_json_lines, text)
        try: expected = simple_values(text)
        except (ValueError, AssertionError, RecursionError): expected = None
        if isinstance(got, Sentence): assert expected is None or "9" * 1000 in text
        else: assert same([v for _, v in got], expected)
    rows = st.lists(st.dictionaries(NAMES, LEAVES, max_size=4), max_size=4)
    texts = rows.flatmap(lambda held: st.sampled_from(["\n".join(map(json.dumps, held)), json.dumps(held), json.dumps(held, indent=1), ",\n".join(map(json.dumps, held))]))
    run(examples, texts.flatmap(changed), check)


# --- names that are there twice
KEYS = st.sampled_from(["image", "prompt", "lr", "é", "a b"])
OBJECTS = st.recursive(st.integers(0, 9), lambda inner: st.lists(st.tuples(KEYS, inner), min_size=1, max_size=3), max_leaves=8).filter(lambda v: isinstance(v, list))


def has_twice(pairs):
    "Has an object, or one in it, a name twice?"
    names = [name for name, _ in pairs]
    return len({*names}) < len(names) or any(has_twice(value) for _, value in pairs if isinstance(value, list))


def as_json(value, space=" "):
    "JSON of objects that are lists of pairs."
    if not isinstance(value, list): return str(value)
    return "{" + f",{space}".join(f"{json.dumps(name)}:{space}{as_json(held, space)}" for name, held in value) + "}"


def as_yaml(value, indent=0):
    "The same in YAML's blocks."
    lines = []
    for name, held in value:
        lines.append(" " * indent + f"{name}:" + ("" if isinstance(held, list) else f" {held}"))
        if isinstance(held, list): lines.append(as_yaml(held, indent + 2))
    return "\n".join(lines)


@both
def test_names_that_are_twice(examples):
    "Every reader refuses them, and nothing else of these texts."
    def check(pairs):
        for got in (read(parse_json, as_json(pairs)), read(parse_json, as_json(pairs, "\n")), read(parse_yaml, as_yaml(pairs)), read(parse_yaml, as_json(pairs)),
                    read(parse_json_lines, "{}\n" + as_json(pairs)), read(parse_json_lines, as_json(pairs, "\n") + ",\n{}")):
            assert isinstance(got, Sentence) == has_twice(pairs) and (not has_twice(pairs) or "twice (line" in got), got
        names = [name for name, _ in pairs]
        got = read(parse_csv, ",".join(names) + "\n" + ",".join("1" for _ in names))
        assert isinstance(got, Sentence) == (len({*names}) < len(names)), got
    run(examples, OBJECTS, check)


# --- YAML
def no_dates(value):
    "As text, to compare what the two readers hold whatever the type of a plain word."
    if isinstance(value, dict): return {k: no_dates(v) for k, v in value.items()}
    return [no_dates(v) for v in value] if isinstance(value, list) else type(value) in (dict, list)


def has_invisible(text):
    "Is there a letter that a reader cannot see?"
    return any(c in "\u115f\u1160\u2800\u3164\u034f" or unicodedata.category(c)[0] in "CZ" and c != " " for c in text)


@both
def test_yaml_that_is_written_is_read(examples):
    def check(value):
        got = read(parse_yaml, yaml.safe_dump(value, allow_unicode=True, sort_keys=False))
        assert same(got, value) or (isinstance(got, Sentence) and has_invisible(repr(value)))
    plain = st.text(st.characters(categories=["L", "N", "P"], max_codepoint=0x2fff), max_size=20)
    leaves = st.one_of(st.none(), st.booleans(), st.integers(-10**6, 10**6), st.floats(allow_nan=False), plain)
    run(examples, st.recursive(leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)), max_leaves=8), check)


@both
def test_yaml(examples):
    "A changed text: the shape of what is read is that of PyYAML, or it is refused."
    def check(text):
        got = read(parse_yaml, text)
        if not isinstance(got, Sentence): assert no_dates(got) == no_dates(yaml.safe_load(text))
    run(examples, VALUES.flatmap(lambda v: st.sampled_from([yaml.safe_dump(v, allow_unicode=True), yaml.safe_dump(v, default_flow_style=True)])).flatmap(changed), check)


# --- CSV
CELLS = st.text(st.sampled_from("ab1. ,;\"'\n猫é"), max_size=8)


@both
def test_csv_that_is_written_is_read(examples):
    "Rows of three columns, as Python writes them."
    def check(rows):
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([["image", "edit_image", "prompt"], *rows])
        got = read(parse_csv, out.getvalue())
        expected = [(n, dict(image=r[0].lstrip(" "), edit_image=r[1].lstrip(" "), prompt=r[2].lstrip(" "))) for n, r in enumerate(rows, 1) if any(c.strip() for c in r)]
        quoted = {k: [r[k].lstrip(" ") for _, r in got] for k in ("image", "edit_image", "prompt")} if not isinstance(got, Sentence) else got
        assert quoted == {k: [r[k].lstrip(" ") for _, r in expected] for k in ("image", "edit_image", "prompt")}
    run(examples, st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=4), check)


@both
def test_csv(examples):
    "A changed text: no cell is lost, and none is under two names."
    def check(text):
        got = read(parse_csv, text)
        if isinstance(got, Sentence): return
        numbers = [n for n, _ in got]
        assert numbers == sorted(set(numbers)) and all(isinstance(row, dict) for _, row in got)
        header = next(iter(got), (0, {}))[1]
        assert all([k for k in row if k] == [k for k in header if k] for _, row in got), "each row has all columns"
    text = "image,edit_image,prompt\n" + "".join(f"training_images/{n}.png,control_images/{n}.png,\"make it, blue {n}\"\n" for n in range(3))
    run(examples, st.just(text).flatmap(lambda t: changed(t, 5)), check)


# --- folders
STEMS = st.lists(st.sampled_from("a b c IMG_1 cat.dog é 猫 x_1 2024".split()), min_size=1, max_size=4, unique=True)
ODD = ["a.PNG", "A.png", "a_before.png", "a_1.png", "b_mask.png", "._a.png", "a.jpe", "note.txt", "a.caption", "metadata.json", "metadata.csv", "a.heic", "prompt.txt", "x/y.png", "a b.png", "captions.csv", "train/z.png", "img_1.png"]


@st.composite
def folders(draw):
    "Two folders of pairs with captions, and files that may be anything: (stems, sides, {name: bytes}, [removed])."
    stems, sides = draw(STEMS), draw(st.sampled_from([("training_images", "control_images"), ("after", "before"), ("target", "source")]))
    more = draw(st.dictionaries(st.tuples(st.sampled_from([*sides, "", "other"]), st.sampled_from(ODD)).map("/".join), st.one_of(st.binary(max_size=20), st.just(b"image,prompt\na,blue\n")), max_size=3))
    removed = draw(st.lists(st.tuples(st.sampled_from(sides), st.sampled_from(stems), st.sampled_from([".png", ".txt"])), max_size=2))
    return stems, sides, more, removed


@both
def test_folders(examples):
    def check(given_):
        stems, sides, more, removed = given_
        root = Path(tempfile.mkdtemp())
        try:
            for side in sides:
                (root/side).mkdir()
                for stem in stems: (root/side/f"{stem}.png").write_bytes(b"\x89PNG")
            for stem in stems: (root/sides[0]/f"{stem}.txt").write_text(f"make {stem} blue")
            for side, stem, suffix in removed: (root/side/f"{stem}{suffix}").unlink(missing_ok=True)
            for name, data in more.items():
                path = root/name.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists(): path.write_bytes(data)
            got = read(find_samples, root)
            gone = {(side, stem) for side, stem, suffix in removed if suffix == ".png"}
            expected = {stem: f"make {stem} blue" for stem in stems if not {(side, stem) for side in sides} & gone and (root/sides[0]/f"{stem}.txt").exists()}
            if isinstance(got, Sentence):
                assert more or removed, got
                return
            found = {unicodedata.normalize("NFC", s.id): s for s in got}
            for stem, prompt in expected.items():
                assert found[stem].prompt == prompt and found[stem].target == root/sides[0]/f"{stem}.png" and found[stem].controls[0] == root/sides[1]/f"{stem}.png"
            assert all(s.controls and s.prompt and s.target.exists() for s in got) and (more or len(got) == len(expected))
        finally:
            shutil.rmtree(root)
    run(examples, folders(), check)


# --- tables
def write_table(kind, rows):
    "The text of a table."
    if kind == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, ["image", "edit_image", "prompt"], lineterminator="\n")
        writer.writeheader(); writer.writerows(rows)
        return out.getvalue()
    return json.dumps(rows, ensure_ascii=False) if kind == "json" else "\n".join(json.dumps(r, ensure_ascii=False) for r in rows)


def simple_table(kind, text):
    "Rows by Python's readers; raises."
    if kind == "csv": return [{k: v for k, v in row.items()} for row in csv.DictReader(io.StringIO(text, newline=""), strict=True)]
    return json.loads(text, object_pairs_hook=twice) if kind == "json" else [json.loads(line, object_pairs_hook=twice) for line in text.split("\n") if line.strip()]


@st.composite
def tables(draw):
    "(kind, text, was it changed?) of a table for the images 0.png to 3.png."
    kind = draw(st.sampled_from(["csv", "json", "jsonl"]))
    order = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
    prompts = st.text(st.sampled_from("ab ,;\"'猫é\u200d"), max_size=12).map(lambda t: f"x{t}x")
    rows = [dict(image=f"t/{n}.png", edit_image=f"c/{draw(st.integers(0, 3))}.png", prompt=draw(prompts)) for n in order]
    text = write_table(kind, rows)
    other = draw(changed(text))
    return kind, other, rows if other == text else None


@both
def test_tables(examples):
    root = Path(tempfile.mkdtemp())
    for side in "tc":
        (root/side).mkdir()
        for n in range(4): (root/side/f"{n}.png").touch()

    def check(given_):
        kind, text, rows = given_
        path = root/f"set.{kind}"
        path.write_text(text, newline="")
        got = read(find_samples, path)
        if rows is not None: # as it was written
            assert not isinstance(got, Sentence), got
            assert [(s.id, s.target, s.controls, s.prompt) for s in got] == [(r["image"][2], root/r["image"], (root/r["edit_image"],), r["prompt"]) for r in sorted(rows, key=lambda r: r["image"])]
        if isinstance(got, Sentence): return
        for s in got: # never an image that the text does not name
            assert s.target.name in text and all(c.name in text for c in s.controls) and s.prompt
        try: simple = simple_table(kind, text.replace("\r\n", "\n"))
        except Exception: return
        plain = [r for r in simple if isinstance(r, dict) and set(r) == {"image", "edit_image", "prompt"}]
        by_image = {r["image"]: r for r in plain if isinstance(r["image"], str)}
        for s in got:
            row = by_image.get(f"t/{s.target.name}")
            if row and len(plain) == len(simple): assert s.prompt == row["prompt"].strip("\ufeff\u200b\u00a0 \n\t\u200d\r") or s.prompt in row["prompt"]
    try: run(examples, tables(), check)
    finally: shutil.rmtree(root)
