"""Raw bytes of an archive's chunks without a pager. Owns the walk to base archives; refuses to hold more than a few
chunks at a time. For verify and export: tensors are read through the pager."""

from __future__ import annotations

import threading

import numpy as np

from h3store._ffi import lib
from h3store.archive.chunks import load_chunk
from h3store.archive.reader import Reader
from h3store.archive.records import TensorRecord
from h3store.errors import ArchiveChangedError, CorruptArchiveError

__all__ = ["Contents"]

_MAX_BASE_DEPTH: int = lib.H3_MAX_BASE_DEPTH


class Contents:
    """Decoded chunks of one archive, and of those it leans on; usable from several threads at once."""

    def __init__(self, reader: Reader, depth: int = 0) -> None:
        self.reader = reader
        self._depth = depth
        self._bases: dict[str, Contents] = {}
        self._lock = threading.Lock()

    def chunk(self, record: TensorRecord, block: int) -> np.ndarray:
        """One chunk's raw bytes: uint8, shape (chunk_size,).

        Raises:
            CorruptBlockError: it does not decode to what its check promises.
            CorruptArchiveError, ArchiveNotFoundError: of the table, or of the base archive.
        """
        entry, reader = self.reader.chunks(record)[block], self.reader
        return load_chunk(reader.io, record, block, entry, reader.file_bytes, self._base_chunk)

    def span(self, record: TensorRecord, offset: int, nbytes: int) -> np.ndarray:
        """Raw bytes [offset, offset + nbytes) of a tensor: uint8, a copy."""
        out = np.empty(nbytes, np.uint8)
        done = 0
        while done < nbytes:
            block, skip = divmod(offset + done, record.chunk_bytes)
            part = self.chunk(record, block)[skip:skip + nbytes - done]
            out[done:done + len(part)] = part
            done += len(part)
        return out

    def _base_chunk(self, record: TensorRecord, block: int) -> np.ndarray:
        base = self._base(record)
        assert record.base is not None
        of = base.reader.record(record.base.name)
        if (of.nbytes, of.chunk_bytes) != (record.nbytes, record.chunk_bytes):
            raise CorruptArchiveError(f"{base.reader.path}: tensor {of.name[:80]!r} has {of.nbytes} bytes in chunks of "
                                      f"{of.chunk_bytes}; {self.reader.path} leans on it with {record.nbytes} in "
                                      f"chunks of {record.chunk_bytes}")
        return base.chunk(of, block)

    def _base(self, record: TensorRecord) -> Contents:
        path = str(self.reader.base_path(record))
        assert record.base is not None
        with self._lock:
            if path not in self._bases:
                if self._depth + 1 >= _MAX_BASE_DEPTH:
                    raise CorruptArchiveError(f"{self.reader.path}: bases lean on one another over {_MAX_BASE_DEPTH} "
                                              "deep; pack the tensors into an archive of their own")
                self._bases[path] = Contents(Reader(path), self._depth + 1)
            base = self._bases[path]
        if base.reader.uuid != record.base.uuid or base.reader.sequence < record.base.sequence:
            raise ArchiveChangedError(f"{path}: not the archive that {self.reader.path} leans on (uuid "
                                      f"{record.base.uuid.hex()}, commit {record.base.sequence} or later)")
        return base

    def close(self) -> None:
        """Closes the base archives; the reader is the caller's."""
        for base in self._bases.values():
            base.close()
            base.reader.close()
        self._bases.clear()
