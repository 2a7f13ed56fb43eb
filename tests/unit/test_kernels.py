"""The row-wise and linear kernels against float64, over storage types, odd shapes, threads and instruction sets."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from h3store._ffi import ffi, lib
from h3store.errors import NativeError
from h3store.models.layers import Embedding, Linear, Norm, Rows, silu_mul, use_torch_threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["auto", "generic"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    assert lib.h3_set_isa(request.param.encode()) == 0
    yield request.param
    lib.h3_set_isa(b"auto")


def rows_of(tensor: torch.Tensor) -> Rows:
    rows = Rows(*tensor.shape)
    rows.tensor.copy_(tensor)
    return rows


def test_unknown_instruction_sets_are_refused() -> None:
    assert lib.h3_set_isa(b"mmx") == lib.H3_E_UNSUPPORTED
    assert ffi.string(lib.h3_isa()) in (b"avx2", b"generic")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n,k", [(960, 576), (16, 16), (99, 32), (5, 37), (1, 1), (64, 24), (33, 100)])
@pytest.mark.parametrize("rows,exact", [(1, False), (2, False), (3, False), (4, False), (5, False), (1, True),
                                        (2, True), (7, True), (50, True)])
def test_linear(isa: str, dtype: torch.dtype, n: int, k: int, rows: int, exact: bool) -> None:
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n)
    x, before = torch.randn(rows, k), torch.randn(rows, n)
    expected = x.double() @ weight.double().T
    # k products in float32, in another order
    tolerance = {"atol": 2e-6 * k**0.5 + 1e-5, "rtol": 1e-5}
    y = rows_of(before)
    Linear(weight)(rows_of(x), y, rows, exact_rows=exact)
    torch.testing.assert_close(y.tensor.double(), expected, **tolerance)
    y = rows_of(before)
    Linear(weight, bias)(rows_of(x), y, rows, accumulate=True, exact_rows=exact)
    torch.testing.assert_close(y.tensor.double(), expected + bias + before, **tolerance)


def test_linear_leaves_other_rows_alone() -> None:
    x, y = rows_of(torch.randn(8, 32)), rows_of(torch.full((8, 48), 7.0))
    Linear(torch.randn(48, 32))(x, y, 3)
    assert torch.equal(y.tensor[3:], torch.full((5, 48), 7.0)) and not bool((y.tensor[:3] == 7).any())


@pytest.mark.parametrize("n,k", [(576, 1536), (99, 40)])
def test_linear_rows_have_the_same_bits_however_they_are_cut(n: int, k: int) -> None:
    layer, x = Linear(torch.randn(n, k).bfloat16()), torch.randn(301, k)
    whole = Rows(301, n)
    layer(rows_of(x), whole, 301, exact_rows=True)
    for start, end in ((0, 1), (1, 3), (3, 50), (50, 301)):
        part = Rows(end - start, n)
        layer(rows_of(x[start:end]), part, end - start, exact_rows=True)
        assert torch.equal(part.tensor, whole.tensor[start:end])


@pytest.mark.parametrize("rows,exact", [(1, False), (40, True)])
def test_linear_bits_do_not_depend_on_the_number_of_threads(rows: int, exact: bool) -> None:
    layer, x, results = Linear(torch.randn(1000, 256).half()), rows_of(torch.randn(rows, 256)), []
    before = lib.h3_get_threads()
    for threads in (1, 2, 7):
        assert lib.h3_set_threads(threads) == 0
        y = Rows(rows, 1000)
        layer(x, y, rows, exact_rows=exact)
        results.append(y.tensor)
    lib.h3_set_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_widens_exactly(isa: str, dtype: torch.dtype) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    y = Rows(256, 256)
    Embedding(every)(torch.arange(256), y)
    expected = every.float()
    assert torch.equal(y.tensor.isnan(), expected.isnan())
    assert torch.equal(y.tensor.nan_to_num(0), expected.nan_to_num(0))


def test_embedding_takes_rows_by_id() -> None:
    weight, ids, y = torch.randn(20, 12), torch.tensor([3, 19, 0, 3]), Rows(4, 12)
    Embedding(weight)(ids, y)
    assert torch.equal(y.tensor, weight[ids])
    for bad in (-1, 20):
        with pytest.raises(NativeError):
            Embedding(weight)(torch.tensor([0, bad]), y)


@pytest.mark.parametrize("width", [576, 8, 37, 3])
def test_norm(isa: str, width: int) -> None:
    x, weight = torch.randn(50, width) * 3, torch.randn(width)
    expected = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    y = rows_of(x)
    Norm(weight, 1e-5)(y, y, 50)
    torch.testing.assert_close(y.tensor.double(), expected, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("width", [1536, 8, 37])
def test_silu_mul(isa: str, width: int) -> None:
    x = torch.randn(9, 2 * width) * 5
    x[0, :4] = torch.tensor([200.0, -200.0, 0.0, -88.5])
    y = Rows(9, width)
    silu_mul(rows_of(x), y, 9)
    gate, up = x.double().split(width, 1)
    torch.testing.assert_close(y.tensor.double(), gate * torch.sigmoid(gate) * up, atol=1e-6, rtol=2e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of"):
        Linear(torch.randn(16, 32))(Rows(2, 32), Rows(2, 15), 2)
    with pytest.raises(ValueError, match="rows of"):
        Linear(torch.randn(16, 32))(Rows(2, 32), Rows(2, 16), 3)
    with pytest.raises(ValueError, match="norm"):
        Norm(torch.ones(8), 1e-5)(Rows(1, 8), Rows(1, 16), 1)
    with pytest.raises(ValueError, match="silu"):
        silu_mul(Rows(1, 8), Rows(1, 8), 1)
    assert lib.h3_set_threads(0) == lib.H3_E_INVALID and lib.h3_set_threads(65) == lib.H3_E_INVALID


def run_layer() -> torch.Tensor:
    torch.manual_seed(1)
    y = Rows(20, 512)
    Linear(torch.randn(512, 256))(rows_of(torch.randn(20, 256)), y, 20, exact_rows=True)
    return y.tensor


def test_kernels_work_from_many_threads_at_once() -> None:
    use_torch_threads()
    layer, x = Linear(torch.randn(512, 256)), torch.randn(6, 20, 256)
    results = [Rows(20, 512) for _ in x]

    def work(i: int) -> None:
        mine = rows_of(x[i])
        for _ in range(40):
            layer(mine, results[i], 20, exact_rows=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        torch.testing.assert_close(result.tensor, x[i] @ layer.weight.T, atol=1e-4, rtol=1e-4)


def test_a_forked_child_has_working_kernels() -> None:
    use_torch_threads()
    expected = run_layer()
    child = os.fork()
    if child == 0:
        lib.h3_set_threads(2)
        os._exit(0 if torch.equal(run_layer(), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(run_layer(), expected)
