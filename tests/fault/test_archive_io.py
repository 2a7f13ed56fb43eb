"""Reads, writes and allocations that fail, each in turn, and disks that are full: one error, the last commit stands,
and the writer goes on."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import h3store
from h3store import errors
from h3store._ffi import lib
from h3store.archive import Contents, Reader, Writer, verify
from h3store.codec import default_spec

BF16 = default_spec("bfloat16")
COUNT = 60_000


def values(seed: int, count: int = COUNT) -> np.ndarray:
    floats = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return np.ascontiguousarray(floats.view(np.uint16)[1::2]).view(np.uint8)


@contextmanager
def fault(kind: int, n: int, error_no: int, count: int = 1) -> Iterator[None]:
    lib.h3_fault_arm(kind, n, count, error_no)
    try:
        yield
    finally:
        lib.h3_fault_arm(kind, 0, 0, 0)


def contents_of(path: Path) -> dict[str, bytes]:
    with Reader(path) as reader:
        contents = Contents(reader)
        return {name: contents.span(record, 0, record.nbytes).tobytes() for name, record in reader.records.items()}


def add_and_commit(writer: Writer, seed: int) -> None:
    writer.add(f"t{seed}", values(seed), "bfloat16", (COUNT,), BF16, 16384)
    writer.metadata["seed"] = seed
    writer.commit()


def each_failing(kind: int, error_no: int, action: Callable[[], None], count: int = 1) -> Iterator[BaseException]:
    """Runs action with the first, second, ... call failing, until a run ends without the fault; yields its errors."""
    for n in range(1, 1000):
        caught: BaseException | None = None
        with fault(kind, n, error_no, count):
            try:
                action()
            except errors.H3Error as error:
                caught = error
        fired = lib.h3_fault_fired(kind)
        assert (caught is not None) == (fired > 0), (n, caught)
        if caught is None:
            assert n > 1
            return
        yield caught
    raise AssertionError("the fault fires for ever")


@pytest.mark.parametrize(("error_no", "expected"), [
    (errno.EIO, errors.ArchiveError), (errno.ENOSPC, errors.StorageFullError), (errno.EDQUOT, errors.StorageFullError)])
@pytest.mark.parametrize("count", [1, -1])
def test_each_write_of_a_commit_fails(tmp_path: Path, error_no: int, expected: type[Exception], count: int) -> None:
    path = tmp_path / "a.h3"
    with Writer(path) as writer:
        add_and_commit(writer, 1)
        failures = 0
        for error in each_failing(lib.H3_FAULT_WRITE, error_no, lambda: add_and_commit(writer, 2), count):
            failures += 1
            assert type(error) is expected and str(path) in str(error) and os.strerror(error_no) in str(error)
            # What a crash now would leave: the last commit, or the one whose very last flush failed.
            held = contents_of(path)
            assert held["t1"] == values(1).tobytes() and held.get("t2", values(2).tobytes()) == values(2).tobytes()
            assert verify(path).ok
        assert failures >= 5  # chunks, table, index, flush, slot, flush
        assert contents_of(path) == {"t1": values(1).tobytes(), "t2": values(2).tobytes()}
        add_and_commit(writer, 3)
    assert set(contents_of(path)) == {"t1", "t2", "t3"} and verify(path).ok


def test_each_write_of_a_new_file_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.h3"

    def create() -> None:
        with Writer(path) as writer:
            add_and_commit(writer, 1)

    for _ in each_failing(lib.H3_FAULT_WRITE, errno.ENOSPC, create):
        if path.exists():
            assert contents_of(path) in ({}, {"t1": values(1).tobytes()})
            path.unlink()
        assert os.listdir(tmp_path) == []
    assert contents_of(path) == {"t1": values(1).tobytes()}


def test_each_write_of_a_replacement_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.h3"
    with Writer(path) as writer:
        add_and_commit(writer, 1)

    def replace() -> None:
        with Writer(path, "w") as writer:
            add_and_commit(writer, 2)

    for _ in each_failing(lib.H3_FAULT_WRITE, errno.EIO, replace):
        assert contents_of(path) == {"t1": values(1).tobytes()}
        assert os.listdir(tmp_path) == ["a.h3"]
    assert contents_of(path) == {"t2": values(2).tobytes()}


@pytest.mark.parametrize("opening", ["read", "r+", "verify"])
def test_each_read_fails(tmp_path: Path, opening: str) -> None:
    path = tmp_path / "a.h3"
    with Writer(path) as writer:
        add_and_commit(writer, 1)
        add_and_commit(writer, 2)

    def action() -> None:
        if opening == "read":
            contents_of(path)
        elif opening == "r+":
            Writer(path, "r+").close()
        elif bad := verify(path, threads=1).bad:
            raise errors.ArchiveError(bad[0].reason)

    before = path.read_bytes()
    for error in each_failing(lib.H3_FAULT_READ, errno.EIO, action):
        # An error of the disk is no damage of the file: no older commit is taken for it.
        assert str(path) in str(error) and not isinstance(error, errors.CorruptArchiveError)
        assert path.read_bytes() == before


def test_each_allocation_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.h3"
    with Writer(path) as writer:
        add_and_commit(writer, 1)
    raw = values(2, 2_000_000)

    def action() -> None:
        with Writer(path, "r+") as writer:
            writer.add("t2", raw, "bfloat16", (2_000_000,), BF16, threads=2)
            writer.commit()

    for error in each_failing(lib.H3_FAULT_ALLOC, errno.ENOMEM, action):
        assert isinstance(error, errors.NativeError) and "memory" in str(error)
        assert set(contents_of(path)) == {"t1"}
    assert contents_of(path)["t2"] == raw.tobytes()


def test_interrupted_and_short_writes_are_resumed(tmp_path: Path) -> None:
    path = tmp_path / "a.h3"
    with fault(lib.H3_FAULT_WRITE, 1, errno.EINTR, 7), Writer(path) as writer:
        add_and_commit(writer, 1)
    assert contents_of(path) == {"t1": values(1).tobytes()}


def fill_up_then_go_on(path: Path) -> None:
    """A tensor that does not fit, then, in the same writer, one that does."""
    noise = np.random.default_rng(0).integers(0, 256, 6 << 20, np.uint8)
    with Writer(path, "w") as writer:
        add_and_commit(writer, 1)
        for _ in range(3):
            with pytest.raises(errors.StorageFullError, match="no space left"):
                writer.add("big", noise, "uint8", (6 << 20,), default_spec("uint8"))
            assert set(writer.records) == {"t1"} and contents_of(path) == {"t1": values(1).tobytes()}
        add_and_commit(writer, 2)
    assert contents_of(path) == {"t1": values(1).tobytes(), "t2": values(2).tobytes()}
    assert verify(path).ok


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        fill_up_then_go_on(tmp_path / "a.h3")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_size_limit(tmp_path: Path) -> None:
    """Offsets do not shrink, so past a size limit the way on is to open the file again."""
    path = tmp_path / "a.h3"
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np, pytest, resource, test_archive_io as t
from pathlib import Path
path = Path({str(path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
with t.Writer(path, "w") as writer:
    t.add_and_commit(writer, 1)
    noise = np.random.default_rng(0).integers(0, 256, 6 << 20, np.uint8)
    with pytest.raises(t.errors.StorageFullError, match="File too large"):
        writer.add("big", noise, "uint8", (6 << 20,), t.default_spec("uint8"))
    with pytest.raises(t.errors.StorageFullError):
        t.add_and_commit(writer, 2)
with t.Writer(path, "r+") as writer:
    t.add_and_commit(writer, 2)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert contents_of(path) == {"t1": values(1).tobytes(), "t2": values(2).tobytes()}
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4 << 20


@pytest.mark.parametrize("forked", [False, True])
def test_a_store_that_met_a_full_disk_gives_back_what_it_did_not_commit(tmp_path: Path, forked: bool) -> None:
    path = tmp_path / "full.h3"
    store = h3store.open(path, mode="w", ddr_bytes="2MiB")
    store.put("kept", torch.arange(1000.0))
    store.commit()
    committed = path.stat().st_size
    large = store.create("large", (1_000_000,), torch.float32)
    with fault(lib.H3_FAULT_WRITE, 20, errno.ENOSPC, -1), pytest.raises(errors.StorageFullError):
        large.copy_(torch.randn(1_000_000))
        store.commit()
    assert path.stat().st_size > 2 * committed
    if forked and (pid := os.fork()) == 0:
        os._exit(0)
    elif forked:
        os.waitpid(pid, 0)  # another child might read on
    store.remove("large")
    del large
    store.commit()
    store.close()
    assert (path.stat().st_size == committed) != forked
    assert verify(path).ok and torch.equal(h3store.load(path)["kept"], torch.arange(1000.0))


def test_what_a_held_tensor_reads_is_not_cut_off(tmp_path: Path) -> None:
    store = h3store.open(tmp_path / "a.h3", mode="w", ddr_bytes="1MiB")
    value = torch.randn(1_000_000)
    large = store.create("large", (1_000_000,), torch.float32)
    large.copy_(value)  # past the budget: most of it is in the file by now
    store.close(commit=False)
    assert (large.clone() == value).float().mean() > 0.5  # what was in memory and not in the file may be gone
