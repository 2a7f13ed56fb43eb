"""Attention over KV blocks: the definition in plain tensor math, and the native kernels that must agree with it.

Owns the meaning of (out, lse) and their merge. Refuses to know where blocks come from: it is given tensors or
addresses.
"""

from __future__ import annotations

from h3store.attention.blocks import BlockKV, block_attention, merge_into, rope_write
from h3store.attention.reference import attend, merge

__all__ = ["BlockKV", "attend", "block_attention", "merge", "merge_into", "rope_write"]
