"""The native attention kernels over KV blocks that are named by address.

Owns the passage of shapes and addresses into native code, checked here. A table's blocks may lie in tiered ranges (the
kernels hold each block while they read it) or in any other memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from h3store._ffi import check, ffi, lib

__all__ = ["BlockKV", "block_attention", "merge_into", "rope_write"]

_TYPES = {torch.float32: lib.H3_F32, torch.bfloat16: lib.H3_BF16, torch.float16: lib.H3_F16}


class BlockKV:
    """One layer's KV as a table of blocks, each (2, num_kv_heads, block_tokens, head_dim), K then V."""

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_tokens: int = 64) -> None:
        self.num_kv_heads, self.head_dim, self.dtype, self.block_tokens = num_kv_heads, head_dim, dtype, block_tokens
        self._table = np.empty(0, np.uint64)
        self._native: Any = ffi.new("h3_kv *", {"num_kv_heads": num_kv_heads, "head_dim": head_dim,
                                                "block_tokens": block_tokens, "type": _TYPES[dtype]})

    def bind(self, table: np.ndarray) -> BlockKV:
        """Points at these blocks.

        Args:
            table: uint64, C-contiguous, block base addresses in token order; kept alive here, the blocks are not.
        """
        if table.dtype != np.uint64 or table.ndim != 1 or not table.flags.c_contiguous:
            raise ValueError(f"table: {table.dtype} of shape {table.shape}; needs a contiguous uint64 vector")
        self._table = table
        self._native.table = ffi.cast("uint64_t *", table.ctypes.data)
        self._native.n_blocks = len(table)
        return self


def rope_write(qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor, kv: BlockKV, start: int) -> None:
    """Rotates the query heads of qkv in place, and writes rotated K, and V, into blocks from token `start` on.

    Args:
        qkv: (q_len, (num_heads + 2 * num_kv_heads) * head_dim), float32, rows contiguous; K and V stay unrotated there.
        num_heads: query heads.
        cos: (q_len, head_dim // 2), float32, contiguous; likewise sin.
        sin: see cos.
        kv: bound to a table that covers start + q_len tokens.
        start: position of row 0.
    """
    rows = qkv.shape[0]
    _need(qkv, "qkv", (rows, (num_heads + 2 * kv.num_kv_heads) * kv.head_dim))
    _need(cos, "cos", (rows, kv.head_dim // 2))
    _need(sin, "sin", (rows, kv.head_dim // 2))
    check(lib.h3_rope_write(_floats(qkv), rows, qkv.stride(0), num_heads, _floats(cos), _floats(sin), kv._native,
                            start),
          f"K and V of tokens {start} to {start + rows}")


def block_attention(q: Tensor, num_heads: int, kv: BlockKV, *, kv_from: int = 0, kv_to: int, first: int | None = None,
                    scale: float, exact_rows: bool = False, out: Tensor | None = None,
                    lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention of q over tokens [kv_from, kv_to) of a block table.

    Args:
        q: (q_len, at least num_heads * head_dim), float32; row stride may be larger (query heads of a fused qkv).
        num_heads: query heads; a multiple of kv.num_kv_heads.
        kv: bound table that covers kv_to tokens.
        kv_from: first token, a multiple of block_tokens.
        kv_to: end of tokens.
        first: position of row 0: row r sees tokens up to first + r. None: every row sees all.
        scale: factor of the scores.
        exact_rows: True gives each row the same bits however rows are cut into calls; False may be faster for few rows.
        out: (q_len, num_heads * head_dim), float32, contiguous; made when None.
        lse: (q_len, num_heads), float32, contiguous; made when None.

    Returns:
        out and lse (natural log); zeros and -inf for a row that sees nothing.
    """
    rows = q.shape[0]
    if q.dtype != torch.float32 or q.ndim != 2 or q.stride(1) != 1 or q.shape[1] < num_heads * kv.head_dim:
        raise ValueError(f"q: {q.dtype} {tuple(q.shape)}; needs float32 rows of {num_heads} x {kv.head_dim}")
    out = q.new_empty(rows, num_heads * kv.head_dim) if out is None else out
    lse = q.new_empty(rows, num_heads) if lse is None else lse
    _need(out, "out", (rows, num_heads * kv.head_dim))
    _need(lse, "lse", (rows, num_heads))
    check(lib.h3_block_attention(_floats(q), rows, q.stride(0), num_heads, kv._native, kv_from, kv_to,
                                 kv_to if first is None else first, scale, exact_rows, _floats(out), _floats(lse)),
          f"attention over tokens {kv_from} to {kv_to}")
    return out, lse


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merges a second partial result into the first, in place; the native twin of `merge`.

    Args:
        out: (rows, num_heads * head_dim), float32, contiguous.
        lse: (rows, num_heads), float32, contiguous.
        other_out: like out.
        other_lse: like lse.
    """
    _need(other_out, "other_out", tuple(out.shape))
    _need(out, "out", tuple(other_out.shape))
    _need(lse, "lse", tuple(other_lse.shape))
    _need(other_lse, "other_lse", tuple(lse.shape))
    check(lib.h3_attention_merge(_floats(out), _floats(lse), _floats(other_out), _floats(other_lse), lse.numel(),
                                 out.numel() // max(1, lse.numel())), "merge of attention results")


def _need(tensor: Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}; needs contiguous float32 {shape}")


def _floats(tensor: Tensor) -> Any:
    return ffi.cast("float *", tensor.data_ptr())
