"""A new file with what the old one's last commit needs, in its place. Owns the copy of chunks; refuses to encode
anything but records of changed pages, which become whole chunks again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np

from h3store.archive.contents import Contents
from h3store.archive.reader import Reader
from h3store.archive.records import TensorRecord
from h3store.archive.writer import Writer
from h3store.codec import CHUNK_DTYPE, Filter, encode_chunk

__all__ = ["compacted"]

# Copied at once: adjacent chunks travel together, and an interrupt waits for no more.
_COPY_BYTES = 16 * 1024**2


def compacted(old: Writer) -> Writer:
    """Writes the last commit of an archive anew, without dead chunks, and puts the new file in the old one's place.

    Every chunk travels as it is stored, with its check; tensors that share chunks go on sharing them. The new file
    keeps uuid and sequence, so that archives saved against this one still find their base. Readers that have the old
    file open go on reading it. A crash leaves the old file or the new one, whole.

    Args:
        old: with nothing uncommitted; it stays open and locked, over a file that has lost its name.

    Returns: the writer of the new file, which holds its lock.

    Raises:
        StorageFullError, ArchiveError, CorruptBlockError: the old file stands.
    """
    new = Writer(old.path, "w", visible=False, replacing=old)
    try:
        new.metadata.update(old.metadata)
        with Reader(old.path) as reader, closing(Contents(reader)) as contents:
            tables = {name: old.chunks(record).copy() for name, record in old.records.items()}
            _copy_chunks(old, new, list(tables.values()))
            for name, record in old.records.items():
                _fold(contents, new, reader.records[name], tables[name])
                new.put(replace(record, chunks=tables[name]))
        new.commit()
    except BaseException:
        new.close()
        raise
    return new


def _copy_chunks(old: Writer, new: Writer, tables: list[np.ndarray]) -> None:
    """Copies what entries refer to, each place once, and makes them refer to the copies. Leaves records of pages."""
    plain = [table[(table["stored_bytes"] > 0) & (table["filter"] != Filter.PATCH)] for table in tables]
    entries = np.concatenate([np.empty(0, CHUNK_DTYPE), *plain])
    offsets, which = np.unique(entries["offset"].astype(np.int64), return_index=True)
    sizes = entries["stored_bytes"][which].astype(np.int64)
    moved = np.empty_like(offsets)
    for first, end in _runs(offsets, sizes):
        start, stop = int(offsets[first]), int(offsets[end - 1] + sizes[end - 1])
        place = new.io.append(old.io.read(start, stop - start, "chunks"), "chunks")
        moved[first:end] = offsets[first:end] - start + place
    for table in tables:
        mine = (table["stored_bytes"] > 0) & (table["filter"] != Filter.PATCH)
        table["offset"][mine] = moved[np.searchsorted(offsets, table["offset"][mine].astype(np.int64))]


def _runs(offsets: np.ndarray, sizes: np.ndarray) -> Iterator[tuple[int, int]]:
    """(first, end) of neighbours that one read brings."""
    first = 0
    while first < len(offsets):
        end = first + 1
        while (end < len(offsets) and offsets[end] == offsets[end - 1] + sizes[end - 1]
               and offsets[end] + sizes[end] - offsets[first] <= _COPY_BYTES):  # fmt: skip
            end += 1
        yield first, end
        first = end


def _fold(contents: Contents, new: Writer, record: TensorRecord, table: np.ndarray) -> None:
    """Makes whole chunks of a tensor's records of changed pages."""
    for block in np.flatnonzero(table["filter"] == Filter.PATCH).tolist():
        raw = contents.chunk(record, block)
        entry, stored = encode_chunk(raw, record.spec)
        if stored:
            entry["offset"] = new.io.append(stored, "a folded chunk")
        table[block] = entry
