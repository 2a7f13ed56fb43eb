"""One chunk of an open file to raw bytes. Owns the steps of a patch record; refuses to know commits and bases of other
archives."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from h3store.archive.fileio import FileIO
from h3store.archive.patches import read_head
from h3store.archive.records import TensorRecord
from h3store.codec import Codec, Delta, Filter, check_holds
from h3store.errors import CorruptBlockError

__all__ = ["load_chunk"]

_local = threading.local()
BaseChunk = Callable[[TensorRecord, int], np.ndarray]


def load_chunk(io: FileIO, record: TensorRecord, block: int, entry: np.void, covered_bytes: int,
               base_chunk: BaseChunk) -> np.ndarray:
    """Reads, decodes and verifies a chunk: uint8, shape (chunk_size,).

    Args:
        entry: the block's entry of the chunk table.
        covered_bytes: length of the file that the commit covers.
        base_chunk: gives the raw bytes that a chunk with Delta.BASE leans on.

    Raises:
        CorruptBlockError: it does not decode to what its check promises. ArchiveError: a read failed.
    """
    raw = np.empty(record.chunk_size(block), np.uint8)
    if entry["filter"] != Filter.PATCH:
        _decode(io, record, block, entry, raw, base_chunk)
        return raw
    where = _where(io, record, block, entry)
    head = read_head(io, entry, len(raw), covered_bytes, where)
    pages = np.empty(head.nbytes, np.uint8)
    _decode(io, record, block, head.base, raw, base_chunk)
    _decode(io, record, block, head.pages, pages, base_chunk)
    head.apply(raw, pages)
    if not check_holds(entry, raw):
        raise CorruptBlockError(f"{where}: the block fails its check; restore the file from a copy")
    return raw


def _decode(io: FileIO, record: TensorRecord, block: int, entry: np.void, raw: np.ndarray,
            base_chunk: BaseChunk) -> None:
    what = f"tensor {record.name[:80]!r}, block {block}"
    stored = io.read(int(entry["offset"]), int(entry["stored_bytes"]), what)
    base = base_chunk(record, block) if entry["delta"] == Delta.BASE else None
    if _codec().decode_into(entry, stored, record.spec, raw, base):
        raise CorruptBlockError(f"{_where(io, record, block, entry)}: stored bytes do not decode to what their check "
                                "promises; restore the file from a copy")


def _where(io: FileIO, record: TensorRecord, block: int, entry: np.void) -> str:
    return f"{io.path}: tensor {record.name[:80]!r}, block {block} at byte {int(entry['offset'])}"


def _codec() -> Codec:
    if not hasattr(_local, "codec"):
        _local.codec = Codec()
    return _local.codec
