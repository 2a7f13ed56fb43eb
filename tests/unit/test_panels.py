"""Matrix products with operands beyond the budget: the bits of plain torch, each block read once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import h3store
from h3store.errors import CorruptBlockError
from h3store.tensor import TieredTensor, range_of

MiB = 1024**2
Product = Callable[[Tensor, Tensor], Tensor]


def tiered(tensor: Tensor, path: Path, ddr_bytes: int | str = "1MiB") -> TieredTensor:
    h3store.save({"t": tensor}, path / "t.h3")
    return h3store.load(path / "t.h3", ddr_bytes=ddr_bytes)["t"]


def fills(tensor: Tensor) -> int:
    found = range_of(tensor)
    assert found is not None
    return int(found.pager.stats()["fills"])


# By output: the weight's rows are columns of the result. By rows: the left operand's rows are the result's.
BY_OUTPUT: dict[str, Product] = {
    "linear": lambda x, w: functional.linear(x, w),
    "linear with bias": lambda x, w: functional.linear(x, w, torch.arange(w.shape[0], dtype=w.dtype)),
    "matmul": lambda x, w: x @ w.t(),
    "mm": lambda x, w: torch.mm(x, w.T),
    "addmm": lambda x, w: torch.addmm(torch.arange(w.shape[0], dtype=w.dtype), x, w.t()),
}
BY_ROWS: dict[str, Product] = {
    "left mm": lambda x, w: w.mm(x.t()),
    "left matmul": lambda x, w: torch.matmul(w, x.t().contiguous()),
    "mv": lambda x, w: w.mv(x[0]),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [*BY_OUTPUT, *BY_ROWS])
def test_the_bits_of_plain_torch_and_each_block_once(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    product = (BY_OUTPUT | BY_ROWS)[name]
    plain = torch.randn(4096 * 4 // dtype.itemsize + 8, 512).to(dtype)
    weight = tiered(plain, tmp_path)
    for rows in (1, 5, 64):
        x = torch.randn(rows, 512).to(dtype)
        before = fills(weight)
        result = product(x, weight)
        expected = product(x, plain)
        assert type(result) is Tensor
        if dtype == torch.float64:  # BLAS cuts its sums by the shape of the result
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(result, expected)
        assert fills(weight) - before <= 1.1 * plain.nbytes / 65536


@torch.no_grad()
def test_batches_of_matrices(tmp_path: Path) -> None:
    plain = torch.randn(256, 16, 256)
    left = tiered(plain, tmp_path)
    right = torch.randn(256, 256, 32)
    assert torch.equal(torch.bmm(left, right), torch.bmm(plain, right))
    assert torch.equal(left @ right, plain @ right)


def test_what_no_panel_serves_is_right_all_the_same(tmp_path: Path) -> None:
    plain = torch.randn(2048, 512)
    weight = tiered(plain, tmp_path, "2MiB")
    x = torch.randn(3, 2048)
    assert torch.equal(x @ weight, x @ plain)  # the sum runs across rows: cutting it would change the order
    y = torch.randn(2, 512, requires_grad=True)
    functional.linear(y, weight).sum().backward()
    expected, y.grad = y.grad, None
    functional.linear(y, plain).sum().backward()
    assert torch.equal(expected, y.grad)
    out = torch.empty(3, 2048)
    torch.matmul(torch.ones(3, 512), weight.t(), out=out)
    assert torch.equal(out, torch.ones(3, 512) @ plain.t())
    with pytest.raises(RuntimeError, match="shape"):
        functional.linear(torch.randn(2, 511), weight)
    with pytest.raises(RuntimeError, match="dtype"):
        functional.linear(torch.randn(2, 512).to(torch.bfloat16), weight)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(functional.linear(torch.ones(2, 512), weight), functional.linear(torch.ones(2, 512), plain))


@torch.no_grad()
def test_a_row_longer_than_a_panel(tmp_path: Path) -> None:
    plain = torch.randn(6, 400_000)
    x = torch.randn(2, 400_000)
    assert torch.equal(functional.linear(x, tiered(plain, tmp_path)), functional.linear(x, plain))


@torch.no_grad()
def test_a_damaged_block_is_an_error(tmp_path: Path) -> None:
    plain = torch.randn(2048, 512)
    h3store.save({"t": plain}, tmp_path / "t.h3")
    data = bytearray((tmp_path / "t.h3").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "t.h3").write_bytes(data)
    weight = h3store.load(tmp_path / "t.h3", ddr_bytes="1MiB")["t"]
    for _ in range(2):
        with pytest.raises(CorruptBlockError):
            functional.linear(torch.randn(2, 512), weight)
    found = range_of(weight)
    assert found is not None and found.pager.stats()["pinned_bytes"] == 0


@pytest.mark.slow
@torch.no_grad()
def test_an_operand_eight_times_the_budget_is_read_once(tmp_path: Path) -> None:
    plain = torch.randn(8192, 8192)
    weight = tiered(plain, tmp_path, plain.nbytes // 8)
    x = torch.randn(64, 8192)
    blocks = plain.nbytes // 65536
    assert torch.equal(functional.linear(x, weight), functional.linear(x, plain))
    with_panels = fills(weight)
    with torch._C.DisableTorchFunctionSubclass():
        functional.linear(x, weight)
    without = fills(weight) - with_panels
    print(f"reads of a block: {with_panels / blocks:.2f} in panels, {without / blocks:.2f} without")
    assert with_panels <= 1.1 * blocks < without
