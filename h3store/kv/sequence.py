"""One sequence's keys and values. Owns the block table: restored blocks first, then blocks of its own that only it
writes. Refuses to compute attention; kernels hold blocks by address."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from h3store.errors import UsageError
from h3store.kv.layout import KVLayout
from h3store.pager import Range

__all__ = ["KVSequence"]

# Own ranges come in steps of this many tokens: address space costs nothing until touched, but a range costs a mapping.
_STEP_TOKENS = 4096


class KVSequence:
    """Keys and values of one sequence, as addresses of blocks per layer.

    Attributes:
        length: tokens held by every layer.
        restored: tokens that came from the store; their blocks are read-only.
    """

    def __init__(self, layout: KVLayout, new_range: Callable[[int], Range], restored: list[tuple[Range, int]]) -> None:
        self.layout = layout
        self._new_range = new_range
        self._table = np.zeros((layout.num_layers, max(len(restored), 1)), np.uint64)
        self._n_blocks = 0
        self._ranges: list[Range] = []
        self._owned: list[tuple[Range, int, int]] = []  # range, first block of the sequence in it, blocks
        self.closed = False
        for tiered, block in restored:
            self._append_block(tiered, block)
        self._restored_blocks = len(restored)
        self.restored = self.length = len(restored) * layout.block_tokens

    def _append_block(self, tiered: Range, block: int) -> None:
        """Adds token block `block` of a range whose blocks lie (token block, layer)."""
        layers = self.layout.num_layers
        if self._n_blocks == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        first = tiered.address + block * layers * self.layout.block_bytes
        self._table[:, self._n_blocks] = first + np.arange(layers, dtype=np.uint64) * np.uint64(self.layout.block_bytes)
        self._n_blocks += 1
        if tiered not in self._ranges:
            self._ranges.append(tiered)

    def reserve(self, n_tokens: int) -> None:
        """Gives n_tokens more tokens a place. Takes address space, no memory.

        Raises:
            BudgetError: two blocks exceed the ddr budget.
        """
        self._check_open()
        needed = self.layout.blocks(self.length + n_tokens) - self._n_blocks
        while needed > 0:
            tiered, used = self._room()
            self._append_block(tiered, used)
            needed -= 1

    def _room(self) -> tuple[Range, int]:
        """A range of our own with an unused token block, and that block."""
        layers = self.layout.num_layers
        if self._owned:
            tiered, first, used = self._owned[-1]
            if used < tiered.n_blocks // layers:
                self._owned[-1] = (tiered, first, used + 1)
                return tiered, used
        tiered = self._new_range(self.layout.blocks(_STEP_TOKENS) * layers)
        self._owned.append((tiered, self._n_blocks, 1))
        return tiered, 0

    def block_table(self, layer: int) -> np.ndarray:
        """Returns block base addresses in token order, uint64, (n_blocks,), for length plus reserved tokens."""
        self._check_open()
        return self._table[layer, : self._n_blocks]

    def advance(self, n_tokens: int) -> None:
        """Counts n_tokens as held, once every layer's keys and values of them are written."""
        self._check_open()
        if n_tokens < 0:
            raise UsageError(f"advance by {n_tokens} tokens: must be at least 0; truncate() forgets tokens")
        if self.length + n_tokens > self._n_blocks * self.layout.block_tokens:
            raise UsageError(f"advance by {n_tokens} tokens past the reserved {self._n_blocks} blocks; reserve() first")
        self.length += n_tokens

    def truncate(self, length: int) -> None:
        """Forgets tokens from `length` on; restored tokens cannot be forgotten."""
        if not self.restored <= length <= self.length:
            raise UsageError(f"truncate to {length}: must lie between {self.restored} (restored) and {self.length}")
        self.length = length

    def own_blocks(self, first: int, end: int) -> list[tuple[Range, int, int]]:
        """Returns runs (range, first token block in it, count) that hold token blocks [first, end) of our own."""
        runs = []
        for tiered, start, used in self._owned:
            low, high = max(first, start), min(end, start + used)
            if low < high:
                runs.append((tiered, low - start, high - low))
        return runs

    @property
    def ranges(self) -> list[Range]:
        """Ranges under the table, in order of first use."""
        return self._ranges

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("this KV sequence was closed")

    def close(self) -> None:
        """Lets go of memory and scratch space. The table must not be used afterwards."""
        self.closed = True
        self._table = np.zeros((self.layout.num_layers, 1), np.uint64)
        self._n_blocks = 0
        self._ranges, self._owned = [], []
