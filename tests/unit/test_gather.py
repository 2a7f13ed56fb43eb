"""Gathers of rows that are not resident: the plain tensor's result bit for bit, each block read once, the plain
operation's errors, whatever the form, the delivery and the budget."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import h3store
from h3store._ffi import lib
from h3store.errors import ArchiveError, CorruptBlockError, H3Error
from h3store.pager import Pager
from h3store.tensor import TieredTensor
from tests.tiered import DELIVERIES, bits, resident_copy, run_python, tiered_copy

KIB = 1024
ROWS, COLS = 1500, 64
INDEX = torch.randint(0, ROWS, (350,), generator=torch.Generator().manual_seed(2))
MASK = torch.rand(ROWS, generator=torch.Generator().manual_seed(3)) < 0.1
PAIR = (INDEX[:200] - ROWS, torch.arange(200) % COLS)
Form = Callable[[torch.Tensor], torch.Tensor]
FORMS: dict[str, Form] = {
    "index_select": lambda t: t.index_select(0, INDEX),
    "index_select_function": lambda t: torch.index_select(t, dim=-2, index=INDEX.to(torch.int32)),
    "index_select_columns": lambda t: t.index_select(1, INDEX[:5] % COLS),
    "index_select_scalar": lambda t: t.index_select(0, INDEX[0]),
    "embedding": lambda t: functional.embedding(INDEX.reshape(7, 50), t),
    "embedding_padding": lambda t: functional.embedding(INDEX, t, padding_idx=-1),
    "embedding_int32": lambda t: functional.embedding(INDEX.int(), t),
    "brackets": lambda t: t[INDEX],
    "brackets_negative": lambda t: t[INDEX - ROWS],
    "brackets_2d": lambda t: t[INDEX.reshape(35, 10)],
    "brackets_list": lambda t: t[INDEX.tolist()],
    "brackets_numpy": lambda t: t[INDEX.numpy()],
    "brackets_columns": lambda t: t[:, INDEX[:9] % COLS],
    "mask": lambda t: t[MASK],
    "mask_list": lambda t: t[MASK.tolist()],
    "mask_elements": lambda t: t[MASK[:, None] & (torch.arange(COLS) % 3 == 0)],
    "pair": lambda t: t[PAIR],
    "pair_broadcast": lambda t: t[INDEX[:50, None], INDEX[:6] % COLS],
    "gather": lambda t: t.gather(0, INDEX[:, None].expand(-1, COLS)[:, :7]),
    "gather_columns": lambda t: torch.gather(t, -1, (torch.arange(ROWS)[:, None] * 7 + torch.arange(3)) % COLS),
    "take": lambda t: t.take(INDEX * COLS + 5),
    "take_negative": lambda t: torch.take(t, -INDEX.reshape(7, 50) - 1),
    "slice_of_rows": lambda t: t[100:1400].index_select(0, INDEX % 1300),
    "part_of_rows": lambda t: t[:, 3:50][INDEX],
    "every_other_row": lambda t: t[::2][INDEX // 2],
    "transposed": lambda t: t.T[INDEX[:3] % COLS],
    "no_rows": lambda t: t[INDEX[:0]],
    "one_row_many_times": lambda t: t[INDEX[:1].expand(500)],
    "all_rows_backwards": lambda t: t[torch.arange(ROWS - 1, -1, -1)],
    "take_along": lambda t: torch.take_along_dim(t, INDEX[:, None], 0),
    "slice_and_index": lambda t: t[5:400, INDEX[:3] % COLS],
}


def cold(value: torch.Tensor, budget_bytes: int, delivery: str = "signal", block_bytes: int = 4 * KIB) -> TieredTensor:
    tensor = tiered_copy(value, Pager(budget_bytes, delivery), block_bytes)
    tensor._h3_range.drop()
    return tensor


@pytest.fixture(scope="module")
def value() -> torch.Tensor:
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1))  # 375 KiB


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("budget_bytes", [32 * KIB, 128 * KIB, 1024 * KIB])
def test_every_form_is_bit_identical(value: torch.Tensor, delivery: str, budget_bytes: int) -> None:
    tensor = cold(value, budget_bytes, delivery)
    for name, form in FORMS.items():
        want = form(value)
        for _ in range(2):  # cold, then with whatever stayed
            got = form(tensor)
            assert got.dtype == want.dtype, name
            assert got.shape == want.shape, name
            assert type(got) is torch.Tensor, name
            assert torch.equal(bits(got), bits(want)), name
    assert tensor._h3_range.pager.stats()["peak_resident_bytes"] <= budget_bytes
    assert tensor._h3_range.pager.stats()["errors"] == 0


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int16, torch.int64, torch.bool,
              torch.complex64, torch.float8_e4m3fn]
)  # fmt: skip
def test_dtypes(value: torch.Tensor, dtype: torch.dtype) -> None:
    source = (value * 9).to(dtype)
    tensor = cold(source, 32 * KIB)
    assert torch.equal(bits(tensor[INDEX]), bits(source[INDEX]))
    assert torch.equal(bits(tensor.index_select(0, INDEX)), bits(source.index_select(0, INDEX)))


def test_rows_longer_than_blocks_and_rows_across_blocks() -> None:
    for shape in ((60, 9000), (500, 1001), (7, 70_000)):
        source = torch.arange(shape[0] * shape[1], dtype=torch.int32).reshape(shape)
        tensor = cold(source, 128 * KIB, block_bytes=8 * KIB)
        faults = tensor._h3_range.pager.stats()["faults"]
        index = torch.randint(0, shape[0], (40,))
        assert torch.equal(tensor[index], source[index])
        assert torch.equal(tensor[:, 1:][index], source[:, 1:][index])
        assert tensor._h3_range.pager.stats()["faults"] == faults


def test_each_block_is_read_once_whatever_the_budget(value: torch.Tensor, tmp_path: Path) -> None:
    with h3store.open(tmp_path / "a.h3", mode="w") as store:
        store.create("t", value.shape, value.dtype, chunk_bytes=4 * KIB)[:] = value
    for budget_bytes in (16 * KIB, 128 * KIB):
        tensor = h3store.load(tmp_path / "a.h3", ddr_bytes=budget_bytes)["t"]  # nothing of it was ever read ahead
        tensor.index_select(0, torch.randperm(ROWS))
        stats = tensor._h3_range.pager.stats()
        assert (stats["faults"], stats["evictions"]) == (0, 0)
        assert stats["bytes_decoded"] == value.nbytes


def test_what_is_resident_is_not_pushed_out(value: torch.Tensor) -> None:
    tensor = cold(value, 64 * KIB)
    tensor[:100].sum()
    for _ in range(3):
        tensor.index_select(0, torch.randperm(ROWS))
    faults = tensor._h3_range.pager.stats()["faults"]
    tensor[:100].sum()
    assert tensor._h3_range.pager.stats()["faults"] == faults


def test_a_table_that_fits_is_read_from_the_file_once(value: torch.Tensor) -> None:
    tensor = cold(value, 1024 * KIB)
    tensor.index_select(0, torch.arange(ROWS))
    before = tensor._h3_range.pager.stats()["bytes_read"]
    assert torch.equal(tensor.index_select(0, INDEX), value.index_select(0, INDEX))
    assert tensor._h3_range.pager.stats()["bytes_read"] == before


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t.index_select(0, torch.tensor([0, ROWS])),
        lambda t: t.index_select(0, torch.tensor([0, -1])),
        lambda t: t.index_select(5, torch.tensor([0])),
        lambda t: t[torch.tensor([0, ROWS])],
        lambda t: t[torch.tensor([0, -ROWS - 1])],
        lambda t: t[torch.tensor([0, 1]), torch.tensor([0, COLS])],
        lambda t: t[:, torch.tensor([0, COLS])],
        lambda t: t[MASK[:-1]],
        lambda t: t.take(torch.tensor([0, ROWS * COLS])),
        lambda t: t.gather(0, torch.full((1, COLS), ROWS)),
        lambda t: functional.embedding(torch.tensor([0, ROWS]), t),
        lambda t: functional.embedding(torch.tensor([0, 1]), t, padding_idx=ROWS),
        lambda t: functional.embedding(torch.tensor([0.5]), t),
        lambda t: t.index_select(0, torch.tensor([[1]])),
    ],
)
def test_errors_are_those_of_a_plain_tensor(value: torch.Tensor, form: Form) -> None:
    with pytest.raises(Exception) as plain:
        form(value)
    for tensor in (cold(value, 32 * KIB), resident_copy(value)):
        with pytest.raises(type(plain.value)) as tiered:
            form(tensor)
        assert str(tiered.value) == str(plain.value)


def test_embedding_with_gradient(value: torch.Tensor) -> None:
    plain = torch.nn.Parameter(value.clone())
    tensor = torch.nn.Parameter(cold(value, 64 * KIB))
    for weight in (plain, tensor):
        functional.embedding(INDEX, weight).pow(2).sum().backward()
    assert plain.grad is not None
    assert tensor.grad is not None
    assert torch.equal(plain.grad, tensor.grad)


def test_out_argument_and_changed_blocks(value: torch.Tensor) -> None:
    tensor = cold(value, 32 * KIB)
    out = torch.empty(len(INDEX), COLS)
    torch.index_select(tensor, 0, INDEX, out=out)
    assert torch.equal(out, value[INDEX])
    tensor[INDEX] = 7.0
    changed = value.clone()
    changed[INDEX] = 7.0
    assert torch.equal(tensor.index_select(0, torch.arange(ROWS)), changed)


def changed_by(form: Callable[[torch.Tensor], object], value: torch.Tensor) -> torch.Tensor:
    plain = value.clone()
    form(plain)
    return plain


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize(
    "form",
    [
        lambda t: t.__setitem__(INDEX, 3.0),
        lambda t: t.__setitem__(MASK, torch.arange(float(COLS))),
        lambda t: t.__setitem__(PAIR, -1.0),
        lambda t: t.index_put_((INDEX,), torch.ones(COLS), accumulate=True),
        lambda t: t.index_copy_(0, torch.arange(0, 900, 3), torch.ones(300, COLS)),
        lambda t: t.index_add_(0, INDEX, torch.ones(350, COLS)),
        lambda t: t.index_fill_(1, torch.tensor([3, 5]), 2.0),
    ],
)
def test_rows_are_changed(value: torch.Tensor, delivery: str, form: Callable[[torch.Tensor], object]) -> None:
    tensor = cold(value, 64 * KIB, delivery)
    form(tensor)
    want = changed_by(form, value)
    assert torch.equal(tensor.clone(), want)
    tensor._h3_range.drop()
    assert torch.equal(tensor + 0, want)


def test_clones_of_slices(value: torch.Tensor) -> None:
    tensor = cold(value, 64 * KIB)
    for part in (slice(None), slice(3, 1200), slice(7, 8), slice(40, 57), slice(1400, None)):
        for _ in range(2):
            assert torch.equal(tensor[part].clone(), value[part])
            assert torch.equal(tensor.view(-1)[part].clone(), value.view(-1)[part])
    assert torch.equal(tensor.t().clone(), value.t())
    assert tensor.t().clone().stride() == value.t().clone().stride()
    assert torch.equal(tensor[::3].clone(memory_format=torch.contiguous_format), value[::3])
    assert tensor._h3_range.pager.stats()["peak_resident_bytes"] <= 64 * KIB


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_scans_are_read_ahead(delivery: str) -> None:
    source = torch.arange(2_000_000, dtype=torch.int32)  # 7.6 MiB
    tensor = cold(source, 1024 * KIB, delivery, block_bytes=8 * KIB)
    before = tensor._h3_range.pager.stats()
    for _ in range(2):
        assert torch.equal(tensor + 0, source)
    after = tensor._h3_range.pager.stats()
    assert after["peak_resident_bytes"] <= 1024 * KIB
    # Nothing is read much more than once a pass, and a part of it by the pool: how much depends on who is faster.
    assert after["bytes_decoded"] - before["bytes_decoded"] <= 2.3 * source.nbytes
    if delivery != "dispatch":
        assert after["prefetches"] - before["prefetches"] > (after["fills"] - before["fills"]) // 10


def test_a_block_that_rows_only_glance_at_comes_in_when_it_is_wanted_again(tmp_path: Path) -> None:
    source = torch.randint(0, 1 << 30, (1024, 1024), dtype=torch.int32)  # rows of 4 KiB, 16 in a block
    h3store.save({"t": source}, tmp_path / "t.h3")
    tensor = h3store.load(tmp_path / "t.h3", ddr_bytes="8MiB")["t"]
    few, seen = torch.arange(0, 1024, 16), []
    for _ in range(3):
        assert torch.equal(tensor.index_select(0, few), source[few])
        stats = tensor._h3_range.pager.stats()
        seen.append((stats["fills"], stats["bytes_decoded"]))
    assert seen == [(0, 1 << 22), (64, 2 << 22), (64, 2 << 22)]
    other = h3store.load(tmp_path / "t.h3", ddr_bytes="8MiB")["t"]
    assert torch.equal(other.index_select(0, torch.arange(1024)), source)  # all of each block: it stays at once
    assert other._h3_range.pager.stats()["fills"] == 64


def test_a_scan_across_a_damaged_block_raises(tmp_path: Path) -> None:
    value = torch.randn(ROWS, 512)
    damaged(tmp_path / "t.h3", value)
    for _ in range(5):
        tensor = h3store.load(tmp_path / "t.h3", ddr_bytes="2MiB")["t"]
        with pytest.raises(CorruptBlockError, match="tensor 't', block"):
            tensor.sum()
        with pytest.raises(CorruptBlockError, match="tensor 't', block"):
            tensor.clone()


def test_growth_and_end_while_the_pool_reads_ahead(tmp_path: Path) -> None:
    for turn in range(15):
        store = h3store.open(tmp_path / "t.h3", mode="w", ddr_bytes="2MiB")
        tensor = store.create("t", (64, 4096), torch.float32, chunk_bytes=4096)
        tensor.copy_(torch.arange(64.0)[:, None].expand(64, 4096))
        tensor._h3_range.drop()
        tensor[:20].sum()
        longer = store.append("t", torch.full((3, 4096), float(turn)))
        assert torch.equal(longer[:, 7], torch.cat([torch.arange(64.0), torch.full((3,), float(turn))]))
        longer._h3_range.drop()
        longer[:30].sum()
        store.close(commit=False)
        del tensor, longer, store


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_threads_gather_and_write_at_once(value: torch.Tensor, delivery: str) -> None:
    """Readers must see each row as it was before or after the writer's single row-wide change."""
    tensor = cold(value, 64 * KIB, delivery)
    wrong: list[str] = []
    ended = threading.Event()

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(25):
            index = torch.randint(0, 1000, (200,), generator=generator)
            if not torch.equal(tensor.index_select(0, index), value.index_select(0, index)):
                wrong.append(f"seed {seed}")

    def write() -> None:
        step = 0.0
        while not ended.is_set():
            step += 1
            tensor[1300:1400] = step
            if not bool((tensor[torch.arange(1300, 1400)] == step).all()):
                wrong.append(f"step {step}")

    threads = [threading.Thread(target=read, args=(seed,)) for seed in (1, 2)]
    writer = threading.Thread(target=write)
    for thread in (*threads, writer):
        thread.start()
    for thread in threads:
        thread.join(60)
    ended.set()
    writer.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in (*threads, writer))


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for_ever"])
@pytest.mark.parametrize("kind", ["READ", "IOCTL", "ALLOC"])
def test_nth_failure_raises_or_gives_the_right_rows(value: torch.Tensor, kind: str, forever: bool) -> None:
    tensor = cold(value, 1024 * KIB, block_bytes=16 * KIB)
    want = value[INDEX]
    number = getattr(lib, f"H3_FAULT_{kind}")
    n, raised = 1, 0
    while True:
        tensor._h3_range.drop()
        lib.h3_fault_arm(number, n, -1 if forever else 1, 5)
        try:
            assert torch.equal(tensor.index_select(0, INDEX), want)
        except H3Error:
            raised += 1
        fired = lib.h3_fault_fired(number)
        lib.h3_fault_arm(number, 0, 0, 0)
        assert torch.equal(tensor.index_select(0, INDEX), want)
        if not fired:
            break
        n += 1 + n // 3
    # What fails once is tried again, block by block or without a place in the budget.
    assert raised if forever and kind == "READ" else n > 1


def damaged(path: Path, value: torch.Tensor) -> None:
    h3store.save({"t": value}, path)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)


def test_a_damaged_block_raises_and_fails_no_other(tmp_path: Path) -> None:
    value = torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(1))  # 47 blocks of 64 KiB
    damaged(tmp_path / "t.h3", value)
    tensor = h3store.load(tmp_path / "t.h3", ddr_bytes="1MiB")["t"]
    for _ in range(2):
        with pytest.raises(CorruptBlockError, match="tensor 't', block") as caught:
            tensor.index_select(0, torch.arange(ROWS))
    found = re.search(r"block (\d+)", str(caught.value))
    assert found
    good = torch.arange(ROWS)
    good = good[good // 32 != int(found[1])]
    assert torch.equal(tensor.index_select(0, good), value[good])


def test_a_file_cut_short_raises(tmp_path: Path, value: torch.Tensor) -> None:
    path = tmp_path / "t.h3"
    h3store.save({"t": value}, path)
    tensor = h3store.load(path, ddr_bytes="1MiB")["t"]
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises((ArchiveError, CorruptBlockError, H3Error)):
        tensor.index_select(0, torch.arange(ROWS))


def test_forks_while_the_pool_works() -> None:
    done = run_python("""
        import os, threading, torch
        from h3store.pager import Pager
        from tests.tiered import tiered_copy
        value = torch.arange(2_000_000, dtype=torch.int32).reshape(2000, 1000)
        tensor = tiered_copy(value, Pager(1 << 20), 16384)
        stop = threading.Event()
        def gather():
            while not stop.is_set():
                index = torch.randint(0, 2000, (500,))
                assert torch.equal(tensor[index], value[index])
        threads = [threading.Thread(target=gather) for _ in range(2)]
        [thread.start() for thread in threads]
        for turn in range(12):
            pid = os.fork()
            if not pid:
                torch.set_num_threads(1)
                index = torch.randint(0, 2000, (800,))
                os._exit(0 if torch.equal(tensor[index], value[index]) else 1)
            assert os.waitpid(pid, 0)[1] == 0, turn
        stop.set()
        [thread.join() for thread in threads]
        print("same")
    """)
    assert done.stdout.strip() == "same", done.stderr


def cached_bytes(path: Path) -> int:
    """Bytes of a file in the page cache."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    return sum(byte & 1 for byte in found) * mmap.PAGESIZE


def test_reads_leave_the_page_cache_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.h3"
    value = torch.randn(4096, 1024)
    h3store.save({"t": value}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path):
        pytest.skip("this file system keeps its files in memory")
    tensor = h3store.load(path, ddr_bytes="2MiB")["t"]
    assert torch.equal(tensor + 0, value)
    assert torch.equal(tensor[torch.arange(0, 4096, 3)], value[::3])
    assert cached_bytes(path) < path.stat().st_size // 20


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_dimensions_of_size_one_with_any_stride(delivery: str) -> None:
    """torch calls them contiguous; their stride says nothing of where rows lie."""
    values = torch.arange(6000, dtype=torch.int32)
    tiered = tiered_copy(values, Pager(64 * 1024, delivery), 4096)
    tiered._h3_range.drop()
    for size, stride in [((40, 1), (1, 17)), ((40, 1, 5), (5, 77, 1)), ((1, 40), (3, 1)), ((40, 1, 1), (1, 9, 13))]:
        plain, odd = values.as_strided(size, stride), tiered.as_strided(size, stride)
        assert odd.is_contiguous()
        for use in (
            lambda x: x.gather(0, torch.zeros(x.shape, dtype=torch.int64) + x.shape[0] - 1),
            lambda x: x.take(torch.arange(x.numel())),
            lambda x: x.index_select(1, torch.tensor([0, x.shape[1] - 1])),
            lambda x: x[torch.tensor([0, x.shape[0] - 1]), torch.tensor([0, x.shape[1] - 1])],
            lambda x: x[:, torch.tensor([0, -1])],
            lambda x: x[torch.arange(x.numel()).reshape(x.shape) % 7 == 0],
            lambda x: x[torch.tensor([x.shape[0] - 1, 0])],
        ):
            tiered._h3_range.drop()
            assert torch.equal(use(odd), use(plain))


def test_transforms_and_sparse_operands_take_the_plain_operation(tmp_path: Path) -> None:
    values = torch.randn(60_000, 64)
    h3store.save({"x": values}, tmp_path / "a.h3")
    table = h3store.load(tmp_path / "a.h3", ddr_bytes="1MiB")["x"]
    index = torch.tensor([5, 59_999])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(table, torch.ones(60_000, 64))
        for use in (lambda x: x[index], lambda x: x.index_select(0, index), lambda x: x.clone()):
            table._h3_range.drop()
            tangent = torch.autograd.forward_ad.unpack_dual(use(dual)).tangent
            assert tangent is not None and bool((tangent == 1).all())
    for use in (
        lambda x: torch.vmap(lambda k: x[k])(torch.tensor([[1, 2]])),
        lambda x: torch.vmap(lambda w: functional.linear(w, x))(torch.ones(2, 3, 64)),
        lambda x: torch.func.grad(lambda w: functional.linear(w, x).sum())(torch.ones(3, 64)),
        lambda x: torch.eye(100).to_sparse() @ x[:100],
    ):
        table._h3_range.drop()
        torch.testing.assert_close(use(table), use(values))
