"""Digests that are remembered, files of dead processes, and what a full disk says."""
import hashlib
import os
import socket

import pytest

from qie_nb.core import files
from qie_nb.core.files import cached_file_property, disk_full, file_digest, kept, stale_temp_files


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Nothing is remembered of other tests."""
    monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home"))


def length_of(path, asked:list) -> int:
    """The length of a file; `asked` gets each question that was not remembered."""
    def compute(p):
        asked.append(p)
        return p.stat().st_size
    return cached_file_property(path, "length", compute)


def test_what_is_known_of_a_file_is_computed_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MIN_AGE", -1.) # as if it had been written long ago
    path, asked = tmp_path/"a.txt", []
    path.write_text("one")
    assert [length_of(path, asked) for _ in range(3)] == [3, 3, 3] and len(asked) == 1
    path.write_text("three")
    assert length_of(path, asked) == 5 and len(asked) == 2
    assert file_digest(path) == hashlib.sha256(b"three").hexdigest()


def test_a_file_that_was_written_just_now_is_not_remembered(tmp_path):
    "It may change again within the resolution of change times."
    path, asked = tmp_path/"a.txt", []
    path.write_text("one")
    assert [length_of(path, asked) for _ in range(2)] == [3, 3] and len(asked) == 2


def test_a_result_is_kept_by_content_and_kind():
    assert kept("length", "ab12") is None
    assert kept("length", "ab12", lambda: 3) == kept("length", "ab12", lambda: 4) == 3
    assert kept("width", "ab12", lambda: 5) == 5


def test_only_files_of_dead_processes_and_old_ones_of_other_machines_are_stale(tmp_path):
    here = socket.gethostname()[:40]
    names = [f".{here}-999999999-0.tmp", f".{here}-{os.getpid()}-1.tmp",
             ".elsewhere-1-2.tmp", ".elsewhere-1-3.tmp"]
    for name in names:
        (tmp_path/name).touch()
    os.utime(tmp_path/names[2], (1, 1))
    assert sorted(p.name for p in stale_temp_files(tmp_path)) == sorted([names[0], names[2]])


def test_a_full_disk_says_enough_bytes(tmp_path, monkeypatch):
    "What is needed and missing is rounded up, what is free is rounded down."
    monkeypatch.setattr(files, "free_bytes", lambda path: 1_090_000)
    said = str(disk_full(tmp_path/"x", 2_010_000))
    assert "2.1 MB are needed and 1.0 MB are free; free at least 1.0 MB more" in said
