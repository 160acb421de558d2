"""Each case of cache_fault_trials.py can fail: break the cache in one way, and see it fail."""
import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from code_changes import Change, broken_copy


class Breakage(NamedTuple):
    """A change of the cache, and the cases that must fail with it."""
    cases: list[str]
    changes: list[Change]


BREAKAGES = {
    "written in place": Breakage(["kills_at_operations", "full_disk"], [
        Change("core/files", "write_atomic", 'open(tmp, "xb")', 'open(path, "wb")'),
        Change("core/files", "atomic_path", "os.replace(tmp, path)", "")]),
    "no sync before the rename": Breakage(["order_of_writes"], [
        Change("core/files", "write_atomic", "os.fsync(f.fileno())", "")]),
    "no sync of the folder": Breakage(["order_of_writes"], [
        Change("core/files", "atomic_path", "_sync_folder(path.parent)", "")]),
    "checksum not compared": Breakage(["flips", "zeroed_tails"], [
        Change("core/cache_entries", "unpack_entry",
               '_checksum(meta, record, memoryview(data)[start:]) == meta["checksum"]', "True")]),
    "a bad entry stays where it is": Breakage(["truncations", "flips"], [
        Change("cache", "EmbeddingCacheManager.quarantine", "os.replace(layer.path(kind, key), target)", "")]),
    "kind and key not compared": Breakage(["swaps"], [
        Change("core/cache_entries", "unpack_entry",
               '(meta.get("kind"), meta.get("key")) == (kind, key)', "True")]),
    "controls not in a prompt's key": Breakage(["edits_scripted", "edits_random"], [
        Change("cache", "prompt_parts", "list(controls)", "[]")]),
    "prompt not in a prompt's key": Breakage(["edits_scripted"], [
        Change("cache", "prompt_parts", 'prompt if prompt.strip() else " "', '" "')]),
    "the target's size in a prompt's key": Breakage(["edits_scripted"], [
        Change("data/samples", "key_parts", "[g.vl(c) for c in control_sizes], who, g.aspect",
               "[g.vl(c) for c in control_sizes], who, g.image_size")]),
    "the dtype not in a key": Breakage(["edits_of_the_model"], [
        Change("cache", "image_parts", ', dtype=identity["dtype"]', "")]),
    "the template not in a key": Breakage(["edits_of_the_model"], [
        Change("cache", "prompt_parts", "template=template,", "")]),
    "files known by name, size and time": Breakage(["edits_scripted", "flips"], [
        Change("core/files", "stat_text",
               'f"{st.st_dev}|{st.st_ino}|{st.st_size}|{st.st_mtime_ns}|{st.st_ctime_ns}"',
               'f"{st.st_size}|{st.st_mtime_ns}"')]),
    "a prefix is not missed": Breakage(["losses"], [
        Change("data/dataset", "ImageDataset.missing", "not has(keys[PREFIX].id)", "False")]),
    "an image read is not compared with its digest": Breakage(["edits_meanwhile"], [
        Change("data/samples", "open_unchanged",
               "digest and source_digest(data) != digest", "False")]),
    "sizes from before the digest": Breakage(["edits_meanwhile"], [
        Change("data/dataset", "ImageDataset.keys", "self.sizes[i] = tuple", "tuple")]),
    "no claims": Breakage(["crowd_undisturbed"], [
        Change("core/files", "file_lock", "lock.acquire()", "pass")]),
    "claims that outlive their owner": Breakage(["crowd_of_2", "crowd_of_4"], [
        Change("core/files", "file_lock",
               "try: lock.acquire()",
               "try:\n"
               "    os.close(os.open(lock.lock_file + '.held', os.O_CREAT | os.O_EXCL))\n"
               "except FileExistsError: yield False; return"),
        Change("core/files", "file_lock",
               "lock.release()", "os.unlink(lock.lock_file + '.held')")]),
    "a full disk is not reported": Breakage(["full_disk"], [
        Change("core/files", "atomic_path", "if full", "if False")]),
    "what is missing rounded off": Breakage(["full_disk"], [
        Change("core/files", "megabytes",
               'f"{round_it(n/1e5)/10:.1f} MB"', 'f"{n/1e6:.1f} MB"')]),
    "everything can be written": Breakage(["read_only_loose", "read_only_packed"], [
        Change("cache", "EmbeddingCacheManager.writable",
               "not self.layers[-1].packed and os.access(folder, os.W_OK)", "True")]),
    "a checkpoint is unpickled": Breakage(["pickles"], [
        Change("training/checkpoint", "read_checkpoint",
               'load_file(Path(folder)/"optimizer.safetensors")',
               '__import__("torch").load(open(Path(folder)/"optimizer.safetensors", "rb"), '
               "weights_only=False)")]),
    "any prefix will do": Breakage(["headers"], [
        Change("core/cache_entries", "unpack_entry",
               '"prefix" not in meta or kind != PREFIX and is_key(meta["prefix"])', "True")]),
    "kept as float16": Breakage(["bits"], [
        Change("core/cache_entries", "pack_entry",
               "t = tensor.detach().cpu().contiguous()",
               "t = tensor.detach().cpu().contiguous()\n"
               "if t.dtype == torch.bfloat16: t = t.half().bfloat16()")]),
    "masks kept as bytes": Breakage(["bits"], [
        Change("core/cache_entries", "pack_entry", "t = tensor.detach().cpu().contiguous()",
               "t = tensor.detach().cpu().contiguous()\nif t.dtype == torch.bool: t = t.byte()")]),
    "every prompt kept whole": Breakage(["flips"], [
        Change("encoding/encoder", "_embedding_entries",
               "Encoded(t.entry, embedding.rest.cpu(), prefix.key if shared else None)",
               "Encoded(t.entry, embedding.whole.cpu())")]),
}


@pytest.mark.weekly
@pytest.mark.parametrize("name", BREAKAGES)
def test_a_breakage_of_the_cache_is_noticed(name, tmp_path):
    """Each case that the table names fails at least once."""
    wanted, changes = BREAKAGES[name]
    trials = [sys.executable, "tests/cache_fault_trials.py", "--only", *wanted, "--out", "out.json"]
    subprocess.run(trials, **broken_copy(changes, tmp_path))
    results = json.loads((tmp_path/"out.json").read_text())["cases"]
    for r in results:
        print(f"{name}: {r['name']}: {r['passed']} of {r['trials']}: {r['worst'][:200]}")
    if any(r["worst"].startswith("not run") for r in results):
        pytest.skip("a case cannot be run here")
    unnoticed = [r["name"] for r in results if r["passed"] == r["trials"]]
    assert len(results) == len(wanted) and not unnoticed


@pytest.mark.weekly
def test_every_case_has_a_breakage():
    """No case of the trials is without proof that it can fail."""
    from cache_fault_trials import cases # loads torch
    named = {case for breakage in BREAKAGES.values() for case in breakage.cases}
    assert named == set(cases(False))
