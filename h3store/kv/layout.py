"""The shape of a KV block. Owns sizes only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from h3store.errors import UsageError

__all__ = ["KVLayout"]

_PAGE = 4096
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KVLayout:
    """How one model's keys and values lie in blocks.

    A block holds block_tokens tokens of one layer: a C-contiguous array (2, num_kv_heads, block_tokens, head_dim), keys
    (after RoPE) then values, padded to a multiple of 4096 bytes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_tokens: int = 64

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise UsageError(f"KV dtype {self.dtype} is not served; use float32, bfloat16 or float16")
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.block_tokens) < 1:
            raise UsageError(f"{self}: every size of a KV layout must be at least 1")

    @property
    def payload_bytes(self) -> int:
        """Bytes of keys and values in a block, without padding."""
        return 2 * self.num_kv_heads * self.block_tokens * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return -(-self.payload_bytes // _PAGE) * _PAGE

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token over all layers, without padding."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def blocks(self, tokens: int) -> int:
        """Blocks per layer that hold this many tokens."""
        return -(-tokens // self.block_tokens)
