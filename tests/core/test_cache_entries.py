"""Entries of the cache and files of other people: what is refused, and why."""
import math

import pytest
import torch
from safetensors.torch import save

from qie_nb.core.cache_entries import (
    LARGEST, CacheEntryError, fault_of_numbers, open_safetensors, pack_entry, unpack_entry)

ENTRY = "pixel_latent", "ab12"


def refused(file) -> str:
    """What is wrong with a file, and what to do."""
    with pytest.raises(ValueError) as e, open_safetensors(file, "LoRA"):
        pass
    return str(e.value).partition(" cannot be read: ")[2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_tensor_that_is_not_finite_is_not_stored(bad):
    with pytest.raises(CacheEntryError, match="holds NaN or inf and is not stored"):
        pack_entry(*ENTRY, torch.tensor([1., bad]))


@pytest.mark.parametrize("kind, key", [("pixel_latent", "ab13"), ("control_latent", "ab12")])
def test_an_entry_is_read_only_as_what_it_is(kind, key):
    data = pack_entry(*ENTRY, torch.ones(2))
    with pytest.raises(CacheEntryError, match="holds pixel_latent ab12"):
        unpack_entry(data, kind, key)


@pytest.mark.parametrize("written, other", [(b'"F32"', b'"I32"'), (b"[2,3]", b"[3,2]")])
def test_the_checksum_covers_the_type_and_the_shape(written, other):
    data = pack_entry(*ENTRY, torch.ones(2, 3))
    assert data.count(written) == 1
    with pytest.raises(CacheEntryError, match="checksum differs"):
        unpack_entry(data.replace(written, other), *ENTRY)


def test_a_file_of_another_person_is_checked_before_it_is_read(tmp_path):
    file = tmp_path/"lora.safetensors"
    whole = save({"a": torch.ones(2)})
    file.write_bytes(whole[:-1])
    assert refused(file) == "it is cut off, 1 bytes are missing; download or copy it again"
    file.write_bytes(b"\x80\x02}q\x00.")
    assert refused(file).endswith("which could run code; convert it to safetensors")
    file.write_bytes(b"")
    assert refused(file) == "it is empty; download or copy it again"


def test_a_number_that_float16_cannot_hold_is_named():
    values = LARGEST, -LARGEST, LARGEST + 100, -1e6, math.nan, math.inf
    faults = [fault_of_numbers(torch.tensor([0., value])) for value in values]
    assert faults == ["", "", "6.56e+04", "1e+06", "NaN", "infinity"]
