"""The n-th read, write, allocation or ioctl of the pager fails, n raised until a run ends without it: an error or the
right bytes, never others, never a hang, and everything works again afterwards."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from h3store._ffi import lib
from h3store.errors import ArchiveError, H3Error, StorageFullError
from h3store.pager import Pager
from h3store.tensor import TieredTensor
from tests.tiered import DELIVERIES, tiered_copy

KIB = 1024
ERRNO = {"READ": 5, "WRITE": 28, "ALLOC": 12, "IOCTL": 12}


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    for kind in range(lib.H3_FAULT_KINDS):
        lib.h3_fault_arm(kind, 0, 0, 0)


def assert_old_or_new(tensor: TieredTensor, old: torch.Tensor, new: torch.Tensor) -> None:
    held = tensor.clone()
    assert ((held == old) | (held == new)).all()


def attempt(
    tensor: TieredTensor, other: TieredTensor, old: torch.Tensor, new: torch.Tensor, source: torch.Tensor
) -> bool:
    """One round of reading, overwriting and saving; True if every step went through."""
    try:
        assert torch.equal(other + 0, source)
        tensor.copy_(new)
        assert torch.equal(tensor + 0, new)
        tensor._h3_range.flush()
        tensor._h3_range.drop()
        return True
    except H3Error:
        return False


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("kind", ["READ", "WRITE", "IOCTL"])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "for_ever"])
def test_nth_failure(delivery: str, kind: str, forever: bool) -> None:
    pager = Pager(96 * KIB, delivery)
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(20_000, generator=generator)
    other = tiered_copy(source, pager, 8 * KIB)
    old = torch.randn(40_000, generator=generator)
    tensor = tiered_copy(old, pager, 8 * KIB)
    failures, n = 0, 1
    while True:
        new = torch.randn(40_000, generator=generator)
        lib.h3_fault_arm(getattr(lib, f"H3_FAULT_{kind}"), n, -1 if forever else 1, ERRNO[kind])
        done = attempt(tensor, other, old, new, source)
        fired = lib.h3_fault_fired(getattr(lib, f"H3_FAULT_{kind}"))
        lib.h3_fault_arm(getattr(lib, f"H3_FAULT_{kind}"), 0, 0, 0)
        assert_old_or_new(tensor, old, new)
        assert torch.equal(other.clone(), source)
        tensor.copy_(new)
        assert torch.equal(tensor.clone(), new)
        old = new
        failures += not done
        if not fired:
            break
        n += 1 + n // 4  # every early call, then ever larger steps: a round has a few hundred
    # One failed write back shows nowhere: another block leaves instead.
    assert failures > 3 or (kind == "WRITE" and not forever)
    stats = pager.stats()
    assert stats["pinned_bytes"] == 0
    assert stats["peak_resident_bytes"] <= 96 * KIB


def test_a_move_that_the_kernel_does_and_denies_is_found_done() -> None:
    """Linux 6.18 under memory compaction: pages are moved, the ioctl says EAGAIN with no progress, then EEXIST."""
    pager = Pager(96 * KIB, "signal")
    old = torch.randn(40_000)
    tensor = tiered_copy(old, pager, 8 * KIB)
    for n in range(1, 17):  # a round has 16 ioctls at least: 20 blocks, of which 12 may be resident
        lib.h3_fault_arm(lib.H3_FAULT_IOCTL, n, 1, errno.EAGAIN)
        tensor.add_(1)
        fired = lib.h3_fault_fired(lib.H3_FAULT_IOCTL)
        lib.h3_fault_arm(lib.H3_FAULT_IOCTL, 0, 0, 0)
        old = old + 1
        assert torch.equal(tensor.clone(), old)
        if not fired:
            break
    assert n > 10
    assert pager.stats()["errors"] == 0


COMPACTION = Path("/proc/sys/vm/compact_memory")


@pytest.mark.skipif(not os.access(COMPACTION, os.W_OK), reason="compacting memory on demand needs root")
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_memory_compaction_under_eviction(delivery: str) -> None:
    pager = Pager(4 * 1024 * KIB, delivery)
    values = torch.arange(4 * 1024 * 1024, dtype=torch.int32)  # 16 MiB, four times the budget
    tensor = tiered_copy(values, pager, 96 * KIB)
    ended = threading.Event()

    def compact() -> None:
        while not ended.wait(0.03):
            COMPACTION.write_text("1")

    compactor = threading.Thread(target=compact)
    compactor.start()
    try:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            tensor.add_(1)
            values.add_(1)
            assert torch.equal(tensor + 0, values)
    finally:
        ended.set()
        compactor.join()


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_creation_failures_leave_nothing_behind(delivery: str) -> None:
    for n in range(1, 60):
        lib.h3_fault_arm(lib.H3_FAULT_ALLOC, n, 1, ERRNO["ALLOC"])
        try:
            tensor = tiered_copy(torch.arange(10_000), Pager(96 * KIB, delivery), 8 * KIB)
            assert torch.equal(tensor.clone(), torch.arange(10_000))
        except H3Error as error:
            assert "refused" in str(error) or "memory" in str(error).lower()
        fired = lib.h3_fault_fired(lib.H3_FAULT_ALLOC)
        lib.h3_fault_arm(lib.H3_FAULT_ALLOC, 0, 0, 0)
        if not fired:
            return
    raise AssertionError("60 allocations and no end")


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_full_disk_keeps_every_byte_and_heals(delivery: str) -> None:
    pager = Pager(64 * KIB, delivery)
    values = torch.randn(64 * KIB)
    tensor = tiered_copy(values, pager, 8 * KIB)
    lib.h3_fault_arm(lib.H3_FAULT_WRITE, 1, -1, ERRNO["WRITE"])
    # Blocks that changed can't leave; when memory is full of them the write stops with one error.
    with pytest.raises(StorageFullError, match="block"):
        tensor.add_(1)
    lib.h3_fault_arm(lib.H3_FAULT_WRITE, 0, 0, 0)
    assert_old_or_new(tensor, values, values + 1)


def test_error_names_the_tensor_and_the_block() -> None:
    pager = Pager(64 * KIB)
    tensor = tiered_copy(torch.randn(64 * KIB), pager, 8 * KIB)
    lib.h3_fault_arm(lib.H3_FAULT_READ, 3, -1, 5)
    with pytest.raises(ArchiveError, match=r"scratch, block \d+ \(bytes from \d+\): .*Input/output error"):
        tensor.sum()
    lib.h3_fault_arm(lib.H3_FAULT_READ, 0, 0, 0)
    assert tensor.sum().isfinite()
