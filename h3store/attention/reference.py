"""Attention with its log-sum-exp, and the merge of partial results, in plain tensor math.

Owns the definition; speed is the native kernels' business. lse is the natural logarithm, float32, (batch, num_heads,
q_len).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attend", "merge"]


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, q_start: int | None = None,
           kv_start: int = 0) -> tuple[Tensor, Tensor]:
    """Softmax attention of some queries over some tokens.

    Args:
        q: (batch, num_heads, q_len, head_dim), any float dtype; computed in float32.
        k: (batch, num_kv_heads, kv_len, head_dim); query head h reads KV head h // (num_heads // num_kv_heads).
        v: like k.
        scale: factor of the scores.
        q_start: position of the first query; a query sees tokens at or before its position. None: sees all.
        kv_start: position of the first token of k and v.

    Returns:
        out (batch, num_heads, q_len, head_dim) and lse (batch, num_heads, q_len), float32. A query that sees no token
        gives zeros and -inf.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = q.float() @ k.transpose(-1, -2) * scale
    if q_start is not None:
        positions = torch.arange(q.shape[2], device=q.device) + q_start
        tokens = torch.arange(k.shape[2], device=q.device) + kv_start
        scores = scores.masked_fill(tokens[None, :] > positions[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    return weights @ v, lse


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combines attention over two disjoint sets of tokens into attention over both.

    Args:
        out: (batch, num_heads, q_len, head_dim), float32.
        lse: (batch, num_heads, q_len), float32, natural log.
        other_out: like out.
        other_lse: like lse.

    Returns:
        (out, lse) over the union; zeros and -inf where both are empty.

    Source: Rabe and Staats 2021, section 2; Dao et al. 2023, section 3.1.
    """
    top = torch.maximum(lse, other_lse)
    shift = torch.where(top.isneginf(), 0.0, top)
    a, b = torch.exp(lse - shift), torch.exp(other_lse - shift)
    total = a + b
    merged = (out * a[..., None] + other_out * b[..., None]) / torch.where(total == 0, 1.0, total)[..., None]
    return merged, torch.log(total) + shift
