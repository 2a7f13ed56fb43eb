"""Which stored blocks a prompt begins with. Owns chain hashes and the index from them to blocks; pure functions over
plain data. A hash finds a candidate; the tokens themselves decide."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["PrefixIndex", "chain_hashes"]


def chain_hashes(tokens: np.ndarray, block_tokens: int, seed: str) -> list[bytes]:
    """Returns one 16-byte hash per full block, each over the seed and every token up to the block's end.

    Args:
        tokens: int32, (n_tokens,).
    """
    hashes: list[bytes] = []
    state = hashlib.blake2b(seed.encode(), digest_size=16).digest()
    data = np.ascontiguousarray(tokens, dtype="<i4")
    for block in range(len(data) // block_tokens):
        part = data[block * block_tokens : (block + 1) * block_tokens]
        state = hashlib.blake2b(state + part.tobytes(), digest_size=16).digest()
        hashes.append(state)
    return hashes


@dataclass
class PrefixIndex:
    """Blocks of every stored entry, by chain hash."""

    block_tokens: int
    seed: str
    _places: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    _tokens: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)

    def add(self, entry: str, first_block: int, tokens: np.ndarray) -> None:
        """Indexes an entry that holds the blocks of `tokens` (the whole prefix from token 0) from first_block on."""
        own = np.array(tokens, dtype="<i4")
        self._tokens[entry] = (first_block, own)
        for block, key in enumerate(chain_hashes(own, self.block_tokens, self.seed)):
            if block >= first_block:
                self._places.setdefault(key, (entry, block - first_block))

    def remove(self, entry: str) -> None:
        self._tokens.pop(entry, None)
        self._places = {key: place for key, place in self._places.items() if place[0] != entry}

    def match(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Returns (entry, block within it) for the longest run of leading full blocks that is stored."""
        wanted = np.array(tokens, dtype="<i4")
        found: list[tuple[str, int]] = []
        entry = ""
        for block, key in enumerate(chain_hashes(wanted, self.block_tokens, self.seed)):
            place = self._places.get(key)
            if place is None or not self._same(place, block, wanted, whole=place[0] != entry):
                break
            entry = place[0]
            found.append(place)
        return found

    def _same(self, place: tuple[str, int], block: int, wanted: np.ndarray, whole: bool) -> bool:
        """Whether the entry was made from these very tokens up to the end of this block.

        whole: compare from token 0; else the blocks before were compared with this entry already.
        """
        first_block, own = self._tokens[place[0]]
        if place[1] != block - first_block:
            return False
        start, end = 0 if whole else block * self.block_tokens, (block + 1) * self.block_tokens
        return np.array_equal(own[start:end], wanted[start:end])
