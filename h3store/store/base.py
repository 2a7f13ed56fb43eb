"""An open archive: its tensors and the ranges over them under one ddr budget. Owns reading, and what outlives the
archive; refuses to change it."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from h3store.archive import Reader, TensorRecord, Writer, checked_path
from h3store.codec import MAX_BASE_DEPTH, Delta
from h3store.errors import (
    ArchiveChangedError,
    BudgetError,
    CorruptArchiveError,
    StoreClosedError,
    TensorNotFoundError,
    UsageError,
)
from h3store.pager import Pager, Range
from h3store.store.encode import check_is_name, torch_dtype
from h3store.store.origin import Origin, origin_of
from h3store.tensor import TieredTensor, over_range
from h3store.tiers import file_handle, open_range
from h3store.units import MiB, available_memory, exact_bytes, parse_bytes

__all__ = ["OpenArchive", "locked"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def default_budget() -> int:
    """Returns the ddr budget when none is given: a quarter of the memory that is available now, 64 MiB at least."""
    return max(64 * MiB, available_memory() // 4)


def locked(method: _Method) -> _Method:
    """One thread at a time; a method may call another."""

    @functools.wraps(method)
    def wrapper(self: OpenArchive, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, wrapper)


class _Descriptor:
    """A descriptor of its own, closed with its last user."""

    def __init__(self, source_fd: int) -> None:
        self.fd = os.open(f"/proc/self/fd/{source_fd}", os.O_RDONLY | os.O_CLOEXEC)
        self.native = file_handle(self.fd, os.fstat(self.fd).st_size, writable=False)

    def __del__(self) -> None:
        fd = getattr(self, "fd", -1)
        if fd >= 0:
            self.native = None
            os.close(fd)
            self.fd = -1


class OpenArchive:
    """Named tensors of one archive, to be read. Any thread may call any method."""

    def __init__(self, path: str | os.PathLike[str], mode: str = "r", ddr_bytes: int | str | None = None,
                 *, pager: Pager | None = None) -> None:
        if mode not in ("r", "r+", "w"):
            raise UsageError(f'mode {mode!r} is not known; use "r", "r+" or "w"')
        self.path = Path(checked_path(path))
        self.mode = mode
        if pager is not None:  # a budget that several stores share
            ddr_bytes = pager.ddr_bytes
        self._ddr_bytes = default_budget() if ddr_bytes is None else parse_bytes(ddr_bytes, "ddr_bytes")
        if self._ddr_bytes < 4096:
            raise BudgetError(f"ddr_bytes={exact_bytes(self._ddr_bytes)} is below one page of 4KiB; give at least 1MiB")
        self._pid = os.getpid()
        self._lock = threading.RLock()
        _stores.add(self)
        self._pager = pager
        self._archive: Reader | Writer | None = Reader(path) if mode == "r" else Writer(path, mode)
        self._readers: dict[Path, Reader] = {}
        self._was_forked = False  # a child may read what this process has written and not committed
        self._open: dict[str, Range] = {}  # writable ranges: changed blocks live in them until commit
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._fresh: set[str] = set()  # created since the last commit: their spec is still to be chosen
        self._unsure: set[str] = set()  # which entries changed is not known: all of the table has to be written
        self._live: weakref.WeakValueDictionary[tuple[Any, bool], Range] = weakref.WeakValueDictionary()
        self._ranges: weakref.WeakSet[Range] = weakref.WeakSet()  # every range over this store's own file

    # ---- what exists ----

    @property
    def archive(self) -> Reader | Writer:
        if self._archive is None:
            raise StoreClosedError(f"{self.path}: the store was closed; open it again")
        return self._archive

    @property
    def writable(self) -> bool:
        return self.mode != "r"

    @property
    def ddr_bytes(self) -> int:
        """The budget of resident bytes."""
        return self._ddr_bytes

    @property
    def folder(self) -> Path:
        """Where scratch files go: beside the archive."""
        return self.path.parent if str(self.path.parent) else Path(".")

    @property
    def pager(self) -> Pager:
        with self._lock:
            if self._pager is None:
                self._pager = Pager(self._ddr_bytes)
            return self._pager

    def keys(self) -> list[str]:
        """Returns the names of all tensors."""
        return list(self.archive.records)

    def __contains__(self, name: object) -> bool:
        return name in self.archive.records

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.archive.records)

    def record(self, name: str) -> TensorRecord:
        """Returns what the archive says of a tensor."""
        check_is_name(name)
        record = self.archive.records.get(name)
        if record is None:
            raise TensorNotFoundError(
                f"{self.path}: no tensor named {name!r}; it holds {len(self)} tensors, see keys()"
            )
        return record

    # ---- reading ----

    @locked
    def range(self, name: str, *, cyclic: bool = False) -> Range:
        """Returns the range over a tensor, shared by every tensor over it: one per name, or per tied names."""
        record = self.record(name)
        if name in self._open:
            return self._open[name]
        key = (self._content(record), cyclic)
        live = self._live.get(key)
        if live is None:
            live = self._open_range(record, self.archive, cyclic)
            self._live[key] = live
        return live

    def _content(self, record: TensorRecord) -> Any:
        """What two names must have in common to share a range: where nothing is written, the same chunks."""
        if self.writable or record.table is None or not record.n_chunks:
            return record.name
        return record.table[1:], record.nbytes, record.dtype, record.spec, record.chunk_bytes, record.base

    def _tensor(self, name: str, tiered: Range) -> TieredTensor:
        record = self.record(name)
        return over_range(tiered, torch_dtype(record.dtype), self._shapes.get(name, record.shape))

    @locked
    def read(self, name: str) -> torch.Tensor:
        """Returns a copy of a tensor in ordinary memory."""
        return self._tensor(name, self.range(name)).clone()

    def _open_range(
        self,
        record: TensorRecord,
        archive: Reader | Writer,
        cyclic: bool = False,
        writable: bool = False,
        capacity_bytes: int = 0,
        depth: int = 0,
    ) -> Range:
        chunks = archive.chunks(record)
        base, label = None, f"{archive.path}: tensor {record.name!r}"
        if record.base is not None and bool((chunks["delta"] == Delta.BASE).any()):
            base = self._base_range(record, archive, depth)
            if self._base_reader(record, archive).sequence != record.base.sequence:
                label += f" (a difference to {record.base.path}, which was written since)"
        tiered = open_range(
            self.pager,
            record,
            chunks,
            file=archive.file,
            owner=archive,
            writable=writable,
            cyclic=cyclic,
            capacity_bytes=capacity_bytes,
            base=base,
            label=label,
        )
        if archive is self._archive:
            self._ranges.add(tiered)
            if not writable and isinstance(archive, Reader):
                tiered.origin = self._origin(record.name)
        return tiered

    def _origin(self, name: str) -> Origin:
        return os.path.abspath(self.path), name, origin_of(self.archive, name)

    def _base_range(self, record: TensorRecord, archive: Reader | Writer, depth: int) -> Range:
        ref = record.base
        assert ref is not None
        if depth >= MAX_BASE_DEPTH - 1:
            raise CorruptArchiveError(
                f"{archive.path}: tensor {record.name!r} leans on over 8 archives in a row; save it whole"
            )
        reader = self._base_reader(record, archive)
        return self._open_range(reader.record(ref.name), reader, depth=depth + 1)

    def _base_reader(self, record: TensorRecord, archive: Reader | Writer) -> Reader:
        ref = record.base
        assert ref is not None
        path = Path(archive.path).parent / ref.path
        if path not in self._readers:
            self._readers[path] = Reader(path)
        reader = self._readers[path]
        if reader.uuid != ref.uuid:
            raise ArchiveChangedError(
                f"{archive.path}: tensor {record.name!r} needs the base archive {path} that it was saved "
                "against; another file lies there now"
            )
        return reader

    # ---- end ----

    def stats(self) -> dict[str, Any]:
        """Returns counters of the ddr budget (see Pager.stats) and of the file."""
        values: dict[str, Any] = dict(self.pager.stats())
        values["file_bytes"] = os.stat(self.path).st_size if self.path.exists() else 0
        values["tensors"] = len(self)
        return values

    def _detach(self, writer: Writer) -> None:
        """Tensors that outlive the store read through a descriptor of their own."""
        live = list(self._ranges)
        if live:
            descriptor = _Descriptor(writer.fd)
            for tiered in live:
                tiered.detach(descriptor.native, descriptor)


_stores: weakref.WeakSet[OpenArchive] = weakref.WeakSet()


def _in_forked_child() -> None:
    """A thread that held a store's lock over the fork is not here to let go of it."""
    for store in _stores:
        store._lock = threading.RLock()


def _after_fork() -> None:
    for store in list(_stores):
        store._was_forked = True


os.register_at_fork(after_in_child=_in_forked_child, after_in_parent=_after_fork)
