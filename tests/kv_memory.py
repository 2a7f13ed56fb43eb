"""A KV sequence over plain torch memory, for tests of the model alone: blocks never move and never leave."""

from __future__ import annotations

import numpy as np
import torch

from h3store.models.config import LlamaConfig


class MemorySequence:
    """Blocks (2, num_kv_heads, block_tokens, head_dim) per layer, poisoned with NaN until written."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype = torch.float32, block_tokens: int = 64) -> None:
        self.length = 0
        self._capacity = 0
        self._shape = (2, config.num_key_value_heads, block_tokens, config.head_dim)
        self._dtype, self._block_tokens = dtype, block_tokens
        self.blocks: list[list[torch.Tensor]] = [[] for _ in range(config.num_hidden_layers)]

    def reserve(self, n_tokens: int) -> None:
        while self._capacity < self.length + n_tokens:
            for layer in self.blocks:
                layer.append(torch.full(self._shape, torch.nan, dtype=self._dtype))
            self._capacity += self._block_tokens

    def block_table(self, layer: int) -> np.ndarray:
        return np.array([block.data_ptr() for block in self.blocks[layer]], np.uint64)

    def advance(self, n_tokens: int) -> None:
        self.length += n_tokens
