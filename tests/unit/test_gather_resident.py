"""Gathers of rows that are resident: the plain tensor's result bit for bit, however many threads copy, whatever is
evicted meanwhile, on memory that costs little to touch first."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from h3store.pager import Pager
from tests.tiered import DELIVERIES, bits, resident_copy, run_python, tiered_copy

KIB = 1024
ROWS, COLS = 1500, 64
LARGE = torch.randint(0, ROWS, (6000,), generator=torch.Generator().manual_seed(4))
Form = Callable[[torch.Tensor], torch.Tensor]
FORMS: dict[str, Form] = {
    "index_select": lambda t: t.index_select(0, LARGE),
    "embedding": lambda t: functional.embedding(LARGE.reshape(60, 100), t),
    "brackets": lambda t: t[LARGE - t.shape[0]],
    "slice_of_rows": lambda t: t[100:1400].index_select(0, LARGE % 1300),
    "part_of_rows": lambda t: t[:, 3:-5][LARGE],
    "every_other_row": lambda t: t[::2][LARGE // 2],
    "one_row_many_times": lambda t: t[LARGE[:1].expand(6000)],
    "columns": lambda t: t.index_select(1, LARGE[:90] % t.shape[1]),
    "take": lambda t: t.take(LARGE),
    "few": lambda t: t.index_select(0, LARGE[:3]),
}


@pytest.fixture(scope="module")
def value() -> torch.Tensor:
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize(
    ("columns", "dtype"), [(512, torch.float32), (1001, torch.bfloat16), (1333, torch.uint8)], ids=str
)
def test_resident_rows_are_copied_by_several_threads(delivery: str, columns: int, dtype: torch.dtype) -> None:
    """6,000 rows of 1 to 2 KiB: results on huge pages, and pieces for several threads."""
    value = (torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    tensor = resident_copy(value, delivery)
    before = tensor._h3_range.pager.stats()
    for threads in (1, 2, 5):
        threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for name, form in FORMS.items():
                got, want = form(tensor), form(value)
                assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), name
                assert type(got) is torch.Tensor, name
                assert torch.equal(bits(got), bits(want)), name
        finally:
            torch.set_num_threads(threads_before)
    after = tensor._h3_range.pager.stats()
    assert [after[name] for name in ("faults", "bytes_decoded", "evictions")] == [
        before[name] for name in ("faults", "bytes_decoded", "evictions")
    ]


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_resident_rows_that_are_evicted_meanwhile(delivery: str) -> None:
    value = torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(1))
    tensor = resident_copy(value, delivery)
    want, wrong, ended = value[LARGE], [], threading.Event()

    def evict() -> None:
        while not ended.is_set():
            tensor._h3_range.drop()
            tensor._h3_range.prefetch()

    def read() -> None:
        for _ in range(40):
            if not torch.equal(tensor[LARGE], want):
                wrong.append("rows")
        ended.set()

    threads = [threading.Thread(target=one) for one in (evict, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_results_come_on_huge_pages() -> None:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists():
        pytest.skip("this kernel has no huge pages to ask for")
    tensor = resident_copy(torch.randn(ROWS, 512))
    for result in (tensor[LARGE], tensor.index_select(0, LARGE), functional.embedding(LARGE, tensor)):
        middle, flags = result.data_ptr() + result.nbytes // 2, ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if found:
                inside = int(found[1], 16) <= middle < int(found[2], 16)
            elif inside and line.startswith("VmFlags:"):
                flags = line
        assert " hg" in flags
        assert result.untyped_storage().nbytes() == result.nbytes
        assert result.resize_(7000, 512).shape == (7000, 512)  # its storage is an ordinary one


def test_forks_between_resident_gathers() -> None:
    done = run_python("""
        import os, torch
        from h3store.pager import Pager
        from tests.tiered import tiered_copy
        value = torch.arange(2_000_000, dtype=torch.int32).reshape(2000, 1000)
        tensor = tiered_copy(value, Pager(32 << 20), 16384)
        index = torch.randint(0, 2000, (3000,))
        want = value[index]
        assert torch.equal(tensor[index], want)
        for turn in range(5):
            pid = os.fork()
            if not pid:
                same = all((tensor[index].numpy() == want.numpy()).all() for _ in range(3))
                os._exit(0 if same else 1)
            assert torch.equal(tensor[index], want)
            assert os.waitpid(pid, 0)[1] == 0, turn
        print("same")
    """)
    assert done.stdout.strip() == "same", done.stderr


def test_default_device_and_modes_change_no_gather(value: torch.Tensor) -> None:
    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Counts.seen += 1
            return func(*args, **(kwargs or {}))

    for tensor in (tiered_copy(value, Pager(32 * KIB), 4 * KIB), resident_copy(value)):
        for form in (*FORMS.values(), lambda t: t[LARGE, LARGE % COLS], lambda t: t.gather(0, LARGE[:, None])):
            with torch.device("meta"):
                got = form(tensor)
            assert torch.equal(got, form(value))
        Counts.seen = 0
        with Counts():
            got = tensor.index_select(0, LARGE)
        assert Counts.seen > 0
        assert torch.equal(got, value.index_select(0, LARGE))
        with torch.inference_mode():
            assert torch.equal(tensor[LARGE], value[LARGE])


def test_an_index_that_changes_after_it_was_checked_reads_nothing_else(value: torch.Tensor) -> None:
    """Another thread writes wild numbers into the index: no row comes from outside the tensor."""
    tensor, wide = resident_copy(value), torch.randint(0, ROWS, (60_000,))
    ended = threading.Event()

    def spoil() -> None:
        good = wide.clone()
        while not ended.is_set():
            wide[50_000] = 2**60
            wide.copy_(good)

    thread = threading.Thread(target=spoil)
    thread.start()
    try:
        for _ in range(200):
            try:
                assert tensor.index_select(0, wide).shape == (60_000, COLS)
            except (IndexError, RuntimeError) as error:
                assert "out of range" in str(error)
    finally:
        ended.set()
        thread.join()
