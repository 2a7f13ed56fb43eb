"""Checks and descriptions of whole archives. Owns what `h3store verify` and `h3store inspect` show; refuses to
repair."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from h3store.archive.bases import check_bases
from h3store.archive.contents import Contents
from h3store.archive.layout import HEADER_BYTES
from h3store.archive.patches import patch_bases
from h3store.archive.reader import Reader
from h3store.archive.records import ACCESS_CHUNK_BYTES, CHANGE_BYTES, ENTRY_BYTES, TensorRecord
from h3store.codec import MAX_CHUNK_BYTES, Delta, Filter
from h3store.errors import ArchiveError, CorruptArchiveError, TensorNotFoundError

__all__ = ["ArchiveInfo", "BadChunk", "TensorInfo", "VerifyReport", "describe", "verify"]

# Raw bytes of one task: long enough that the interpreter's share is small, short enough for progress.
_SPAN_BYTES = 4 * 1024**2
_ACCESS = {size: name for name, size in ACCESS_CHUNK_BYTES.items()}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BadChunk:
    """Something that does not verify; block is -1 when it is the tensor's chunk table."""

    tensor: str
    block: int
    offset: int
    reason: str


@dataclass(slots=True)
class VerifyReport:
    """What verify found.

    Attributes:
        raw_bytes, stored_bytes: of all chunks, before and after encoding.
        dead_bytes: of the file that the commit covers but nothing refers to.
        tail_bytes: after what the commit covers, from an append that was never committed.
        bad: chunks and tables that do not verify.
    """

    path: str
    sequence: int
    tensors: int = 0
    chunks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    file_bytes: int = 0
    dead_bytes: int = 0
    tail_bytes: int = 0
    bad: list[BadChunk] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every chunk of the commit in use decodes to what its check promises."""
        return not self.bad


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a description.

    Attributes:
        access: how it is meant to be read, told by its chunk size: a key of ACCESS_CHUNK_BYTES; None for other sizes.
        compression: "none" when its writer asked for raw chunks, else "auto".
        filters: chunks by filter and delta, such as {"BYTEPLANE+ROW": 3}.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    chunk_bytes: int
    access: str | None
    compression: str
    filters: dict[str, int]
    base: str | None

    @property
    def ratio(self) -> float:
        """Raw over stored bytes; inf when nothing is stored."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else float("inf")


@dataclass(frozen=True, slots=True)
class ArchiveInfo:
    """A description of an archive; byte counts as in VerifyReport."""

    path: str
    uuid: str
    sequence: int
    file_bytes: int
    dead_bytes: int
    tail_bytes: int
    tensors: list[TensorInfo]
    metadata: dict[str, Any]

    @property
    def raw_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.raw_bytes for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Of all tensors' chunks."""
        return sum(tensor.stored_bytes for tensor in self.tensors)


def _live_bytes(reader: Reader, extents: list[np.ndarray]) -> int:
    """Bytes of the file that the commit refers to, shared ones once."""
    fixed = [(0, HEADER_BYTES), (reader.slot.index_offset, reader.slot.index_bytes)]
    fixed += [(r.table.offset, r.table.n_chunks * ENTRY_BYTES) for r in reader.records.values() if r.table]
    fixed += [(place.offset, place.n_chunks * CHANGE_BYTES) for r in reader.records.values() for place in r.changes]
    spans = np.concatenate([np.array(fixed, np.int64).reshape(-1, 2), *extents])
    spans = spans[spans[:, 1] > 0]
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    stops = np.maximum.accumulate(spans.sum(axis=1))
    before = np.concatenate([[0], stops[:-1]])
    return int(np.maximum(0, stops - np.maximum(spans[:, 0], before)).sum())


def _extents(reader: Reader, chunks: np.ndarray) -> np.ndarray:
    """Where a table's chunks lie, with those that patch records lean on: (n, 2), offset and stored bytes."""
    bases = patch_bases(reader.io, chunks)
    inside = bases["offset"] <= np.uint64(max(0, reader.file_bytes - MAX_CHUNK_BYTES - 1))
    inside |= bases["offset"] + bases["stored_bytes"] <= np.uint64(reader.file_bytes)  # they are not checked yet
    chunks = np.concatenate([chunks, bases[inside & (bases["stored_bytes"] <= MAX_CHUNK_BYTES)]])
    return np.stack([chunks["offset"].astype(np.int64), chunks["stored_bytes"].astype(np.int64)], axis=1)


def describe(path: str | os.PathLike[str]) -> ArchiveInfo:
    """Describes an archive from its index and chunk tables; reads no chunk.

    Raises:
        ArchiveError: of any kind, when the index or a table does not verify.
    """
    with Reader(path) as reader:
        tensors: list[TensorInfo] = []
        extents: list[np.ndarray] = []
        for record in reader.records.values():
            chunks = reader.chunks(record)
            extents.append(_extents(reader, chunks))
            base = f"{record.base.path}:{record.base.name}" if record.base else None
            tensors.append(TensorInfo(record.name, record.dtype, record.shape, record.nbytes,
                                      int(chunks["stored_bytes"].sum(dtype=np.int64)), record.chunk_bytes,
                                      _ACCESS.get(record.chunk_bytes),
                                      "none" if record.spec.is_uncompressed else "auto", _histogram(chunks), base))
            record.chunks = None
        dead = reader.file_bytes - _live_bytes(reader, extents)
        return ArchiveInfo(reader.path, reader.uuid.hex(), reader.sequence, reader.file_bytes, dead,
                           _tail_bytes(reader), tensors, reader.metadata)


def _tail_bytes(reader: Reader) -> int:
    return max(0, os.fstat(reader.fd).st_size - reader.file_bytes)


def _histogram(chunks: np.ndarray) -> dict[str, int]:
    kinds = Counter(zip(chunks["filter"].tolist(), chunks["delta"].tolist(), strict=True))
    names = {kind: Filter(kind[0]).name + (f"+{Delta(kind[1]).name}" if kind[1] else "") for kind in kinds}
    return {names[kind]: kinds[kind] for kind in sorted(kinds)}


def verify(path: str | os.PathLike[str], progress: Progress | None = None, threads: int | None = None) -> VerifyReport:
    """Reads and decodes every chunk of the last commit and compares each with its check.

    Args:
        path: of the archive.
        progress: called from this thread with (raw bytes done, raw bytes in all).
        threads: decoding threads; None: one per processor. Memory stays at a few MiB a thread.

    Raises:
        ArchiveNotFoundError, ArchiveFormatError, CorruptArchiveError: the last commit cannot be read, or an archive
            that it leans on is not there or another one. What is wrong with single tensors and chunks is reported.
    """
    threads = threads or len(os.sched_getaffinity(0))
    with Reader(path) as reader, ThreadPoolExecutor(threads) as pool:
        report = VerifyReport(reader.path, reader.sequence, len(reader.records), file_bytes=reader.file_bytes,
                              tail_bytes=_tail_bytes(reader))
        check_bases(reader)
        contents = Contents(reader)
        total = sum(record.nbytes for record in reader.records.values())
        done = 0
        extents: list[np.ndarray] = []
        waiting: deque[tuple[Future[list[BadChunk]], int]] = deque()
        try:
            for record, first, last in _spans(reader, report, extents):
                if len(waiting) >= 4 * threads:
                    done = _finish(waiting, report, done, total, progress)
                size = min(last * record.chunk_bytes, record.nbytes) - first * record.chunk_bytes
                waiting.append((pool.submit(_check_span, contents, record, first, last), size))
            while waiting:
                done = _finish(waiting, report, done, total, progress)
        finally:
            pool.shutdown(cancel_futures=True)
            contents.close()
        report.dead_bytes = reader.file_bytes - _live_bytes(reader, extents)
        return report


def _spans(reader: Reader, report: VerifyReport, extents: list[np.ndarray]) -> Iterator[tuple[TensorRecord, int, int]]:
    """Tasks (record, first, last); counts tables on the way and reports those that do not verify."""
    for record in reader.records.values():
        try:
            chunks = reader.chunks(record)
        except CorruptArchiveError as error:
            report.bad.append(BadChunk(record.name, -1, record.table.offset if record.table else 0, str(error)))
            continue
        extents.append(_extents(reader, chunks))
        report.chunks += len(chunks)
        report.raw_bytes += record.nbytes
        report.stored_bytes += int(chunks["stored_bytes"].sum(dtype=np.int64))
        step = max(1, _SPAN_BYTES // record.chunk_bytes)
        for first in range(0, len(chunks), step):
            yield record, first, min(first + step, len(chunks))


def _check_span(contents: Contents, record: TensorRecord, first: int, last: int) -> list[BadChunk]:
    bad: list[BadChunk] = []
    for block in range(first, last):
        try:
            contents.chunk(record, block)
        except (ArchiveError, TensorNotFoundError) as error:
            bad.append(BadChunk(record.name, block, int(contents.reader.chunks(record)[block]["offset"]), str(error)))
    return bad


def _finish(waiting: deque[tuple[Future[list[BadChunk]], int]], report: VerifyReport, done: int, total: int,
            progress: Progress | None) -> int:
    """Takes the oldest task's result and returns the bytes done so far."""
    task, size = waiting.popleft()
    report.bad += task.result()
    if progress is not None:
        progress(done + size, total)
    return done + size
