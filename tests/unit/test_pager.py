"""One suite for every form of fault delivery: the budget, the bytes, holds, saving, threads, fork."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from h3store.errors import BudgetError, NativeError, UsageError
from h3store.pager import Pager
from tests.tiered import DELIVERIES, scratch_range

MiB = 1024 * 1024


@pytest.fixture(params=DELIVERIES)
def pager(request: pytest.FixtureRequest) -> Pager:
    return Pager(1 * MiB, request.param)


def bytes_of(tiered) -> np.ndarray:
    return np.frombuffer(tiered.buffer(), np.uint8)


def random_bytes(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def test_reads_back_what_was_written_through_eviction(pager: Pager) -> None:
    tiered = scratch_range(pager, 8 * MiB + 12345)
    data = random_bytes(8 * MiB + 12345)
    view = bytes_of(tiered)
    view[:] = data
    assert np.array_equal(view, data)
    assert np.array_equal(view[::-1], data[::-1])
    stats = pager.stats()
    assert stats["evictions"] > 100
    assert stats["write_backs"] >= 8 * 16
    assert stats["peak_resident_bytes"] <= 1 * MiB


def test_new_range_is_zero_and_clean_blocks_are_not_written(pager: Pager) -> None:
    tiered = scratch_range(pager, 4 * MiB)
    assert not bytes_of(tiered).any()
    assert not bytes_of(tiered).any()
    stats = pager.stats()
    assert stats["write_backs"] == 0
    assert stats["bytes_written"] == 0


@pytest.mark.parametrize("block_bytes", [4096, 12288, 65536, 262144])
def test_block_sizes_and_tails(pager: Pager, block_bytes: int) -> None:
    for nbytes in (1, 4095, 4097, block_bytes, block_bytes + 1, 5 * block_bytes - 7):
        tiered = scratch_range(pager, nbytes, block_bytes=block_bytes)
        data = random_bytes(nbytes, nbytes)
        bytes_of(tiered)[:] = data
        tiered.drop()
        assert tiered.resident_bytes == 0
        assert np.array_equal(bytes_of(tiered), data)


def test_many_ranges_share_one_budget(pager: Pager) -> None:
    ranges = [scratch_range(pager, 300_000 + 5000 * i, block_bytes=4096 * (1 + i % 5)) for i in range(12)]
    datas = [random_bytes(tiered.nbytes, i) for i, tiered in enumerate(ranges)]
    for tiered, data in zip(ranges, datas, strict=True):
        bytes_of(tiered)[:] = data
    for tiered, data in zip(ranges, datas, strict=True):
        assert np.array_equal(bytes_of(tiered), data)
    assert pager.stats()["peak_resident_bytes"] <= 1 * MiB
    assert sum(tiered.resident_bytes for tiered in ranges) <= 1 * MiB


def test_a_scan_displaces_a_tenth_of_what_is_in_use() -> None:
    """Hot blocks take 5/8 of the budget; a scan of 8 x the budget passes by, twice."""
    pager = Pager(8 * MiB)
    hot = scratch_range(pager, 16 * MiB)
    big = scratch_range(pager, 64 * MiB)
    wanted = np.random.default_rng(0).permutation(256)[:80] * 65536
    hot_bytes, big_bytes = bytes_of(hot), bytes_of(big)
    hot_bytes[wanted].sum()
    for _ in range(2):
        big_bytes[::4096].sum()
        before = pager.stats()["fills"]
        hot_bytes[wanted].sum()
        assert pager.stats()["fills"] - before <= 16


def test_blocks_that_come_back_stay() -> None:
    """Half of the touches go to 80 blocks that fit, half to a walk over 20 x as many: the 80 are mostly hits."""
    pager = Pager(8 * MiB)
    view = bytes_of(scratch_range(pager, 128 * MiB))
    rng = np.random.default_rng(0)
    touched = [int(rng.integers(0, 80)) if i % 2 else 80 + i % 1900 for i in range(8000)]
    for block in touched:
        view[block * 65536]
    # Compulsory misses: the walk's 4,000. First in, first out: 5,955.
    assert pager.stats()["fills"] < 4000 + 700


def test_cyclic_scan_keeps_a_fixed_part(pager: Pager) -> None:
    cyclic = scratch_range(pager, 4 * MiB, cyclic=True)
    view = bytes_of(cyclic)
    view[:] = random_bytes(4 * MiB)
    for _ in range(2):
        view.sum()
    before = pager.stats()["fills"]
    view.sum()
    filled = pager.stats()["fills"] - before
    # A quarter fits: with first-in-first-out eviction a scan would fill all 64 blocks, every time.
    assert filled <= 64 - 6


def test_prefetch_then_no_fault(pager: Pager) -> None:
    tiered = scratch_range(pager, 4 * MiB)
    data = random_bytes(4 * MiB)
    bytes_of(tiered)[:] = data
    tiered.drop()
    assert tiered.prefetch(1 * MiB, 512 * 1024) == 512 * 1024
    faults = pager.stats()["faults"]
    assert np.array_equal(bytes_of(tiered)[1 * MiB : 1 * MiB + 512 * 1024], data[1 * MiB : 1 * MiB + 512 * 1024])
    assert pager.stats()["faults"] == faults
    assert tiered.prefetch() <= 1 * MiB


def test_pinned_blocks_stay(pager: Pager) -> None:
    tiered = scratch_range(pager, 4 * MiB)
    bytes_of(tiered)[:] = random_bytes(4 * MiB)
    tiered.pin(0, 256 * 1024)
    bytes_of(tiered).sum()
    faults = pager.stats()["faults"]
    bytes_of(tiered)[: 256 * 1024].sum()
    assert pager.stats()["faults"] == faults
    # System calls may be given pinned memory.
    assert os.write(os.open(os.devnull, os.O_WRONLY), bytes_of(tiered)[: 256 * 1024].data) == 256 * 1024
    tiered.unpin(0, 256 * 1024)
    assert pager.stats()["pinned_bytes"] == 0


def test_pin_beyond_the_budget_is_one_clear_error_and_holds_nothing(pager: Pager) -> None:
    tiered = scratch_range(pager, 4 * MiB)
    with pytest.raises(BudgetError, match=r"pinning 2.0 MiB does not fit the ddr budget of 1.0 MiB"):
        tiered.pin(0, 2 * MiB)
    assert pager.stats()["pinned_bytes"] == 0
    tiered.pin(0, 64 * 1024)
    tiered.unpin(0, 64 * 1024)


def test_budget_below_two_blocks() -> None:
    with pytest.raises(BudgetError, match=r"two blocks of 64.0 KiB do not fit the ddr budget of 64.0 KiB"):
        scratch_range(Pager(64 * 1024), MiB)
    with pytest.raises(BudgetError, match="below one page"):
        Pager(100)
    with pytest.raises(UsageError, match="'telepathy' is not known"):
        Pager(MiB, "telepathy")


def test_bad_block_sizes_are_refused(pager: Pager) -> None:
    for block_bytes in (100, 4097, 0):
        with pytest.raises(NativeError):
            scratch_range(pager, MiB, block_bytes=block_bytes)


def test_flush_returns_entries_and_saves_once(pager: Pager) -> None:
    tiered = scratch_range(pager, 512 * 1024)
    bytes_of(tiered)[:100_000] = random_bytes(100_000)
    table = tiered.flush()
    assert len(table) == 8
    assert (table["stored_bytes"][:2] > 0).all()
    assert (table["filter"][2:] == 1).all()  # zero blocks take no bytes
    written = pager.stats()["write_backs"]
    assert np.array_equal(tiered.flush(), table)
    assert pager.stats()["write_backs"] == written


def test_resize_keeps_bytes_and_zeroes_what_is_new(pager: Pager) -> None:
    tiered = scratch_range(pager, 100_000, capacity_bytes=4 * MiB)
    data = random_bytes(100_000)
    bytes_of(tiered)[:] = data
    for nbytes in (100_001, 131_072, 700_000, 3 * MiB):
        tiered.resize(nbytes)
        view = bytes_of(tiered)
        assert np.array_equal(view[:100_000], data)
        assert not view[100_000:].any()
    tiered.resize(50_000)
    tiered.resize(200_000)
    view = bytes_of(tiered)
    assert np.array_equal(view[:50_000], data[:50_000])
    assert not view[50_000:].any()
    with pytest.raises(NativeError):
        tiered.resize(2**40)


def test_threads_write_and_read_under_eviction(pager: Pager) -> None:
    tiered = scratch_range(pager, 6 * MiB)
    view = bytes_of(tiered).view(np.int64)
    n_threads, errors = 4, []

    def work(k: int) -> None:
        rng = np.random.default_rng(k)
        mine = np.arange(k, len(view), n_threads)  # cells of one block belong to all threads
        shadow = np.zeros(len(mine), np.int64)
        for _ in range(20):
            picked = rng.integers(0, len(mine), 400)
            values = rng.integers(0, 2**60, 400)
            view[mine[picked]] = values
            for i, value in zip(picked, values, strict=True):
                shadow[i] = value
            check = rng.integers(0, len(mine), 400)
            if not np.array_equal(view[mine[check]], shadow[check]):
                errors.append(k)
                return

    threads = [threading.Thread(target=work, args=(k,)) for k in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pager.stats()["evictions"] > 500
    assert pager.stats()["peak_resident_bytes"] <= 1 * MiB


def test_fork_child_reads_and_does_not_disturb_the_parent(pager: Pager) -> None:
    tiered = scratch_range(pager, 3 * MiB)
    data = random_bytes(3 * MiB)
    bytes_of(tiered)[:] = data
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            ok = np.array_equal(bytes_of(tiered), data)
            bytes_of(tiered)[:1000] = 7  # stays in the child
            os._exit(0 if ok else 1)
        bytes_of(tiered)[-5000:].sum()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert np.array_equal(bytes_of(tiered), data)


def test_ranges_go_with_their_last_reference(pager: Pager) -> None:
    for _ in range(50):
        tiered = scratch_range(pager, MiB)
        bytes_of(tiered)[:] = 1
        del tiered
    tiered = scratch_range(pager, MiB)
    bytes_of(tiered)[:] = 2
    assert pager.stats()["resident_bytes"] <= MiB
