"""Patch records: what is written when few pages of a block change, and that every reader of chunks reads it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import h3store
from h3store._ffi import lib
from h3store.archive import Contents, Reader, describe, verify
from h3store.codec import Filter
from h3store.errors import CorruptBlockError, H3Error

PAGE = 4096
BLOCK = 16 * PAGE


def filters(path: Path, name: str = "t") -> list[int]:
    with Reader(path) as reader:
        return reader.chunks(reader.record(name))["filter"].tolist()


def weights(pages: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(pages, PAGE // 2, generator=generator) * 0.02).bfloat16()


@pytest.fixture(params=["signal", "signal-copy", "dispatch"])
def delivery(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("H3STORE_DELIVERY", request.param)
    return request.param


def test_few_changed_pages_become_a_record_and_many_a_chunk(tmp_path: Path, delivery: str) -> None:
    path, expected = tmp_path / "a.h3", weights(64)
    h3store.save({"t": expected}, path)
    for changed, kind in ((1, Filter.PATCH), (3, Filter.PATCH), (4, Filter.PATCH), (5, Filter.EXPNIBBLE)):
        with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
            size = path.stat().st_size
            rows = weights(changed, seed=changed)
            store["t"][16:16 + changed] = rows
            expected[16:16 + changed] = rows
            assert store.commit()
            grown = path.stat().st_size - size
        assert filters(path) == [Filter.EXPNIBBLE, kind, Filter.EXPNIBBLE, Filter.EXPNIBBLE]
        assert kind != Filter.PATCH or grown < changed * PAGE + 1500
        assert torch.equal(h3store.load(path)["t"].clone(), expected)
        assert verify(path).ok


def test_records_hold_all_pages_since_the_whole_chunk(tmp_path: Path, delivery: str) -> None:
    """Commits and evictions in between, in one process and over several: no record leans on another."""
    path, expected = tmp_path / "a.h3", weights(32)
    h3store.save({"t": expected}, path)
    for round_ in range(2):
        with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
            tensor = store["t"]
            for step in range(2):
                row = 2 * round_ + step
                tensor[row] = expected[row] = row
                if step:
                    store.range("t").drop()
                store.commit()
        with Reader(path) as reader:
            entry = reader.chunks(reader.record("t"))[0]
            assert entry["filter"] == Filter.PATCH
            np.testing.assert_array_equal(Contents(reader).chunk(reader.record("t"), 0),
                                          expected.view(torch.uint8).flatten()[:BLOCK].numpy())
        info = describe(path)
        assert 0 < info.dead_bytes < info.file_bytes - 2 * 40_000  # both whole chunks are live


def test_pages_of_a_tensor_of_zeros(tmp_path: Path, delivery: str) -> None:
    """The base was never written; the last block is short, and so is its last page."""
    path = tmp_path / "a.h3"
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("t", (BLOCK + 9 * PAGE + 100,), torch.uint8)
        tensor[3] = tensor[-1] = 1
    assert filters(path) == [Filter.PATCH, Filter.PATCH] and path.stat().st_size < 5_500
    found = h3store.load(path)["t"].clone()
    assert found.nonzero().flatten().tolist() == [3, len(found) - 1]
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store["t"][3] = store["t"][-1] = 0  # back to the base: no page differs
    assert filters(path) == [Filter.ZERO, Filter.ZERO]


def test_a_longer_tensor_folds_the_block_that_it_ended_in(tmp_path: Path) -> None:
    path = tmp_path / "a.h3"
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("t", (9 * PAGE + 100,), torch.uint8)
        tensor[3] = tensor[-1] = 1
        store.commit()
        longer = store.append("t", torch.full((2 * PAGE,), 2, dtype=torch.uint8))
        longer[5] = 9
    found = h3store.load(path)["t"].clone()
    assert found[[3, 5, 9 * PAGE + 99]].tolist() == [1, 9, 1] and (found[9 * PAGE + 100:] == 2).all()
    assert int(found[:9 * PAGE + 99].count_nonzero()) == 2 and verify(path).ok


def test_a_delta_leans_on_patched_blocks(tmp_path: Path) -> None:
    base, path, expected = tmp_path / "base.h3", tmp_path / "next.h3", weights(32)
    h3store.save({"t": expected}, base)
    with h3store.open(base, mode="r+", ddr_bytes="1MiB") as store:
        store["t"][2] = expected[2] = 0.5
    later = (expected.float() + 2.0**-14).bfloat16()
    h3store.save({"t": later}, path, base=base)
    with Reader(path) as reader:
        assert reader.record("t").base is not None
    assert torch.equal(h3store.load(path, ddr_bytes="1MiB")["t"].clone(), later) and verify(path).ok


def test_every_flipped_bit_of_a_record_is_found(tmp_path: Path) -> None:
    path, expected = tmp_path / "a.h3", weights(16)
    h3store.save({"t": expected}, path)
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store["t"][2] = expected[2] = 0.5
    with Reader(path) as reader:
        entry = reader.chunks(reader.record("t"))[0]
        start, size = int(entry["offset"]), int(entry["stored_bytes"])
    whole, rng, caught = path.read_bytes(), random.Random(1), 0
    for bit in [*rng.sample(range(8 * 56), 150), *(rng.randrange(8 * 56, 8 * size) for _ in range(50))]:
        data = bytearray(whole)
        data[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            found = h3store.load(path, ddr_bytes="1MiB")["t"].clone()
        except H3Error:
            assert not verify(path, threads=1).ok
            caught += 1
        else:  # such as a bit of a zstd frame that says nothing
            assert torch.equal(found, expected) and verify(path, threads=1).ok
    assert caught > 175


def test_a_damaged_base_chunk_is_an_error_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "a.h3"
    h3store.save({"t": weights(16)}, path)
    with Reader(path) as reader:
        offset = int(reader.chunks(reader.record("t"))[0]["offset"])
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store["t"][2] = 0.5
    data = bytearray(path.read_bytes())
    data[offset + 1000] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptBlockError, match="block 0"):
        h3store.load(path)["t"].clone()
    assert [bad.block for bad in verify(path).bad] == [0]


def test_writes_and_reads_that_fail_lose_nothing(tmp_path: Path) -> None:
    """The n-th write, then the n-th read of saving and loading records fails; the next try finds all of it."""
    path, expected = tmp_path / "a.h3", weights(64)
    h3store.save({"t": expected}, path)
    for kind in (lib.H3_FAULT_WRITE, lib.H3_FAULT_READ):
        for n in range(1, 100):
            with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
                lib.h3_fault_arm(kind, n, 1, 5)
                rows = torch.arange(0, 64, 16) + n % 4
                try:
                    store["t"][rows] = float(n)
                    store.commit()
                except H3Error:
                    pass
                fired = lib.h3_fault_fired(kind)
                lib.h3_fault_arm(kind, 0, 0, 0)
                store["t"][rows] = expected[rows] = float(n)
            assert torch.equal(h3store.load(path)["t"].clone(), expected)
            if not fired:
                break
        assert n > 2
    assert verify(path).ok


def test_against_memory(tmp_path: Path) -> None:
    """Random small and large writes, evictions, commits, reopening: a dict of plain tensors says what is right."""
    path, rng = tmp_path / "a.h3", random.Random(7)
    expected = weights(100)[:, : PAGE // 2 - 24].contiguous()  # rows that straddle pages and blocks
    h3store.save({"t": expected}, path)
    kinds: set[int] = set()
    for _ in range(12):
        with h3store.open(path, mode="r+", ddr_bytes="512KiB") as store:
            tensor = store["t"]
            for _ in range(rng.randrange(1, 30)):
                at, count = rng.randrange(100), rng.choice([1, 1, 1, 2, 30])
                value = rng.random()
                tensor[at:at + count] = expected[at:at + count] = value
                if rng.random() < 0.1:
                    store.commit()
                if rng.random() < 0.1:
                    store.range("t").drop()
            assert torch.equal(tensor.clone(), expected)
        assert torch.equal(h3store.load(path, ddr_bytes="512KiB")["t"].clone(), expected)
        kinds |= set(filters(path))
    assert kinds == {Filter.EXPNIBBLE, Filter.PATCH} and verify(path).ok
