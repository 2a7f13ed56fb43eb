"""Changes of chunk tables: what a small commit writes of a large table, and what readers make of it."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import h3store
from h3store import errors
from h3store._ffi import lib
from h3store.archive import Contents, Reader, TensorRecord, Writer, verify
from h3store.archive.layout import xxh64
from h3store.archive.records import CHANGE_BYTES, MAX_CHANGES
from h3store.archive.tables import CHANGE_DTYPE, read_table
from h3store.codec import CHUNK_DTYPE, Filter, default_spec

ROWS = 2000  # chunks of a row each


def values(path: Path) -> list[int]:
    return h3store.load(path, ddr_bytes="1MiB")["t"][:, 7].tolist()


def lists(path: Path) -> list[int]:
    with Reader(path) as reader:
        return [place.n_chunks for place in reader.record("t").changes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h3store.open(tmp_path / "a.h3", mode="w", ddr_bytes="1MiB") as store:
        store.create("t", (ROWS, 1024), torch.int32, chunk_bytes=4096)[:] = 1
    return tmp_path / "a.h3"


def test_a_small_commit_writes_little_and_lists_stay_few(path: Path) -> None:
    expected, rng, size = [1] * ROWS, random.Random(1), path.stat().st_size
    for step in range(60):
        with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
            for _ in range(2):
                row = rng.randrange(ROWS)
                store["t"][row] = expected[row] = step
                store.commit()
        assert values(path) == expected and len(lists(path)) <= MAX_CHANGES
        if step == 0:
            assert path.stat().st_size < size + 2000  # and not 48,000 bytes of table
    found = lists(path)
    assert found and all(one > 2 * other for one, other in pairwise(found))
    assert verify(path).ok
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store["t"][::2] = 5
    assert lists(path) == []  # many changes are a new table
    assert values(path)[::2] == [5] * (ROWS // 2)


def test_longer_and_replaced_tensors(path: Path) -> None:
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        longer = store.append("t", torch.full((3, 1024), 2, dtype=torch.int32))
        store.commit()
        longer[0] = 3
    with Reader(path) as reader:
        record = reader.record("t")
        assert record.table is not None and record.table.n_chunks == ROWS and record.n_chunks == ROWS + 3
    assert values(path) == [3, *[1] * (ROWS - 1), 2, 2, 2]
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store.put("t", torch.full((ROWS, 1024), 4, dtype=torch.int32))
    assert values(path) == [4] * ROWS and lists(path) == []
    assert verify(path).ok


def test_a_commit_that_fails_is_made_good_by_the_next(path: Path) -> None:
    """Every write of a small commit fails once; a reader sees the last state or this one, the next commit all."""
    expected = [1] * ROWS
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        for n in range(1, 50):
            row = n * 31
            before, value = expected[row], 100 + n
            store["t"][row] = expected[row] = value
            lib.h3_fault_arm(lib.H3_FAULT_WRITE, n, 1, 28)
            with suppress(errors.StorageFullError):
                store.commit()
            fired = lib.h3_fault_fired(lib.H3_FAULT_WRITE)
            lib.h3_fault_arm(lib.H3_FAULT_WRITE, 0, 0, 0)
            assert values(path)[row] in (before, value)
            store.commit()
            assert values(path) == expected
            if not fired:
                break
        assert n >= 6  # chunk, changes, index, slot, flush, seal
    assert verify(path).ok


@pytest.mark.parametrize(("attack", "text"), [
    ("order", "do not rise"), ("past the end", "do not rise"), ("hole", "leave some"), ("check", "fail their check"),
    ("entry", "outside the rules"), ("none", "")])
def test_forged_changes_are_refused(tmp_path: Path, attack: str, text: str) -> None:
    """A table of 2 entries for 4 chunks; right in all that is not attacked."""
    from tests.fault.test_archive_corrupt import forge

    changes = np.zeros(3, CHANGE_DTYPE)
    changes["block"] = [1, 2, 3]
    zero = np.zeros(1, CHUNK_DTYPE)[0]
    zero["filter"], zero["check"] = Filter.ZERO, xxh64(bytes(4096))
    changes["entry"] = zero
    if attack == "order":
        changes["block"] = [2, 1, 3]
    elif attack == "past the end":
        changes["block"] = [1, 2, 4]
    elif attack == "hole":
        changes["block"] = [0, 1, 2]
    elif attack == "entry":
        changes["entry"]["offset"][0], changes["entry"]["stored_bytes"][0] = 100, 10
    table = np.array([zero, zero], CHUNK_DTYPE).tobytes()
    check = 5 if attack == "check" else xxh64(changes.tobytes())
    path = tmp_path / "a.h3"
    index = {"tensors": {"t": {"dtype": "uint8", "shape": [16384], "chunk_bytes": 4096, "spec": [1, 0, 2, 0, 0, 1],
                               "table": [4600, 2, f"{xxh64(table):016x}"], "changes": [[4700, 3, f"{check:016x}"]]}},
             "metadata": {}}
    forge(path, index, covered_bytes=4800)
    data = path.read_bytes().ljust(4600, b"\0") + table
    path.write_bytes(data.ljust(4700, b"\0") + changes.tobytes().ljust(100, b"\0"))
    with Reader(path) as reader:
        if attack == "none":
            assert not Contents(reader).span(reader.record("t"), 0, 16384).any()
            return
        with pytest.raises(errors.CorruptArchiveError, match=text):
            read_table(reader.io, reader.record("t"), reader.file_bytes)


@pytest.mark.parametrize("changes", [[], [[4096, 0, "00"]], [[4096, 99, "00"]], [[0, 1, "00"]], [[2**63, 1, "00"]],
                                     [[4096, 1, "xx"]], [[4096, 1]], 7, [[4096, 1, "00"]] * 17])
def test_forged_references_to_changes_are_refused(tmp_path: Path, changes: object) -> None:
    from tests.fault.test_archive_corrupt import forge

    entry = {"dtype": "uint8", "shape": [16384], "chunk_bytes": 4096, "spec": [1, 0, 2, 0, 0, 1],
             "table": [4096, 2, "00"], "changes": changes}
    forge(tmp_path / "a.h3", {"tensors": {"t": entry}, "metadata": {}})
    with pytest.raises(errors.CorruptArchiveError):
        Reader(tmp_path / "a.h3")


def test_records_are_checked_when_taken_back(tmp_path: Path) -> None:
    with Writer(tmp_path / "a.h3") as writer:
        record = TensorRecord("t", "uint8", (8192,), default_spec("uint8"), 4096, chunks=np.zeros(2, CHUNK_DTYPE))
        with pytest.raises(errors.UsageError, match="entry 1"):
            writer.update(record, np.array([1]))
    assert CHANGE_DTYPE.itemsize == CHANGE_BYTES
