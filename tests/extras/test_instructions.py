"""The text encoder writes instructions: order of images, batches, files, undoing, what is loaded."""
import json
import re
import shutil
from contextlib import contextmanager

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from helpers import write_pairs
from qie_nb import cli
from qie_nb.config import DataSection
from qie_nb.data.samples import config_samples
from qie_nb.extras import instructions
from qie_nb.extras.instructions import (
    HOW, JOURNAL, MOST_ASKED, answers, as_instruction, chat, check_head, pairs_of, propose_instruction,
    question, seen_at, undo_instructions, write_instructions, writing_model)
from qie_nb.tiny.random_models import save_tiny
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.widgets.sample_viewer import SampleViewer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    "A folder with a tiny random model that has `lm_head`."
    return save_tiny("2511", tmp_path_factory.mktemp("model")/"tiny")


def bare_pairs(folder, n=4, controls=1):
    "Pairs without captions."
    root = write_pairs(folder, ((32, 32),) * n, controls=controls)
    for file in root.rglob("*.txt"):
        file.unlink()
    return root


def trainer_of(model, pairs, folder, **data):
    return QwenImageEditTrainer(dict(
        preset="tiny", model=dict(pretrained_model_name_or_path=str(model)),
        data=dict(dataset_path=str(pairs)) | data, cache=dict(cache_dir=str(folder/"cache")),
        train=dict(output_dir=str(folder/"out"), val_fraction=0.)))


@pytest.fixture
def fake(monkeypatch):
    "Answers without a model: `asked` has the texts and the sizes of the image sets."
    asked = []

    @contextmanager
    def no_model(trainer):
        yield None, None

    def answer(model, processor, texts, image_sets):
        asked.extend(zip(texts, map(len, image_sets)))
        return [f'"edit number {len(asked)}"\nbecause' for _ in texts]
    monkeypatch.setattr(instructions, "writing_model", no_model)
    monkeypatch.setattr(instructions, "answers", answer)
    return asked


def captions(root):
    return {p.name: p.read_text() for p in sorted(root.rglob("*.txt"))}


# --- the question

@pytest.mark.parametrize("before", [1, 3])
def test_images_are_named_in_their_order_and_the_after_image_is_last(before):
    text = chat("Why?", before)
    assert text.count("<|vision_start|><|image_pad|><|vision_end|>") == before + 1
    names = re.findall(r"(\w[^\n]*): <\|vision_start\|>", text)
    assert names[-1] == "After" and len(names) == before + 1
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert text.index("After") < text.index("Why?")


def test_a_question_without_images_has_no_place_for_one():
    assert "image_pad" not in chat("Which one fits?")


@pytest.mark.parametrize("how", HOW)
def test_every_question_names_the_language(how):
    assert "German" in question(how, "German", "x")


@pytest.mark.parametrize("answer, text", [
    ("Make it dusk.", "Make it dusk."),
    ("\n\n  'Make it dusk'\nI think", "Make it dusk"),
    ("Instruction: make\tit dusk", "make it dusk"),
    ("“Mach es dunkel.”", "Mach es dunkel."),
    ("<script>x</script>", "<script>x</script>"), # a caption may have it; it is escaped where it is shown
    ("\x1b[31mred\x00", "[31mred"),
    ("...\n***\nDraw it", "Draw it"),
    ("", ""), ("?!", ""), ("x" * 999, "x" * 300),
])
def test_an_answer_becomes_one_line(answer, text):
    assert as_instruction(answer) == text


# --- the model

def test_images_reach_the_processor_before_first_and_after_last(model, tmp_path):
    t = trainer_of(model, bare_pairs(tmp_path/"pairs", 2, controls=2), tmp_path)
    seen = []

    class Processor:
        "Notes what it gets."
        def __init__(self, real): self.real, self.tokenizer = real, real.tokenizer
        def __call__(self, **kw):
            seen.append(kw)
            return self.real(**kw)
    pair = pairs_of(t.config.data)[0]
    images = instructions.seen_at(pair.images)
    with writing_model(t) as (part, processor):
        answers(part, Processor(processor), [chat("Why?", 2)], [images])
    assert [im.tobytes() for im in seen[0]["images"]] == [im.tobytes() for im in images]
    sides = [p.parent.name for p in pair.images]
    assert sides == ["control_images", "control_images_2", "training_images"]
    assert seen[0]["padding_side"] == "left", "else a batch's shorter texts go on after their padding"


@pytest.mark.slow
def test_a_batch_answers_as_each_alone(model, tmp_path):
    t = trainer_of(model, bare_pairs(tmp_path/"pairs"), tmp_path)
    photos = [Image.new("RGB", (56, 84), colour) for colour in ("black", "white", "red")]
    sets = [[photos[0], photos[1]], [photos[2], photos[0]]]
    texts = [chat("Why?", 1), chat("Why is it so, and since when?", 1)]
    with writing_model(t) as (part, processor):
        alone = [answers(part, processor, [text], [some])[0] for text, some in zip(texts, sets)]
        assert answers(part, processor, texts, sets) == alone
        others = {answers(part, processor, texts[:1], [[a, b]])[0] for a in photos for b in photos}
    assert alone[0] != alone[1] and len(others) > 1, "the model sees the images"


def test_an_answer_ends_where_the_turn_ends(model, tmp_path):
    t = trainer_of(model, bare_pairs(tmp_path/"pairs"), tmp_path)
    with writing_model(t) as (part, processor):
        said = []
        part.register_forward_pre_hook(lambda *_: said.append(1))
        end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")

        class AlwaysEnd(torch.nn.Module):
            "The end of the turn is the likeliest word."
            def forward(self, hidden):
                logits = torch.zeros(*hidden.shape[:-1], len(processor.tokenizer))
                logits[..., end] = 1.
                return logits
        part.lm_head = AlwaysEnd()
        assert answers(part, processor, [chat("Why?")], [[]]) == [""]
    assert len(said) == 1


def test_nothing_is_loaded_afterwards_also_after_an_error(model, tmp_path):
    t = trainer_of(model, bare_pairs(tmp_path/"pairs"), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        with writing_model(t) as (part, _):
            assert isinstance(part.lm_head, torch.nn.Linear) and not part.lm_head.weight.is_meta
            raise KeyboardInterrupt
    assert not {"text_encoder", "transformer", "vae"} & set(t.components.loaded)
    assert isinstance(t.components.get("text_encoder").lm_head, torch.nn.Identity), \
        "training loads it without the last layer again"


def test_a_model_without_last_layer_is_refused_before_it_is_loaded(model, tmp_path, monkeypatch):
    mute = tmp_path/"mute"
    shutil.copytree(model, mute)
    file = mute/"text_encoder"/"model.safetensors"
    weights = load_file(file)
    weights.pop("lm_head.weight")
    save_file(weights, file, metadata=dict(format="pt"))
    t = trainer_of(mute, bare_pairs(tmp_path/"pairs"), tmp_path)
    with pytest.raises(ValueError, match="has no lm_head.weight.*give a folder with it, e.g. that of Qwen/"):
        write_instructions(t)
    assert not t.components.built and not captions(tmp_path/"pairs")


def test_a_model_that_shares_its_layers_is_refused(model, tmp_path):
    folder = tmp_path/"text_encoder"
    shutil.copytree(model/"text_encoder", folder)
    config = json.loads((folder/"config.json").read_text()) | dict(tie_word_embeddings=True)
    (folder/"config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="shares its last layer"):
        check_head(folder)


def test_a_transformer_in_memory_is_not_thrown_away(model, tmp_path):
    t = trainer_of(model, bare_pairs(tmp_path/"pairs"), tmp_path)
    t.components.adopt("transformer", object())
    with pytest.raises(ValueError, match="the transformer is in memory"):
        write_instructions(t)
    assert "transformer" in t.components.loaded


# --- files

def test_instructions_are_written_read_by_the_data_set_and_undone(fake, tmp_path):
    root = bare_pairs(tmp_path/"pairs")
    t = trainer_of("tiny", root, tmp_path, trigger_word="d0sk")
    done = write_instructions(t)
    assert captions(root) == {f"{n:04}.txt": f"edit number {n + 1}\n" for n in range(4)}
    read = config_samples(t.config.data)[0].prompt
    assert "edit number 1" in read and read.count("d0sk") == 1
    assert done.summary() == "4 written" and done.undo() == 4
    assert captions(root) == {} and not (root/JOURNAL).exists()


def test_captions_are_kept_unless_the_user_says_otherwise(fake, tmp_path):
    root = bare_pairs(tmp_path/"pairs")
    mine = root/"training_images"/"0001.txt"
    mine.write_bytes(b"\xef\xbb\xbfmine\r\n") # with a byte order mark
    t = trainer_of("tiny", root, tmp_path)
    rows = write_instructions(t).rows
    assert [state for *_, state in rows] == ["written", "kept", "written", "written"]
    assert mine.read_bytes() == b"\xef\xbb\xbfmine\r\n" and len(fake) == 3
    again = write_instructions(t, overwrite=True)
    assert again.rows[1][1] == "mine" and mine.read_text() != "mine"
    undo_instructions(root)
    assert captions(root).keys() == {"0001.txt"} and mine.read_bytes() == b"\xef\xbb\xbfmine\r\n"


def test_what_was_written_twice_is_undone_to_the_very_beginning(fake, tmp_path):
    root = bare_pairs(tmp_path/"pairs")
    t = trainer_of("tiny", root, tmp_path)
    first = write_instructions(t)
    again = write_instructions(t, language="German", overwrite=True)
    assert {now for *_, now, _ in first.rows}.isdisjoint(now for *_, now, _ in again.rows)
    undo_instructions(root)
    assert captions(root) == {}


@pytest.mark.parametrize("where", ["setting", "file"])
def test_one_instruction_for_all_is_kept_too(where, fake, tmp_path):
    root = bare_pairs(tmp_path/"pairs")
    if where == "file":
        (root/"prompt.txt").write_text("turn it into a sketch")
    t = trainer_of("tiny", root, tmp_path, prompt="turn it into a sketch" if where == "setting" else None)
    shown = write_instructions(t)
    assert shown.summary() == "4 kept" and shown.rows[0][1] == "turn it into a sketch" and not fake
    assert write_instructions(t, overwrite=True).summary() == "4 written"


@pytest.mark.parametrize("file", ["../mine.txt", "/{root}/mine.txt", "a/../../mine.txt", "mine.py",
                                  "..\\mine.txt", 3, None])
def test_a_strangers_journal_changes_nothing_outside_or_of_another_kind(file, tmp_path):
    root = bare_pairs(tmp_path/"pairs")
    mine = [tmp_path/"mine.txt", root/"mine.py"]
    for path in mine:
        path.write_text("mine")
    name = file.format(root=tmp_path) if isinstance(file, str) else file
    lines = [dict(file=name, was=was, text="mine", asked="x") for was in (None, "spoiled")]
    (root/JOURNAL).write_text("\n".join(map(json.dumps, lines)) + '\n' + '{"a":' * 100_000)
    assert undo_instructions(root) == 0 and [path.read_text() for path in mine] == ["mine"] * 2


def test_a_link_in_a_strangers_data_set_is_not_followed(tmp_path):
    root = bare_pairs(tmp_path/"pairs")
    (tmp_path/"mine.txt").write_text("mine")
    (root/"link.txt").symlink_to(tmp_path/"mine.txt")
    line = dict(file="link.txt", was="spoiled", text="mine", asked="x")
    (root/JOURNAL).write_text(json.dumps(line))
    assert undo_instructions(root) == 0 and (tmp_path/"mine.txt").read_text() == "mine"


def test_a_dry_run_writes_nothing(fake, tmp_path):
    root = bare_pairs(tmp_path/"pairs")
    shown = write_instructions(trainer_of("tiny", root, tmp_path), dry_run=True)
    assert not captions(root) and not (root/JOURNAL).exists() and shown.summary() == "4 proposed"


def test_a_file_that_the_data_set_would_not_read_is_taken_back(fake, tmp_path, monkeypatch):
    root = bare_pairs(tmp_path/"pairs")
    monkeypatch.setattr(instructions, "_read_back", lambda data, name: "")
    with pytest.raises(ValueError, match="is not read as the caption of pair '0000'; arrange the images as"):
        write_instructions(trainer_of("tiny", root, tmp_path))
    assert not captions(root)


def test_the_data_set_is_listed_a_few_times_for_many_pairs(fake, tmp_path, monkeypatch):
    root = bare_pairs(tmp_path/"pairs", 12)
    listed = []
    real = instructions.config_samples
    monkeypatch.setattr(instructions, "config_samples", lambda data: listed.append(1) or real(data))
    write_instructions(trainer_of("tiny", root, tmp_path))
    assert len(listed) == 2, "before, and once to see that a file is read"


def test_undo_leaves_a_caption_that_was_edited_since(fake, tmp_path):
    root = bare_pairs(tmp_path/"pairs")
    write_instructions(trainer_of("tiny", root, tmp_path))
    (root/"training_images"/"0002.txt").write_text("mine now")
    assert undo_instructions(root) == 3 and captions(root) == {"0002.txt": "mine now"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_session_that_ended_goes_on_where_it_was(overwrite, fake, tmp_path, monkeypatch):
    root = bare_pairs(tmp_path/"pairs")
    if overwrite:
        for n in range(4):
            (root/"training_images"/f"{n:04}.txt").write_text(f"old {n}")
    t = trainer_of("tiny", root, tmp_path)
    asked = instructions.answers

    def dies(model, processor, texts, image_sets):
        if len(fake) == 2:
            raise KeyboardInterrupt
        return asked(model, processor, texts, image_sets)
    monkeypatch.setattr(instructions, "answers", dies)
    with pytest.raises(KeyboardInterrupt):
        write_instructions(t, overwrite=overwrite)
    with open(root/JOURNAL, "a") as journal:
        journal.write('{"file": "training_im') # as a kill leaves it
    monkeypatch.setattr(instructions, "answers", asked)
    write_instructions(t, overwrite=overwrite)
    assert len(fake) == 4, "each pair was asked once"
    assert list(captions(root).values()) == [f"edit number {n + 1}\n" for n in range(4)]
    undo_instructions(root)
    assert captions(root) == ({f"{n:04}.txt": f"old {n}" for n in range(4)} if overwrite else {})


def test_one_sentence_for_all_is_made_of_a_few(fake, tmp_path):
    root = bare_pairs(tmp_path/"pairs", 20)
    write_instructions(trainer_of("tiny", root, tmp_path), how="one")
    assert len(fake) == MOST_ASKED + 1 and fake[-1][1] == 0, "the last question has no image"
    assert "- edit number 8" in fake[-1][0]
    assert set(captions(root).values()) == {"edit number 9\n"}


def test_details_come_after_the_prefix(fake, tmp_path):
    root = bare_pairs(tmp_path/"pairs")
    write_instructions(trainer_of("tiny", root, tmp_path), how="details", prefix="make it dusk. ")
    assert captions(root)["0000.txt"] == "make it dusk: edit number 1\n"


def test_a_pair_without_an_answer_has_no_file(fake, tmp_path, monkeypatch):
    root = bare_pairs(tmp_path/"pairs")
    monkeypatch.setattr(instructions, "answers", lambda *a: ["  ..."] * len(a[2]))
    shown = write_instructions(trainer_of("tiny", root, tmp_path))
    assert shown.summary() == "4 without an answer" and not captions(root)


def test_each_question_has_a_place_for_each_of_its_images(fake, tmp_path):
    root = bare_pairs(tmp_path/"pairs", 4, controls=2)
    (root/"control_images_2"/"0001.png").unlink()
    write_instructions(trainer_of("tiny", root, tmp_path), batch_size=2)
    assert [text.count("<|image_pad|>") for text, _ in fake] == [images for _, images in fake] == [3, 2, 3, 3]


@pytest.mark.parametrize("wrong, message", [
    (dict(how="all"), "`how` must be each, one, details, got 'all'"),
    (dict(how="details"), "needs `prefix`"),
    (dict(prefix="x"), "`prefix` belongs to `how` details"),
    (dict(batch_size=0), "`batch_size` must be 1 or more, got 0"),
])
def test_mistakes_are_refused_before_anything_is_loaded(wrong, message, tmp_path):
    t = trainer_of("tiny", bare_pairs(tmp_path/"pairs"), tmp_path)
    with pytest.raises(ValueError, match=message):
        write_instructions(t, **wrong)
    assert not t.components.built


def test_captions_in_a_table_are_left_to_the_user(fake, tmp_path):
    root = bare_pairs(tmp_path/"pairs")
    rows = [dict(image=f"training_images/{n:04}.png", control=f"control_images/{n:04}.png", prompt="x")
            for n in range(4)]
    (root/"metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="the instructions of this data set are in .*metadata.jsonl"):
        write_instructions(trainer_of("tiny", root, tmp_path))
    assert not fake


def test_a_folder_that_cannot_be_written_is_refused_before_loading(fake, tmp_path, monkeypatch):
    root = bare_pairs(tmp_path/"pairs")

    def full(*a):
        raise OSError(30, "Read-only file system")
    monkeypatch.setattr(instructions, "write_atomic", full)
    with pytest.raises(ValueError, match="nothing can be written into .*Read-only file system"):
        write_instructions(trainer_of("tiny", root, tmp_path))
    assert not fake


def test_the_check_of_a_folder_leaves_no_file(tmp_path):
    "A run in which the model answers nothing has no journal."
    instructions.check_folder(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_shown_is_escaped(tmp_path):
    shown = instructions.Instructions(tmp_path, [("<i>", "<b>x", "<script>alert(1)</script>", "written")])
    assert "<script>" not in shown.html() and "<b>" not in shown.html() and "&lt;script&gt;" in shown.html()


def test_only_the_new_instructions_are_encoded_again(fake, tmp_path):
    root = write_pairs(tmp_path/"pairs", ((32, 32),) * 3)
    t = trainer_of("tiny", root, tmp_path)
    t.cache_embeddings()
    (root/"training_images"/"0001.txt").unlink()
    write_instructions(t)
    after = trainer_of("tiny", root, tmp_path)
    report = after.cache_embeddings()
    assert report.encoded == 1 and len(report.skipped) == 0


# --- commands and the viewer

def test_the_command_proposes_writes_and_takes_back(fake, tmp_path, capsys):
    root = bare_pairs(tmp_path/"pairs")
    settings = ["preset=tiny", f"data.dataset_path={root}", f"cache.cache_dir={tmp_path/'cache'}",
                f"train.output_dir={tmp_path/'out'}"]
    assert cli.main(["caption", *settings, "--dry-run"]) == 0
    assert "4 proposed" in capsys.readouterr().out and not captions(root)
    assert cli.main(["caption", *settings, "--how", "details", "--prefix", "make it dusk"]) == 0
    assert "4 written" in capsys.readouterr().out and len(captions(root)) == 4
    assert cli.main(["caption", *settings, "--undo"]) == 0
    assert "4 files are as before" in capsys.readouterr().out and not captions(root)


def test_the_viewer_proposes_a_draft_for_the_displayed_pair(model, tmp_path):
    pytest.importorskip("ipywidgets")
    root = write_pairs(tmp_path/"pairs", ((32, 32),) * 2)
    t = trainer_of(model, root, tmp_path)
    view = SampleViewer(t.config, model=t)
    view.build()
    c = view.controls
    assert c.propose.layout.display == ""
    c.propose.click()
    assert c.caption.value not in ("", "invert the colours"), c.message.value
    assert c.caption.value == propose_instruction(t, pairs_of(t.config.data)[0].images)
    assert "proposed, not saved" in c.message.value and "text_encoder" not in t.components.loaded
    assert captions(root)["0000.txt"].strip() == "invert the colours"
    drafted = c.caption.value
    c.propose.click()
    assert "edited and not saved; save it first" in c.message.value and c.caption.value == drafted
    c.save.click()
    assert captions(root)["0000.txt"].strip() == drafted.strip()
    c.undo.click()
    assert captions(root)["0000.txt"].strip() == "invert the colours"


def test_the_viewer_without_a_trainer_has_no_such_button(tmp_path):
    pytest.importorskip("ipywidgets")
    view = SampleViewer(DataSection(dataset_path=str(write_pairs(tmp_path/"pairs", ((32, 32),)))))
    view.build()
    assert view.controls.propose.layout.display == "none"


def test_the_pairs_that_one_instruction_is_made_of_are_spread_over_the_data_set(fake, tmp_path, monkeypatch):
    seen = []

    def look(paths) -> list:
        seen.append(paths[-1].stem)
        return [None] * len(paths)
    monkeypatch.setattr(instructions, "seen_at", look)
    root = bare_pairs(tmp_path/"pairs", 3 * MOST_ASKED)
    write_instructions(trainer_of("tiny", root, tmp_path), how="one", dry_run=True)
    assert seen == [f"{3 * n:04}" for n in range(MOST_ASKED)]


@pytest.mark.parametrize("size, shown", [((100, 80), (100, 80)), ((2048, 512), (1024, 256)), ((64, 32), (64, 56))])
def test_images_are_made_smaller_and_never_larger_than_the_least_side(size, shown, tmp_path):
    Image.new("RGB", size).save(tmp_path/"a.png")
    (image,) = seen_at((tmp_path/"a.png",))
    assert image.size == shown
