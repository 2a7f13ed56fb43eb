"""Writing an archive: append, then commit. Owns the lock, the temporary file of a new archive, and the order of writes
and flushes that makes a commit atomic; refuses to choose specs.

Threads: native code may append chunks through Writer.file while any method runs; methods exclude one another.
"""

from __future__ import annotations

import os
import threading
import uuid as uuid_module
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from h3store._ffi import check, ffi, lib
from h3store.archive.fileio import FileIO
from h3store.archive.index import encode_index
from h3store.archive.layout import (
    FEATURE_BASE,
    FEATURE_CHANGES,
    FEATURE_PATCH,
    FEATURE_QUICK,
    FEATURE_XXH3,
    SLOT_BYTES,
    Header,
    Slot,
    xxh64,
)
from h3store.archive.place import Place
from h3store.archive.reader import Reader, checked_path
from h3store.archive.records import DEFAULT_CHUNK_BYTES, BaseRef, TensorRecord
from h3store.archive.tables import bad_entries, read_table, to_write, write_tables
from h3store.codec import CHUNK_DTYPE, CheckKind, Filter, Spec
from h3store.errors import StoreClosedError, TensorNotFoundError, UsageError

__all__ = ["Writer"]

# Raw bytes that native code encodes between two chances for an interrupt: about 0.1 s on one core.
_PIECE_BYTES = 64 * 1024**2
# Up to so many new stored bytes a commit waits for the disk once; after a crash a reader may have to check all of them.
_QUICK_BYTES = 16 * 1024**2

# The same for bytes that come from a file: a piece at a time, so that memory does not grow with the tensor.
_READ_BYTES = 16 * 1024**2

Bytes = int | bytes | bytearray | memoryview | np.ndarray
Source = Callable[[int, int], Bytes]  # (start, stop) to those bytes of the tensor, valid until the next call


class Writer:
    """An archive open for writing by this process alone.

    Attributes:
        path: as given.
        uuid: 16 bytes, made with the file.
        sequence: number of the last commit; 0 before a replaced file's first.
        records: tensors by name as the next commit will list them; change them by put, add and remove.
        metadata: the writer's own, JSON types; change it in place.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str = "w", *, visible: bool = True,
                 replacing: Writer | None = None) -> None:
        """Opens an archive.

        Args:
            path: of the archive.
            mode: "w" makes a new one: an old file at path stays as it is until the first commit, then it is replaced;
                where there was none, an empty archive is committed at once. "r+" opens the last commit and cuts off
                what was appended after it.
            visible: False keeps a new archive from its path until the first real commit.
            replacing: with "w": the writer that has the old file locked; uuid and sequence go on.

        Raises:
            ArchiveLockedError: another writer has it. ArchiveNotFoundError, ArchiveFormatError, CorruptArchiveError,
            StorageFullError, ArchiveError. UsageError: another mode.
        """
        if mode not in ("w", "r+"):
            raise UsageError(f"{os.fspath(path)}: mode {mode!r}; a writer opens with \"w\" or \"r+\"")
        self.path = checked_path(path)
        self.records: dict[str, TensorRecord] = {}
        self.metadata: dict[str, Any] = {}
        self.sequence = 0
        self.covered_bytes = 0
        self._index = b""
        self._is_placeholder = False  # all that lies at path is the empty archive that this writer began with
        self._to_seal: Slot | None = None  # of the last commit
        self._lasting = 0  # feature bits that stay from the first chunk that needs them on
        self._lock = threading.RLock()
        self._io: FileIO | None = None
        self._place = Place(self.path, new=mode == "w", held=replacing is not None)
        try:
            if mode == "w":
                self._start_new(visible, replacing)
            else:
                self._start_at_last_commit()
        except BaseException:
            self.close()
            raise

    def _start_new(self, visible: bool, replacing: Writer | None) -> None:
        self.uuid: bytes = uuid_module.uuid4().bytes if replacing is None else replacing.uuid
        self.sequence = 0 if replacing is None else replacing.sequence
        self._io = FileIO(self._place.fd, 0, self.path, writable=True)
        self.io.append(Header(self.uuid).to_bytes(), "header")
        if visible and not self._place.replaces:
            self.commit()
            self._is_placeholder = True

    def _start_at_last_commit(self) -> None:
        with Reader(self.path, fd=self._place.fd) as reader:
            self.uuid, self.records, self.metadata = reader.uuid, reader.records, reader.metadata
            self.sequence, self.covered_bytes = reader.sequence, reader.file_bytes
            slot, unfinished = reader.slot, reader.unfinished
            self._lasting = reader.slot.required & (FEATURE_PATCH | FEATURE_XXH3)
            self._index = reader.io.read(reader.slot.index_offset, reader.slot.index_bytes, "index")
        self._place.truncate(self.covered_bytes)
        self._io = FileIO(self._place.fd, self.covered_bytes, self.path, writable=True)
        # Quick commits rely on the one before being on disk: a killed writer may have left it in memory.
        if unfinished is not None:
            self._io.overwrite(unfinished.offset, bytes(SLOT_BYTES), "commit slot")
        self._io.sync("last commit")
        if slot.unsealed:
            self._to_seal = slot
            self._seal()

    @property
    def io(self) -> FileIO:
        """The open file.

        Raises:
            StoreClosedError: after close.
        """
        if self._io is None:
            raise StoreClosedError(f"{self.path}: the archive is closed; open it again")
        return self._io

    @property
    def fd(self) -> int:
        """The open descriptor: of the temporary file until the first commit of an archive that replaces another."""
        return self._place.fd

    @property
    def file(self) -> Any:
        """The h3_file that native code appends to and reads from; valid until close."""
        return self.io.native

    def record(self, name: str) -> TensorRecord:
        """The record of a tensor.

        Raises:
            TensorNotFoundError.
        """
        if name not in self.records:
            raise TensorNotFoundError(f"{self.path}: no tensor {name!r} among {len(self.records)}")
        return self.records[name]

    def chunks(self, record: TensorRecord) -> np.ndarray:
        """The chunk table of a record of this archive: dtype CHUNK_DTYPE, shape (n_chunks,), read-only."""
        if record.chunks is None:
            record.chunks = read_table(self.io, record, self.covered_bytes)
        return record.chunks

    def put(self, record: TensorRecord) -> None:
        """Inserts or replaces a tensor whose chunks native code has appended already; chunks is copied.

        Raises:
            UsageError: a field or a chunk entry breaks a rule of the format.
        """
        with self._lock:
            record.validate()
            chunks = np.ascontiguousarray(record.chunks, CHUNK_DTYPE).copy() if record.chunks is not None else None
            if chunks is None or chunks.shape != (record.n_chunks,):
                raise UsageError(f"{self.path}: tensor {record.name[:80]!r} needs {record.n_chunks} chunk entries, got "
                                 f"{'none' if chunks is None else chunks.shape}")
            before = self.records.get(record.name)
            blocks = _differing(before, chunks)
            self._check_entries(record, chunks, blocks)
            chunks.flags.writeable = False
            made = replace(record, chunks=chunks, metadata=dict(record.metadata), table=None, changes=(), changed=[],
                           pending=None, unflushed=np.arange(len(chunks)) if blocks is None else None)
            if blocks is not None:
                assert before is not None
                made.table, made.changes, made.changed = before.table, before.changes, before.changed
                made.pending, made.unflushed = _joined(before.pending, blocks), _joined(before.unflushed, blocks)
            self.records[record.name] = made

    def update(self, record: TensorRecord, blocks: np.ndarray) -> None:
        """Takes a record back whose chunks array, this writer's own, was changed in place.

        Args:
            record: of an existing name; chunks may have grown.
            blocks: numbers of the changed chunks, rising; the new ones among them.

        Raises:
            UsageError: as put.
        """
        with self._lock:
            assert record.chunks is not None
            record.validate()
            self._check_entries(record, record.chunks, blocks)
            if record.table is not None:
                record = replace(record, pending=_joined(record.pending, blocks))
            self.records[record.name] = replace(record, unflushed=_joined(record.unflushed, blocks))

    def _check_entries(self, record: TensorRecord, chunks: np.ndarray, blocks: np.ndarray | None) -> None:
        entries = chunks if blocks is None else chunks[blocks]
        bad = bad_entries(record, entries, self.io.tail, blocks)
        if bad.any():
            which = int(np.argmax(bad))
            block = which if blocks is None else int(blocks[which])
            raise UsageError(f"{self.path}: tensor {record.name[:80]!r}: entry {block} is {chunks[block]}, outside "
                             f"the rules of the format or the {self.io.tail} bytes of the file")
        if (entries["filter"] == Filter.PATCH).any():
            self._lasting |= FEATURE_PATCH
        if (entries["check_kind"] == CheckKind.XXH3).any():
            self._lasting |= FEATURE_XXH3

    def add(self, name: str, data: Bytes | Source, dtype: str, shape: tuple[int, ...], spec: Spec,
            chunk_bytes: int = DEFAULT_CHUNK_BYTES, *, base: BaseRef | None = None, base_data: Bytes | None = None,
            metadata: Mapping[str, Any] | None = None, threads: int | None = None) -> TensorRecord:
        """Encodes a tensor and appends it; it is durable after commit. Blocks; other Python threads run meanwhile.

        Args:
            data: its bytes in C order, as an address, a contiguous buffer of exactly the tensor's bytes, or a function
                that reads pieces of them.
            base, base_data: for Delta.BASE: the reference to record, and the base tensor's bytes, as long as data.
            threads: encoding threads; None: one per processor.

        Raises:
            UsageError, StorageFullError, ArchiveError. After an error the archive is as it was before the call.
        """
        record = TensorRecord(name, dtype, tuple(shape), spec, chunk_bytes, base=base, metadata=dict(metadata or {}))
        record.validate()
        record.chunks = np.zeros(record.n_chunks, CHUNK_DTYPE)
        try:
            self._encode(record, data, base_data, threads or len(os.sched_getaffinity(0)))
            self.put(record)
        except BaseException:
            self._discard(record.chunks)
            raise
        return self.records[name]

    def _encode(self, record: TensorRecord, data: Bytes | Source, base_data: Bytes | None, threads: int) -> None:
        what = f"{self.path}: data of {record.name[:80]!r}"
        raw, keep = (ffi.NULL, None) if callable(data) else _pointer(data, record.nbytes, what)
        base, keep_base = ffi.NULL, None
        if base_data is not None and record.base is not None:
            base, keep_base = _pointer(base_data, record.nbytes, f"{self.path}: base data of {record.name[:80]!r}")
        spec, size = record.spec.to_native(), record.chunk_bytes
        step = max(1, (_READ_BYTES if callable(data) else _PIECE_BYTES) // size)
        entries = ffi.cast("h3_chunk *", ffi.from_buffer(record.chunks, require_writable=True))
        for first in range(0, record.n_chunks, step):
            start, stop = first * size, min((first + step) * size, record.nbytes)
            at_base = base + start if base != ffi.NULL else base
            if callable(data):
                at_raw, keep = _pointer(data(start, stop), stop - start, what)
            else:
                at_raw = raw + start
            status = lib.h3_encode_append(self.file, spec, at_raw, stop - start, size, at_base, threads,
                                          entries + first)
            check(status, f"{self.path}: write of {record.name[:80]!r}")
        del keep, keep_base

    def _discard(self, chunks: np.ndarray) -> None:
        """Gives back the disk space of chunks that nothing refers to."""
        used = np.sort(chunks[chunks["stored_bytes"] > 0], order="offset")
        for start, stop in _runs(used):
            if self._io is not None:
                lib.h3_file_discard(self._io.native, start, stop - start)

    def remove(self, name: str) -> None:
        """Forgets a tensor from the next commit on; its bytes become dead.

        Raises:
            TensorNotFoundError.
        """
        with self._lock:
            self.record(name)
            del self.records[name]

    def commit(self) -> int:
        """Makes records and metadata durable and returns the sequence number. Nothing is written when nothing changed.

        Raises:
            StorageFullError, ArchiveError: the last commit stands (or, when the very last flush failed, this one), and
            commit may be called again. UsageError: metadata that JSON cannot hold.
        """
        with self._lock:
            self._write_tables()
            index = encode_index(self.records, self.metadata)
            if index != self._index or self._place.pending:
                self._publish(index)
            self._seal()
            return self.sequence

    def _write_tables(self) -> None:
        changed = [record for record in self.records.values() if record.table is None or record.pending is not None]
        parts = [to_write(record) for record in changed]
        places = write_tables(self.io, [part.data for part in parts])
        for record, (data, kept), place in zip(changed, parts, places, strict=True):
            if kept < 0:
                record.table, record.changes, record.changed = place, (), []
            else:
                record.changes = (*record.changes[:kept], place)
                record.changed = [*record.changed[:kept], data["block"].astype(np.int64)]
            record.pending = None

    def _publish(self, index: bytes) -> None:
        offset = self.io.append(index, "index")
        required = self._lasting
        required |= FEATURE_BASE if any(record.base for record in self.records.values()) else 0
        required |= FEATURE_CHANGES if any(record.changes for record in self.records.values()) else 0
        slot = Slot(self.sequence + 1, offset, len(index), xxh64(index), offset + len(index), required)
        start = self._quick_start()
        if start is None:
            self.io.sync("chunks and index")
        else:
            slot = replace(slot, required=required | FEATURE_QUICK, start=start)
        self._is_placeholder = False
        self.io.overwrite(slot.offset, slot.to_bytes(self.uuid), "commit slot")
        self.io.sync("commit")
        self._place.publish()
        self.sequence, self.covered_bytes, self._index = slot.sequence, slot.covered_bytes, index
        for record in self.records.values():
            record.unflushed = None
        self._to_seal = slot if start is not None else None

    def _seal(self) -> None:
        """After the flush of a quick commit."""
        if self._to_seal is not None:
            self.io.overwrite(*self._to_seal.seal(self.uuid), "seal of the commit")
            self._to_seal = None

    def _quick_start(self) -> int | None:
        """Lowest offset of what was not flushed with an earlier commit; None when the commit has to wait twice."""
        if self._place.pending:
            return None
        start, size = self.covered_bytes, 0
        for record in self.records.values():
            if record.unflushed is None or record.chunks is None:
                continue
            entries = record.chunks[record.unflushed]
            entries = entries[entries["stored_bytes"] > 0]
            size += int(entries["stored_bytes"].sum(dtype=np.int64))
            if record.base is not None or size > _QUICK_BYTES:
                return None
            start = min(start, int(entries["offset"].min(initial=start)))
        return start

    def forget(self) -> None:
        """Before close: takes a new archive that nothing was committed to away from its path."""
        with self._lock:
            if self._is_placeholder:
                self._place.unlink()
                self._is_placeholder = False

    def cut_tail(self) -> None:
        """Before close: gives back what was appended since the last commit. Nothing may still read there."""
        with self._lock:
            if self._io is not None and not self._place.pending and self.io.tail > self.covered_bytes:
                self._place.truncate(self.covered_bytes)

    def close(self) -> None:
        """Closes without a commit: what was not committed is gone. Native code may no longer use file."""
        with self._lock:
            if self._io is not None:
                self._io.close()
                self._io = None
            self._place.close()

    def __del__(self) -> None:
        # Ranges hold their writer: descriptor and lock go with the last of them.
        if getattr(self, "_io", None) is not None:
            self.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _differing(before: TensorRecord | None, chunks: np.ndarray) -> np.ndarray | None:
    """Blocks whose entries are not those of a record's table in the file; None when the table is of no use."""
    if before is None or before.table is None or before.chunks is None or len(chunks) < len(before.chunks):
        return None
    old = len(before.chunks)
    words = chunks[:old].view("<u8").reshape(-1, 3) != before.chunks.view("<u8").reshape(-1, 3)
    blocks = np.flatnonzero(words.any(axis=1))
    return blocks if len(chunks) == old else np.concatenate([blocks, np.arange(old, len(chunks))])


def _joined(one: np.ndarray | None, other: np.ndarray) -> np.ndarray | None:
    found = other if one is None else np.union1d(one, other)
    return found if len(found) else None


def _runs(entries: np.ndarray) -> list[tuple[int, int]]:
    """Merges entries, sorted by offset, into (start, stop) byte ranges."""
    runs: list[tuple[int, int]] = []
    for offset, size in zip(entries["offset"].tolist(), entries["stored_bytes"].tolist(), strict=True):
        if runs and runs[-1][1] == offset:
            runs[-1] = runs[-1][0], offset + size
        else:
            runs.append((offset, offset + size))
    return runs


def _pointer(data: Bytes, nbytes: int, what: str) -> tuple[Any, Any]:
    """A uint8_t pointer to data, and what keeps it alive."""
    if isinstance(data, int):
        return ffi.cast("uint8_t *", data), None
    try:
        held = ffi.from_buffer(data)
    except (BufferError, ValueError, TypeError) as error:
        raise UsageError(f"{what}: not a contiguous buffer ({error}); pass a contiguous uint8 array") from error
    if len(held) != nbytes:
        raise UsageError(f"{what}: {len(held)} bytes, but shape and dtype make {nbytes}")
    return ffi.cast("uint8_t *", held), held
