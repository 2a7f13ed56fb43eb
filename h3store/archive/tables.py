"""Chunk tables. Owns their checks, one rule of FORMAT.md each, and their place in the file; refuses to read chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from h3store.archive.fileio import FileIO
from h3store.archive.layout import HEADER_BYTES, xxh64
from h3store.archive.records import ENTRY_BYTES, TableRef, TensorRecord
from h3store.codec import CHUNK_DTYPE, Delta, Filter
from h3store.errors import CorruptArchiveError

__all__ = ["bad_entries", "read_table", "write_tables"]

_WRITE_BYTES = 4 * 1024**2


def read_table(io: FileIO, record: TensorRecord, covered_bytes: int) -> np.ndarray:
    """The committed table of a record: dtype CHUNK_DTYPE, shape (n_chunks,), read-only.

    Args:
        covered_bytes: length of the file that the commit covers.

    Raises:
        CorruptArchiveError: it fails its check, or an entry breaks a rule.
    """
    name = repr(record.name[:80])
    if record.table is None:
        raise CorruptArchiveError(f"{io.path}: tensor {name} has no chunk table")
    offset, n_chunks, check = record.table
    where = f"{io.path}: chunk table of {name} at byte {offset}"
    data = io.read(offset, n_chunks * ENTRY_BYTES, f"chunk table of {name}")
    if xxh64(data) != check:
        raise CorruptArchiveError(f"{where} fails its check; restore the file from a copy")
    chunks = np.frombuffer(data, CHUNK_DTYPE)
    bad = bad_entries(record, chunks, covered_bytes)
    if bad.any():
        block = int(np.argmax(bad))
        raise CorruptArchiveError(f"{where}: entry {block} is {chunks[block]}, outside the rules of the format or the "
                                  f"{covered_bytes} bytes of the commit")
    return chunks


def write_tables(io: FileIO, tables: Sequence[np.ndarray]) -> list[TableRef]:
    """Appends tables, many per write, and returns their places in order."""
    places: list[TableRef] = []
    batch: list[bytes] = []
    batch_bytes = 0
    for table in [*tables, None]:
        if batch and (table is None or batch_bytes > _WRITE_BYTES):
            offset = io.append(b"".join(batch), "chunk tables")
            for data in batch:
                places.append(TableRef(offset if data else 0, len(data) // ENTRY_BYTES, xxh64(data)))
                offset += len(data)
            batch, batch_bytes = [], 0
        if table is not None:
            batch.append(table.tobytes())
            batch_bytes += table.nbytes
    return places


def bad_entries(record: TensorRecord, chunks: np.ndarray, covered_bytes: int) -> np.ndarray:
    """True where an entry breaks a rule; chunks has one entry per chunk of record."""
    raw = np.full(len(chunks), record.chunk_bytes, np.uint64)
    if len(chunks):
        raw[-1] = record.chunk_size(len(chunks) - 1)
    filter_, delta, offset = chunks["filter"], chunks["delta"], chunks["offset"]
    stored, covered = chunks["stored_bytes"].astype(np.uint64), np.uint64(covered_bytes)
    room = covered - np.minimum(offset, covered)
    bad = (filter_ > max(Filter)) | (delta > max(Delta)) | (chunks["reserved"] != 0) | (stored > raw)
    bad |= (stored > 0) & ((offset < HEADER_BYTES) | (stored > room))
    bad |= (filter_ == Filter.ZERO) != (stored == 0)
    bad |= (filter_ == Filter.RAW) & (stored != raw)
    bad |= np.isin(filter_, (Filter.RAW, Filter.ZERO, Filter.PATCH)) & (delta != Delta.NONE)
    bad |= (delta == Delta.ROW) & (record.spec.row_bytes == 0)
    return bad | ((delta == Delta.BASE) & (record.base is None))
