"""Chunk tables. Owns their checks, one rule of FORMAT.md each, and their place in the file; refuses to read chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from h3store.archive.fileio import FileIO
from h3store.archive.layout import HEADER_BYTES, xxh64
from h3store.archive.records import CHANGE_BYTES, ENTRY_BYTES, MAX_CHANGES, TableRef, TensorRecord
from h3store.codec import CHUNK_DTYPE, CheckKind, Delta, Filter
from h3store.errors import CorruptArchiveError

__all__ = ["CHANGE_DTYPE", "TableWrite", "bad_entries", "read_table", "to_write", "write_tables"]

_WRITE_BYTES = 4 * 1024**2
CHANGE_DTYPE = np.dtype([("block", "<u8"), ("entry", CHUNK_DTYPE)])
# Changes are written while they are a quarter of the table they change, and tables of a page or so whole.
_CHANGES_SHARE, _SMALL_TABLE = 4, 4096
# As plain numbers and a look-up table: a commit of one row checks two entries, and np.isin alone would take it 200 us.
_LAST_FILTER, _LAST_DELTA = int(max(Filter)), int(max(Delta))
_LAST_CHECK = int(max(CheckKind))
_NEVER_DELTA = np.zeros(256, np.bool_)
_NEVER_DELTA[[Filter.RAW, Filter.ZERO, Filter.PATCH]] = True


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
    if record.changes:
        chunks = _with_changes(io, record, chunks)
    bad = bad_entries(record, chunks, covered_bytes)
    if bad.any():
        block = int(np.argmax(bad))
        raise CorruptArchiveError(f"{where}: entry {block} is {chunks[block]}, outside the rules of the format or the "
                                  f"{covered_bytes} bytes of the commit")
    return chunks


def _with_changes(io: FileIO, record: TensorRecord, table: np.ndarray) -> np.ndarray:
    chunks = np.zeros(record.n_chunks, CHUNK_DTYPE)
    chunks[:len(table)] = table
    left = np.arange(record.n_chunks) >= len(table)
    record.changed = [_read_changes(io, record, place, chunks) for place in record.changes]
    for blocks in record.changed:
        left[blocks] = False
    if left.any():
        raise CorruptArchiveError(f"{io.path}: chunk table of {record.name[:80]!r}: its {len(table)} entries and their "
                                  f"changes leave some of {record.n_chunks} out")
    return chunks


def _read_changes(io: FileIO, record: TensorRecord, place: TableRef, chunks: np.ndarray) -> np.ndarray:
    """Puts a list of changes into a table and returns its blocks."""
    where = f"{io.path}: changes of the chunk table of {record.name[:80]!r} at byte {place.offset}"
    data = io.read(place.offset, place.n_chunks * CHANGE_BYTES, "changes of a chunk table")
    if xxh64(data) != place.check:
        raise CorruptArchiveError(f"{where} fail their check; restore the file from a copy")
    changes = np.frombuffer(data, CHANGE_DTYPE)
    blocks = changes["block"]
    if (blocks[1:] <= blocks[:-1]).any() or int(blocks[-1]) >= len(chunks):
        raise CorruptArchiveError(f"{where}: blocks that do not rise, or past the {len(chunks)} of the tensor")
    blocks = blocks.astype(np.int64)  # numpy makes floats of both kinds of integers together
    chunks[blocks] = changes["entry"]
    return blocks


class TableWrite(NamedTuple):
    """What of a record's table has to be appended: all entries, or the blocks of its newest list of changes.

    Attributes:
        kept: how many lists of changes stay before it; -1: it is a whole table.
    """

    data: np.ndarray
    kept: int


def to_write(record: TensorRecord) -> TableWrite:
    """Decides how a record whose table is not all in the file gets there.

    Lists of changes are merged so that each is longer than the next: a commit writes little, a reader reads few.
    """
    assert record.chunks is not None
    whole = TableWrite(record.chunks, -1)
    blocks = record.pending
    if record.table is None or blocks is None or record.chunks.nbytes <= _SMALL_TABLE:
        return whole
    kept = len(record.changed)
    while kept and (len(record.changed[kept - 1]) <= 2 * len(blocks) or kept >= MAX_CHANGES):
        kept -= 1
        blocks = np.union1d(blocks, record.changed[kept])
    total = len(blocks) + sum(len(found) for found in record.changed[:kept])
    if total * CHANGE_BYTES * _CHANGES_SHARE > record.chunks.nbytes:
        return whole
    changes = np.zeros(len(blocks), CHANGE_DTYPE)
    changes["block"] = blocks
    changes["entry"] = record.chunks[blocks]
    return TableWrite(changes, kept)


def write_tables(io: FileIO, tables: Sequence[np.ndarray]) -> list[TableRef]:
    """Appends tables or changes, many per write, and returns their places in order."""
    places: list[TableRef] = []
    batch: list[bytes] = []
    batch_bytes = 0
    for table in [*tables, None]:
        if batch and (table is None or batch_bytes > _WRITE_BYTES):
            offset = io.append(b"".join(batch), "chunk tables")
            for data in batch:
                count = len(data) // tables[len(places)].itemsize
                places.append(TableRef(offset if data else 0, count, xxh64(data)))
                offset += len(data)
            batch, batch_bytes = [], 0
        if table is not None:
            batch.append(table.tobytes())
            batch_bytes += table.nbytes
    return places


def bad_entries(record: TensorRecord, chunks: np.ndarray, covered_bytes: int,
                blocks: np.ndarray | None = None) -> np.ndarray:
    """True where an entry breaks a rule; chunks has one entry per chunk of record, or per block of blocks (rising)."""
    raw = np.full(len(chunks), record.chunk_bytes, np.uint64)
    if len(chunks) and (blocks is None or blocks[-1] == record.n_chunks - 1):
        raw[-1] = record.chunk_size(record.n_chunks - 1)
    filter_, delta, offset = chunks["filter"], chunks["delta"], chunks["offset"]
    stored, covered = chunks["stored_bytes"].astype(np.uint64), np.uint64(covered_bytes)
    room = covered - np.minimum(offset, covered)
    bad = (filter_ > _LAST_FILTER) | (delta > _LAST_DELTA) | (chunks["reserved"] != 0) | (stored > raw)
    bad |= chunks["check_kind"] > _LAST_CHECK
    bad |= (stored > 0) & ((offset < HEADER_BYTES) | (stored > room))
    bad |= (filter_ == Filter.ZERO) != (stored == 0)
    bad |= (filter_ == Filter.RAW) & (stored != raw)
    bad |= _NEVER_DELTA[filter_] & (delta != Delta.NONE)
    bad |= (delta == Delta.ROW) & (record.spec.row_bytes == 0)
    return bad | ((delta == Delta.BASE) & (record.base is None))
