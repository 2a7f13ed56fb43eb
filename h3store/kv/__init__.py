"""KV caches as tiered blocks: their layout, one sequence's block table, and the prefixes kept across jobs."""

from __future__ import annotations

from h3store.kv.layout import KVLayout
from h3store.kv.prefix import chain_hashes
from h3store.kv.sequence import KVSequence
from h3store.kv.store import KVStore

__all__ = ["KVLayout", "KVSequence", "KVStore", "chain_hashes"]
