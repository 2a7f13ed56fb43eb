"""Checks of chunks by either hash: files of format 1.1 and before have XXH64, what is written now has XXH3, and one
file may hold both. Whoever compares a check does it by the hash that the chunk's entry names."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

import h3store
from h3store import errors
from h3store.archive import Contents, Reader, Writer, verify
from h3store.archive.layout import FEATURE_XXH3, xxh64
from h3store.codec import CheckKind, Filter, check_holds, decode_chunk, default_spec, encode_chunk

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
CHUNK = 65536


def weights(rows: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, CHUNK // 2, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def kinds(path: Path, name: str = "t") -> list[int]:
    with Reader(path) as reader:
        return reader.chunks(reader.record(name))["check_kind"].tolist()


def with_xxh64(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Saves an archive and gives its chunks the checks that older builds gave them."""
    h3store.save(tensors, path)
    with Writer(path, "r+") as writer, Reader(path) as reader, closing(Contents(reader)) as contents:
        for name, record in list(writer.records.items()):
            chunks = writer.chunks(record).copy()
            chunks["check"] = [xxh64(contents.chunk(reader.record(name), i)) for i in range(len(chunks))]
            chunks["check_kind"] = CheckKind.XXH64
            writer.put(replace(record, chunks=chunks))
        writer.commit()


@pytest.fixture(params=["signal", "signal-copy", "dispatch"])
def delivery(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("H3STORE_DELIVERY", request.param)
    return request.param


def test_a_new_chunk_has_the_published_hash_of_its_bytes() -> None:
    spec = default_spec("bfloat16")
    for raw in (weights(1).view(torch.uint8).numpy().ravel(), np.zeros(CHUNK, np.uint8), np.arange(3, dtype=np.uint8)):
        entry, _ = encode_chunk(raw, spec)
        assert entry["check_kind"] == CheckKind.XXH3 and entry["check"] == xxhash.xxh3_64_intdigest(raw.tobytes())
        assert check_holds(entry, raw) and not check_holds(entry, raw ^ 1)


@pytest.mark.parametrize("kind", [CheckKind.XXH64, 2, 255])
def test_a_check_by_another_hash_than_the_entry_names_is_damage(kind: int) -> None:
    raw, spec = weights(1).view(torch.uint8).numpy().ravel(), default_spec("bfloat16")
    entry, stored = encode_chunk(raw, spec)
    entry["check_kind"] = kind
    with pytest.raises(errors.CorruptBlockError):
        decode_chunk(entry, stored, spec, CHUNK)
    entry["check"] = xxh64(raw)
    assert check_holds(entry, raw) == (kind == CheckKind.XXH64)


def test_new_archives_need_the_feature_and_older_ones_from_their_first_write_on(tmp_path: Path) -> None:
    old, new = tmp_path / "old.h3", tmp_path / "new.h3"
    shutil.copy(GOLDEN / "v1-filters.h3", old)
    h3store.save({"t": weights(1)}, new)
    with Reader(old) as reader:
        before = reader.slot
        assert not before.required & FEATURE_XXH3
    with h3store.open(old, mode="r+", ddr_bytes="1MiB") as store:
        for name in store:
            store[name].clone()
        store.commit()  # nothing changed: nothing is written, whatever the kind
    with Reader(old) as reader:
        assert reader.slot == before
    with h3store.open(old, mode="r+", ddr_bytes="1MiB") as store:
        store.put("new", torch.ones(5))
        store.commit()
        del store["new"]
        store.commit()
    for path in (old, new):
        with Reader(path) as reader:
            assert reader.slot.required & FEATURE_XXH3
        assert verify(path).ok


def test_an_older_archive_is_changed_in_place(tmp_path: Path, delivery: str) -> None:
    """Evictions, commits and records of pages on chunks of the other kind; what is unchanged is not written again."""
    path, expected = tmp_path / "a.h3", weights(40)
    with_xxh64(path, {"t": expected})
    assert set(kinds(path)) == {CheckKind.XXH64}
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        tensor = store["t"]
        tensor[3] = expected[3] = weights(1, seed=1)[0]
        tensor[7, :9] = expected[7, :9] = 5  # a record of one page
        assert torch.equal(tensor, expected)  # two and a half budgets of it pass through: most has left
        store.commit()
        assert store.stats()["write_backs"] == 2
        tensor[8, :9] = expected[8, :9] = 6
        store.commit()
        assert store.stats()["write_backs"] == 3
    found = kinds(path)
    assert [i for i, kind in enumerate(found) if kind == CheckKind.XXH3] == [3, 7, 8]
    assert verify(path).ok
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        assert torch.equal(store["t"].clone(), expected)
        store["t"][7, 9:20] = expected[7, 9:20] = 7  # a new record on the same older chunk
        store.commit()
        store.compact()
        assert torch.equal(store["t"].clone(), expected)
        store["t"][1, 0] = expected[1, 0] = 1
    assert torch.equal(h3store.load(path)["t"].clone(), expected) and verify(path).ok
    with Reader(path) as reader:
        assert reader.slot.required & FEATURE_XXH3
    assert CheckKind.XXH64 in kinds(path) and CheckKind.XXH3 in kinds(path)


@pytest.mark.parametrize("block", [0, 1, 2], ids=["older", "newer", "record"])
def test_damage_is_found_whatever_the_kind(block: int, tmp_path: Path) -> None:
    path, expected = tmp_path / "a.h3", weights(4)
    with_xxh64(path, {"t": expected})
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store["t"][1] = weights(1, seed=1)[0]
        store["t"][2, :9] = 5
    with Reader(path) as reader:
        entry = reader.chunks(reader.record("t"))[block]
        assert (entry["check_kind"] == CheckKind.XXH3) == (block > 0)
        assert (entry["filter"] == Filter.PATCH) == (block > 1)
    with open(path, "r+b") as file:
        file.seek(int(entry["offset"]) + int(entry["stored_bytes"]) - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    loaded = h3store.load(path)["t"]
    with pytest.raises(errors.CorruptBlockError):
        loaded[block].clone()
    assert torch.equal(loaded[3].clone(), expected[3])
    assert [bad.block for bad in verify(path).bad] == [block]


def test_newer_archives_lean_on_older_ones(tmp_path: Path) -> None:
    base, path, before = tmp_path / "base.h3", tmp_path / "a.h3", weights(6)
    with_xxh64(base, {"t": before})
    after = before.clone()
    after[:, ::500] *= 1.01
    h3store.save({"t": after}, path, base=base)
    with Reader(path) as reader:
        assert reader.record("t").base is not None
    assert set(kinds(base)) == {CheckKind.XXH64} and set(kinds(path)) == {CheckKind.XXH3}
    assert torch.equal(h3store.load(path)["t"].clone(), after) and verify(path).ok


def test_a_child_reads_both_kinds(tmp_path: Path) -> None:
    path, expected = tmp_path / "a.h3", weights(8)
    with_xxh64(path, {"t": expected})
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        tensor = store["t"]
        tensor[2, :9] = expected[2, :9] = 5
        tensor[3] = expected[3] = 6
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            torch.set_num_threads(1)  # the pool's other threads stayed in the parent
            os._exit(0 if torch.equal(tensor.clone(), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(tensor.clone(), expected)
