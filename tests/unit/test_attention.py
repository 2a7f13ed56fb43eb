"""Block attention: the definition in tensor math against torch's own, and the native kernels against the definition."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from h3store._ffi import lib
from h3store.attention import BlockKV, attend, block_attention, merge, merge_into, rope_write
from h3store.errors import NativeError


@pytest.fixture(params=["auto", "generic"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    assert lib.h3_set_isa(request.param.encode()) == 0
    yield request.param
    lib.h3_set_isa(b"auto")


class Blocks:
    """KV in blocks of plain memory; slots that no token has been written to hold NaN."""

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype, block_tokens: int) -> None:
        heads, length, dim = k.shape
        self.k, self.v = k.to(dtype), v.to(dtype)
        count = -(-length // block_tokens)
        self.memory = torch.full((count, 2, heads, block_tokens, dim), torch.nan).to(dtype)
        for token in range(length):
            block, slot = divmod(token, block_tokens)
            self.memory[block, 0, :, slot], self.memory[block, 1, :, slot] = self.k[:, token], self.v[:, token]
        # blocks in any order of addresses: the table alone says which is which
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        shuffled = torch.empty_like(self.memory)
        shuffled[order] = self.memory
        self.memory = shuffled
        table = np.array([self.memory[int(i)].data_ptr() for i in order], np.uint64)
        self.kv = BlockKV(heads, dim, dtype, block_tokens).bind(table)

    def reference(self, q: Tensor, heads: int, start: int, end: int, first: int | None) -> tuple[Tensor, Tensor]:
        rows = q.shape[0]
        shaped = q.reshape(1, rows, heads, -1).transpose(1, 2)
        out, lse = attend(shaped, self.k[None, :, start:end], self.v[None, :, start:end], scale=0.3, q_start=first,
                          kv_start=start)
        return out[0].transpose(0, 1).reshape(rows, -1), lse[0].T


def make(length: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32, block_tokens: int = 64) -> Blocks:
    generator = torch.Generator().manual_seed(length * 31 + dim)
    k, v = (torch.randn(kv_heads, length, dim, generator=generator) for _ in range(2))
    return Blocks(k, v, dtype, block_tokens)


def test_attend_is_softmax_attention() -> None:
    q, k, v = torch.randn(2, 6, 5, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    out, lse = attend(q, k, v, scale=0.25, q_start=4)
    wide = [x.repeat_interleave(3, 1) for x in (k, v)]
    mask = torch.ones(5, 9).tril(4).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, *wide, attn_mask=mask, scale=0.25)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    assert lse.shape == (2, 6, 5) and lse.dtype == torch.float32
    one = q[0, 3, 0] @ k[0, 1, :5].T * 0.25
    torch.testing.assert_close(lse[0, 3, 0], torch.log(torch.exp(one).sum()))


def test_a_query_that_sees_nothing_gives_zeros_and_minus_infinity() -> None:
    out, lse = attend(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8), scale=1.0, q_start=0,
                      kv_start=2)
    assert torch.equal(lse[0, :, :2], torch.full((2, 2), -torch.inf)) and bool(torch.isfinite(lse[0, :, 2]).all())
    assert torch.equal(out[0, :, :2], torch.zeros(2, 2, 8))


def test_merge_of_parts_is_the_whole() -> None:
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16)
    whole = attend(q, k, v, scale=0.25)
    merged = attend(q, k[:, :, :7], v[:, :, :7], scale=0.25)
    for start, end in ((7, 8), (8, 30)):
        merged = merge(*merged, *attend(q, k[:, :, start:end], v[:, :, start:end], scale=0.25))
    for ours, theirs in zip(merged, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("native", [False, True])
def test_merge_of_two_empty_states_is_empty(native: bool) -> None:
    out, lse = torch.zeros(3, 16), torch.full((3, 2), -torch.inf)
    if native:
        merge_into(out, lse, out.clone(), lse.clone())
    else:
        shaped = out.reshape(1, 2, 3, 8), lse.reshape(1, 2, 3)
        out, lse = merge(*shaped, *shaped)
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_merging_with_an_empty_state_changes_nothing() -> None:
    out, lse = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3)
    empty = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merge(out, lse, *empty), merge(*empty, out, lse)):
        torch.testing.assert_close(merged[0], out)
        torch.testing.assert_close(merged[1], lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads,kv_heads,dim",
                         [(9, 3, 64), (4, 4, 16), (8, 1, 128), (10, 2, 8), (6, 3, 24), (12, 1, 72)])
@pytest.mark.parametrize("exact_rows", [False, True])
def test_native_attention_agrees_with_the_definition(isa: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int,
                                                     exact_rows: bool) -> None:
    length = 147
    blocks = make(length, kv_heads, dim, dtype)
    q = torch.randn(3, heads * dim)
    out, lse = block_attention(q, heads, blocks.kv, kv_to=length, first=length - 3, scale=0.3, exact_rows=exact_rows)
    expected = blocks.reference(q, heads, 0, length, length - 3)
    # scores up to 20 in float32, in another order: e^s carries their rounding
    torch.testing.assert_close(out, expected[0], atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected[1], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("block_tokens", [16, 48, 64, 512])
@pytest.mark.parametrize("length,rows,first", [(1, 1, 0), (16, 16, 0), (700, 700, 0), (1100, 37, 1063), (640, 64, 576),
                                               (300, 20, 10), (90, 8, 500)])
def test_native_prefill_attention_of_any_cut(length: int, rows: int, first: int, block_tokens: int) -> None:
    blocks = make(length, 2, 16, block_tokens=block_tokens)
    q = torch.randn(rows, 6 * 16)
    out, lse = block_attention(q, 6, blocks.kv, kv_to=length, first=first, scale=0.3, exact_rows=True)
    expected = blocks.reference(q, 6, 0, length, first)
    torch.testing.assert_close(out, expected[0], atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected[1], atol=3e-5, rtol=1e-5)


def test_rows_have_the_same_bits_however_they_are_cut() -> None:
    length = 1300
    blocks = make(length, 3, 64, torch.bfloat16)
    q = torch.randn(length, 9 * 64)
    whole = block_attention(q, 9, blocks.kv, kv_to=length, first=0, scale=0.125, exact_rows=True)[0]
    cuts = [0, 1, 50, 64, 129, 640, 1100, 1299, 1300]
    parts = [block_attention(q[a:b], 9, blocks.kv, kv_to=b, first=a, scale=0.125, exact_rows=True)[0]
             for a, b in itertools.pairwise(cuts)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("rows,exact_rows", [(1, False), (4, False), (70, True)])
def test_bits_do_not_depend_on_the_number_of_threads(rows: int, exact_rows: bool) -> None:
    blocks, q, results = make(900, 3, 64), torch.randn(rows, 9 * 64), []
    before = lib.h3_get_threads()
    for threads in (1, 2, 5):
        assert lib.h3_set_threads(threads) == 0
        results.append(block_attention(q, 9, blocks.kv, kv_to=900, first=900 - rows, scale=0.125,
                                       exact_rows=exact_rows)[0])
    lib.h3_set_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("exact_rows", [False, True])
def test_spans_merge_to_the_whole(exact_rows: bool) -> None:
    blocks, q = make(500, 2, 32), torch.randn(2, 4 * 32)
    whole = block_attention(q, 4, blocks.kv, kv_to=500, scale=0.2, exact_rows=exact_rows)
    out, lse = block_attention(q, 4, blocks.kv, kv_to=192, scale=0.2, exact_rows=exact_rows)
    for start, end in ((192, 192), (192, 256), (256, 500)):
        merge_into(out, lse, *block_attention(q, 4, blocks.kv, kv_from=start, kv_to=end, scale=0.2,
                                              exact_rows=exact_rows))
    torch.testing.assert_close(out, whole[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("exact_rows", [False, True])
def test_no_tokens_give_zeros_and_minus_infinity(exact_rows: bool) -> None:
    blocks = make(64, 2, 16)
    out, lse = block_attention(torch.randn(2, 32), 2, blocks.kv, kv_to=0, scale=1.0, exact_rows=exact_rows)
    assert torch.equal(out, torch.zeros(2, 32)) and torch.equal(lse, torch.full((2, 2), -torch.inf))


def test_huge_scores_do_not_overflow() -> None:
    blocks = make(200, 1, 16)
    q = 1e4 * torch.randn(2, 16)
    for exact_rows in (False, True):
        out, lse = block_attention(q, 1, blocks.kv, kv_to=200, first=198, scale=1.0, exact_rows=exact_rows)
        assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rope_write_rotates_and_rounds_like_torch(isa: str, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, rows, start = 4, 2, 16, 90, 37
    memory = torch.full((2, 2, kv_heads, 64, dim), torch.nan).to(dtype)
    kv = BlockKV(kv_heads, dim, dtype, 64).bind(np.array([block.data_ptr() for block in memory], np.uint64))
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(rows, dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    before = qkv.clone()
    rope_write(qkv, heads, cos, sin, kv, start)

    def rotated(x: Tensor) -> Tensor:
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    q, k, v = before.reshape(rows, -1, dim).split([heads, kv_heads, kv_heads], 1)
    torch.testing.assert_close(qkv[:, : heads * dim].reshape(rows, heads, dim), rotated(q), atol=1e-6, rtol=1e-6)
    tokens = memory.permute(0, 3, 1, 2, 4).reshape(128, 2, kv_heads, dim)
    written = tokens[start : start + rows]
    torch.testing.assert_close(written[:, 0], rotated(k).to(dtype), atol=1e-6, rtol=torch.finfo(dtype).eps)
    assert torch.equal(written[:, 1], v.to(dtype))
    assert bool(tokens[:start].isnan().all()) and bool(tokens[start + rows :].isnan().all())


def test_bad_shapes_are_refused() -> None:
    blocks = make(64, 2, 16)
    with pytest.raises(NativeError):
        block_attention(torch.randn(1, 32), 2, blocks.kv, kv_to=65, scale=1.0)
    with pytest.raises(NativeError):
        block_attention(torch.randn(1, 48), 3, blocks.kv, kv_to=64, scale=1.0)
    with pytest.raises(NativeError):
        block_attention(torch.randn(1, 32), 2, blocks.kv, kv_from=3, kv_to=64, scale=1.0)
    with pytest.raises(ValueError, match="float32 rows"):
        block_attention(torch.randn(1, 32).double(), 2, blocks.kv, kv_to=64, scale=1.0)
    with pytest.raises(ValueError, match="uint64"):
        blocks.kv.bind(np.zeros(3, np.int64))
