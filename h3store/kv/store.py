"""KV sequences over a store. Owns which prefixes are kept in the archive and how a sequence starts from them.
Refuses to decide when to publish, or to know models beyond a fingerprint."""

from __future__ import annotations

import uuid
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from h3store.codec import choose_spec, default_spec
from h3store.errors import CorruptArchiveError
from h3store.kv.layout import KVLayout
from h3store.kv.prefix import PrefixIndex
from h3store.kv.sequence import KVSequence
from h3store.pager import Range, RangeConfig, check_blocks_fit
from h3store.tensor import in_operation
from h3store.tiers import ScratchFile
from h3store.tiers.ddr import native_spec

if TYPE_CHECKING:
    from h3store.store import Store

__all__ = ["KVStore"]

# A branch off a stored prefix is kept from this many new blocks on: a question's own tail is cheaper to compute again.
_MIN_BRANCH_BLOCKS = 4
_PREFIX = "kv/"


class KVStore:
    """Sequences of one model in one store.

    Args:
        store: where prefixes are kept, and whose ddr budget holds every block.
        layout: shape of the model's KV blocks.
        fingerprint: names everything that the stored values depend on: weights, config, dtype, RoPE, format. Entries of
            another fingerprint are never used.

    Raises:
        BudgetError: the store's budget is too small for the layout's blocks.
    """

    def __init__(self, store: Store, layout: KVLayout, fingerprint: str) -> None:
        check_blocks_fit(layout.block_bytes, store.ddr_bytes, "KV cache")
        self.store = store
        self.layout = layout
        self.fingerprint = fingerprint
        self._index = PrefixIndex(layout.block_tokens, fingerprint)
        self._ranges: dict[str, Range] = {}
        self._sequences: weakref.WeakSet[KVSequence] = weakref.WeakSet()
        for name in store:
            if name.startswith(_PREFIX) and name.endswith("/tokens"):
                self._index_entry(name.removesuffix("/tokens"))

    def _index_entry(self, entry: str) -> None:
        """Indexes an entry that is this model's and whole; any other is left alone."""
        if f"{entry}/blocks" not in self.store:
            return
        record, layout = self.store.record(f"{entry}/blocks"), self.layout
        if record.metadata.get("fingerprint") != self.fingerprint:
            return
        first, item = int(record.metadata.get("first_block", -1)), layout.dtype.itemsize
        try:
            tokens = self.store.read(f"{entry}/tokens").numpy()
        except CorruptArchiveError as error:
            warnings.warn(f"a stored prefix cannot be used and will be computed again: {error}", stacklevel=3)
            return
        shape = (len(tokens) // layout.block_tokens - first, layout.num_layers, layout.block_bytes // item)
        fits = record.shape == shape and record.chunk_bytes == layout.block_bytes and first >= 0
        if fits and record.dtype == str(layout.dtype).removeprefix("torch.") and len(tokens) % layout.block_tokens == 0:
            self._index.add(entry, first, tokens)

    def sequence(self, tokens: Sequence[int] = ()) -> KVSequence:
        """Returns a sequence that starts from the longest stored prefix of tokens: whole blocks, never all.

        Blocks are read when attention first holds them, not here.
        """
        usable = max(len(tokens) - 1, 0) // self.layout.block_tokens
        places = self._index.match(tokens[: usable * self.layout.block_tokens])
        self._forget_unused({entry for entry, _ in places})
        restored = [(self._entry_range(entry), block) for entry, block in places]
        sequence = KVSequence(self.layout, self._scratch_ranges(), restored)
        self._sequences.add(sequence)
        return sequence

    def _entry_range(self, entry: str) -> Range:
        if entry not in self._ranges:
            self._ranges[entry] = self.store.range(f"{entry}/blocks", cyclic=True)
        return self._ranges[entry]

    def _forget_unused(self, wanted: set[str]) -> None:
        """Blocks of a document that nobody reads any more leave memory, or they would crowd out the next one's."""
        in_use = {id(tiered) for sequence in self._sequences for tiered in sequence.ranges}
        for entry in [e for e, tiered in self._ranges.items() if e not in wanted and id(tiered) not in in_use]:
            self._ranges.pop(entry).drop()

    def _scratch_ranges(self):  # type: ignore[no-untyped-def]  # a closure over one scratch file per sequence
        scratch: list[ScratchFile] = []
        spec = native_spec(default_spec(str(self.layout.dtype), 0))

        def new_range(n_blocks: int) -> Range:
            if not scratch:
                scratch.append(ScratchFile(self.store.folder))
            block_bytes = self.layout.block_bytes
            config = RangeConfig(
                n_blocks * block_bytes,
                block_bytes,
                spec,
                writable=True,
                cyclic=True,
                file=scratch[0].native,
                owner=scratch[0],
                label="KV blocks of a sequence",
            )
            return Range(self.store.pager, config)

        return new_range

    def publish(self, sequence: KVSequence, tokens: Sequence[int]) -> int:
        """Keeps the full blocks of a sequence's leading tokens in the archive. Blocks until they are durable.

        Args:
            tokens: the sequence's first len(tokens) tokens.

        Returns:
            Tokens of this prefix that the store now holds.
        """
        block_tokens = self.layout.block_tokens
        n_blocks = min(len(tokens), sequence.length) // block_tokens
        kept = len(self._index.match(tokens[: n_blocks * block_tokens]))
        if not self.store.writable or n_blocks - kept < (_MIN_BRANCH_BLOCKS if kept else 1):
            return kept * block_tokens
        runs = sequence.own_blocks(kept, n_blocks)
        if sum(count for _, _, count in runs) != n_blocks - kept:
            return kept * block_tokens  # restored from an entry that is no longer indexed
        self._write(runs, kept, np.array(tokens[: n_blocks * block_tokens], dtype=np.int32))
        return n_blocks * block_tokens

    def _write(self, runs: list[tuple[Range, int, int]], first_block: int, tokens: np.ndarray) -> None:
        layers, layout = self.layout.num_layers, self.layout
        spec = self._choose(runs[0][0], runs[0][1] * layers)
        entry = _PREFIX + uuid.uuid4().hex
        tables = [
            tiered.export(first * layers, count * layers, native_spec(spec), self.store.file)
            for tiered, first, count in runs
        ]
        shape = (len(tokens) // layout.block_tokens - first_block, layers, layout.block_bytes // layout.dtype.itemsize)
        meta = {"fingerprint": self.fingerprint, "first_block": first_block}
        self.store.adopt(f"{entry}/blocks", layout.dtype, shape, layout.block_bytes, spec, np.concatenate(tables), meta)
        self.store.put(f"{entry}/tokens", tokens)
        self.store.commit()
        self._index.add(entry, first_block, tokens)

    def _choose(self, tiered: Range, first: int):  # type: ignore[no-untyped-def]  # Spec, from a sample of layers
        layers, block_bytes = self.layout.num_layers, self.layout.block_bytes
        picked = sorted({first, first + layers // 2, first + layers - 1})
        view = np.frombuffer(tiered.buffer(), np.uint8)
        with in_operation([tiered]):
            samples = [view[i * block_bytes : (i + 1) * block_bytes].copy() for i in picked]
        return choose_spec(samples, str(self.layout.dtype), 0)
