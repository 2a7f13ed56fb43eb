"""Commits look only at blocks that were written to since the last: what that must not lose, and what it must not cost.
native/tests/test_guard.c has the races of single writes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import h3store
from h3store.archive import Reader
from h3store.pager import Range
from h3store.tensor import range_of
from tests.tiered import DELIVERIES

CELLS = 1024 * 1024
WRITERS = 3


@pytest.fixture(params=DELIVERIES)
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("H3STORE_DELIVERY", request.param)
    yield tmp_path / "a.h3"


def committed(path: Path, name: str = "t") -> torch.Tensor:
    """What another reader of the file sees now."""
    with h3store.open(path, ddr_bytes="2MiB") as store:
        return store[name].clone()


@pytest.mark.parametrize("ddr_bytes", ["1MiB", "16MiB"], ids=["evictions", "all resident"])
def test_commits_hold_what_was_written_before_them(path: Path, ddr_bytes: str) -> None:
    store = h3store.open(path, mode="w", ddr_bytes=ddr_bytes)
    tensor = store.create("t", (CELLS,), torch.int32)
    cells = tensor.numpy()
    rounds, stop = [0] * WRITERS, threading.Event()

    def write(number: int) -> None:
        generator = np.random.default_rng(number)
        while not stop.is_set():
            where = generator.integers(0, CELLS // WRITERS, 2000) * WRITERS + number
            where[0] = number  # one cell counts the rounds
            cells[where] = rounds[number] + 1
            rounds[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for _ in range(12):
        before = list(rounds)
        store.commit()
        after = [number + 1 for number in rounds]
        found = committed(path)[:WRITERS].tolist()
        assert all(low <= value <= high for low, value, high in zip(before, found, after, strict=True))
    stop.set()
    for thread in threads:
        thread.join()
    store.commit()
    lost = (committed(path) != torch.from_numpy(cells)).sum()  # of a million cells
    assert lost == 0
    store.close(commit=False)


def test_only_what_was_written_is_looked_at(path: Path) -> None:
    store = h3store.open(path, mode="w", ddr_bytes="16MiB")
    tensor = store.create("t", (CELLS,), torch.int32)
    tensor.fill_(1)
    store.commit()
    before = store.stats()
    for i in range(5):
        tensor[100_000] = i
        tensor[100_001] = i
        store.commit()
    after = store.stats()
    assert after["write_faults"] - before["write_faults"] == 5
    assert after["write_backs"] - before["write_backs"] == 5
    assert int(committed(path)[100_000]) == 4
    store.close()


@pytest.mark.parametrize("path", ["signal", "dispatch"], indirect=True)
def test_the_kernel_writes_into_pinned_memory_only(path: Path, tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes(bytes([7]) * 8192)
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("t", (8192,), torch.uint8, chunk_bytes=4096)
        tensor.fill_(1)
        store.commit()
        tensor[4096:] = 2  # half of it writable again
        with (tmp_path / "values").open("rb", buffering=0) as file:
            with pytest.raises(OSError, match="address"):
                file.readinto(tensor.numpy())
            assert os.preadv(file.fileno(), [tensor.numpy()[4096:]], 0) == 4096
            file.seek(0)
            with h3store.pin(tensor) as held:
                assert file.readinto(held.numpy()) == 8192
        store.commit()
        assert (committed(path) == 7).all()


def test_an_interrupted_commit_is_finished_by_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes when a changed entry is in the table and its number not yet known to anybody."""
    flush = Range.flush_into

    def interrupted(self: Range, table: np.ndarray, changed: list[np.ndarray]) -> None:
        flush(self, table, [])
        raise KeyboardInterrupt

    store = h3store.open(path, mode="w", ddr_bytes="16MiB")
    tensor = store.create("t", (CELLS,), torch.int32)
    store.commit()
    for value in (1, 2):
        tensor[500_000] = value
        with monkeypatch.context() as patched:
            patched.setattr(Range, "flush_into", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.commit()
        store.commit()
        assert int(committed(path)[500_000]) == value
    store.close()


def test_lengths_change_between_commits(path: Path) -> None:
    want = torch.zeros(0, 100, dtype=torch.int32)
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        store.create("t", (0, 100), torch.int32, chunk_bytes=4096)
        for i in range(1, 12):
            rows = torch.full((37, 100), i, dtype=torch.int32)
            want = torch.cat([want, rows])
            store.append("t", rows)
            if i % 4 == 0:
                want = want[:-20].clone()
                store.resize("t", len(want))
            want[i] = store["t"][i] = -i
            store.commit()
            assert torch.equal(committed(path), want)
            with Reader(path) as reader:
                assert reader.chunks(reader.record("t")).shape == (reader.record("t").n_chunks,)


def test_close_compares_all_that_is_resident(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Range, "recheck", lambda self: asked.append(self))
    store = h3store.open(path, mode="w", ddr_bytes="1MiB")
    tensor = store.create("t", (10,), torch.int32)
    store.commit()
    assert not asked
    store.close()
    assert asked == [range_of(tensor)]
