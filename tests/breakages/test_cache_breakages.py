"""Every case of cache_fault_trials.py must be able to fail: break the cache in one way at a time, and see the expected cases fail."""
import json, subprocess, sys
from pathlib import Path

import pytest

from cache_fault_trials import cases
from helpers import broken, broken_copy

ROOT = Path(__file__).parents[2]
BREAKAGES = { # what is broken: ([(module, old, new)], cases that must fail)
    "written in place": ([("core/files", 'open(tmp, "xb")', 'open(path, "wb")'), ("core/files", "        os.replace(tmp, path)\n", "")], ["kills_at_operations", "full_disk"]),
    "no sync before the rename": ([("core/files", "            os.fsync(f.fileno())\n", "")], ["order_of_writes"]),
    "no sync of the folder": ([("core/files", "        _sync_folder(path.parent)\n", "")], ["order_of_writes"]),
    "checksum not compared": ([("core/cache_entries", 'check(_checksum(meta, record, memoryview(data)[start:]) == meta["checksum"], ', "check(True, ")], ["flips", "zeroed_tails"]),
    "a bad entry stays where it is": ([("cache", "        os.replace(layer.path(kind, key), target)\n", "")], ["truncations", "flips"]),
    "kind and key not compared": ([("core/cache_entries", 'check((meta.get("kind"), meta.get("key")) == (kind, key), ', "check(True, ")], ["swaps"]),
    "controls not in a prompt's key": ([("cache", "controls=list(controls)", "controls=[]")], ["edits_scripted", "edits_random"]),
    "prompt not in a prompt's key": ([("cache", 'prompt=prompt if prompt.strip() else " "', 'prompt=" "')], ["edits_scripted"]),
    "the target's size in a prompt's key": ([("data/dataset", "who, g.aspect\n    parts[PREFIX]", "who, g.image_size\n    parts[PREFIX]")], ["edits_scripted"]),
    "the dtype not in a key": ([("cache", 'vae=identity["vae"], dtype=identity["dtype"])', 'vae=identity["vae"])')], ["edits_of_the_model"]),
    "the template not in a key": ([("cache", 'template=template, ', "")], ["edits_of_the_model"]),
    "files known by name, size and time": ([("core/files", 'f"{st.st_dev}|{st.st_ino}|{st.st_size}|{st.st_mtime_ns}|{st.st_ctime_ns}"', 'f"{st.st_size}|{st.st_mtime_ns}"')], ["edits_scripted", "flips"]),
    "a prefix is not missed": ([("data/dataset", "    if not has(keys[PREFIX].id):\n", "    if False:\n")], ["losses"]),
    "an image read is not compared with its digest": ([("data/samples", "if digest and source_digest(data) != digest:", "if False:")], ["edits_meanwhile"]),
    "sizes from before the digest": ([("data/dataset", "        self.sizes[i] = tuple(cached_size(p)", "        tuple(cached_size(p)")], ["edits_meanwhile"]),
    "no claims": ([("core/files", "    try: lock.acquire()\n", "    try: pass\n")], ["crowd_undisturbed"]),
    "claims that outlive their owner": ([("core/files", "    try: lock.acquire()\n", "    try: os.close(os.open(lock.lock_file + '.held', os.O_CREAT | os.O_EXCL))\n    except FileExistsError: yield False; return\n"),
                                         ("core/files", "    finally: lock.release()", "    finally: os.unlink(lock.lock_file + '.held')")], ["crowd_of_2", "crowd_of_4"]),
    "a full disk is not reported": ([("core/files", "if full: raise disk_full", "if False: raise disk_full")], ["full_disk"]),
    "what is missing rounded off": ([("core/files", "(math.ceil if up else math.floor)(n/1e5)/10", "n/1e6")], ["full_disk"]),
    "everything can be written": ([("cache", "return not self.layers[-1].packed and os.access(folder, os.W_OK)", "return True")], ["read_only_loose", "read_only_packed"]),
    "a checkpoint is unpickled": ([("training/checkpoint", 'load_file(Path(folder)/"optimizer.safetensors")', '__import__("torch").load(open(Path(folder)/"optimizer.safetensors", "rb"), weights_only=False)')], ["pickles"]),
    "any prefix will do": ([("core/cache_entries", 'check("prefix" not in meta or kind != PREFIX and is_key(meta["prefix"]), ', "check(True, ")], ["headers"]),
    "kept as float16": ([("core/cache_entries", "t = tensor.detach().cpu().contiguous()", "t = tensor.detach().cpu().contiguous()\n    if t.dtype == torch.bfloat16: t = t.half().bfloat16()")], ["bits"]),
    "masks kept as bytes": ([("core/cache_entries", "t = tensor.detach().cpu().contiguous()", "t = tensor.detach().cpu().contiguous()\n    if t.dtype == torch.bool: t = t.byte()")], ["bits"]),
    "every prompt kept whole": ([("encoding/encoder", "Encoded(m.entry, rest.cpu(), prefix_entry.key if shared else None)", "Encoded(m.entry, torch.cat([prefix, rest]).cpu())")], ["flips"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKAGES)
def test_a_breakage_of_the_cache_is_noticed(name, tmp_path):
    changes, wanted = BREAKAGES[name]
    subprocess.run([sys.executable, "tests/cache_fault_trials.py", "--only", *wanted, "--out", "out.json"], **broken_copy(ROOT, changes, tmp_path))
    results = json.loads((tmp_path/"out.json").read_text())["cases"]
    for r in results: print(f"{name}: {r['name']}: {r['passed']} of {r['trials']}: {r['worst'][:200]}")
    if any(r["worst"].startswith("not run") for r in results): pytest.skip("a case cannot be run here")
    assert len(results) == len(wanted) and not [r["name"] for r in results if r["passed"] == r["trials"]], "not noticed"


def test_every_case_has_a_breakage_that_fits_the_code():
    for changes, _ in BREAKAGES.values(): broken(ROOT, changes)
    assert {c for _, wanted in BREAKAGES.values() for c in wanted} == set(cases(False))
