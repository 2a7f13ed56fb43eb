"""Store: named tensors of one archive under one ddr budget. Owns what exists, which ranges are open, and commits;
refuses to know what tensors mean."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import torch

from h3store.archive import TensorRecord, Writer, compacted
from h3store.codec import CHUNK_DTYPE, Spec, choose_spec, default_spec, raw_spec
from h3store.errors import ArchiveError, ReadOnlyError, UsageError
from h3store.pager import Range
from h3store.store.base import OpenArchive, locked
from h3store.store.encode import (
    CHUNK_BYTES,
    add_tensor,
    check_is_name,
    check_size,
    check_storable,
    checked_shape,
    chunk_bytes_for,
    is_compressed,
    name_of,
    range_samples,
    row_bytes_of,
    torch_dtype,
    zero_table,
)
from h3store.tensor import TieredTensor, over_range
from h3store.tiers.ddr import native_spec
from h3store.units import MiB

__all__ = ["Store"]

# Writable tensors reserve this much more address space than they have bytes, so that appends need no new range.
_GROWTH = 4
_GROWTH_BYTES = 64 * MiB


class Store(OpenArchive):
    """Named tensors of one archive. Made by h3store.open().

    Any thread may call any method. Tensors stay valid after close(), read-only. Leaving a with-block commits, unless an
    exception is under way.
    """

    # ---- reading ----

    @locked
    def __getitem__(self, name: str) -> TieredTensor:
        """Returns a tensor: writable in modes "r+" and "w", read-only in mode "r". Reads nothing yet."""
        record = self.record(name)
        tiered = self._writable_range(name) if self.writable and record.base is None else self.range(name)
        return self._tensor(name, tiered)

    @locked
    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Replaces a tensor, or adds one; `store[name] += 1` changes it in place. Durable after commit()."""
        if name in self._open and isinstance(value, TieredTensor):
            own = self[name]
            if (value.data_ptr(), value.shape, value.stride(), value.dtype) == (
                own.data_ptr(),
                own.shape,
                own.stride(),
                own.dtype,
            ):
                return
        self.put(name, value)

    # ---- writing ----

    @property
    def file(self) -> Any:
        """The archive's native file, for native code that appends chunks."""
        return self._writer().file

    def _writer(self) -> Writer:
        archive = self.archive
        if not isinstance(archive, Writer):
            raise ReadOnlyError(f'{self.path} was opened with mode="r"; open it with mode="r+" to write')
        if os.getpid() != self._pid:
            raise ReadOnlyError(f"{self.path} is written by the parent process; a forked child only reads it")
        return archive

    def _writable_range(self, name: str, min_bytes: int = 0) -> Range:
        check_is_name(name)
        if name not in self._open:
            record = self.record(name)
            if record.base is not None:
                raise ReadOnlyError(
                    f"{self.path}: {name!r} is stored as its difference to another archive and cannot be changed in "
                    "place; put() it whole first"
                )
            need = max(record.nbytes, min_bytes)
            self._open[name] = self._open_range(
                record, self._writer(), writable=True, capacity_bytes=_GROWTH * need + _GROWTH_BYTES
            )
            self._shapes[name] = record.shape
        return self._open[name]

    @locked
    def create(
        self,
        name: str,
        shape: int | Sequence[int],
        dtype: torch.dtype,
        *,
        access: str | None = None,
        compression: str | None = None,
        chunk_bytes: int | None = None,
    ) -> TieredTensor:
        """Returns a new writable tensor of zeros.

        Until written it takes no memory or disk but its tables: under 100 bytes for each chunk (1.4 MiB for 1 GiB).

        Args:
            name: 1 to 1024 bytes of UTF-8, not yet in the store.
            shape, dtype: as torch.zeros takes them.
            access: how it will be read: "random" (rows here and there: chunks of 16 KiB), "stream" (whole and in order:
                512 KiB) or "default" (64 KiB; also None).
            compression: "none" stores raw bytes, now and whenever it is written; "auto" (also None) compresses.
            chunk_bytes: unit of compression and residency, a multiple of 4096 up to 4 MiB, instead of access.

        Raises:
            UsageError: the name exists, or an argument breaks its rule. ReadOnlyError: mode "r".
        """
        writer = self._writer()
        check_is_name(name)
        if name in writer.records:
            raise UsageError(f"{self.path}: a tensor named {name!r} exists; remove it first, or choose another name")
        sizes, dtype_name = checked_shape(name, shape), name_of(dtype)
        make_spec = default_spec if is_compressed(compression) else raw_spec
        spec = make_spec(dtype_name, row_bytes_of(sizes, dtype))
        record = TensorRecord(name, dtype_name, sizes, spec, chunk_bytes_for(access, chunk_bytes))
        check_size(record)
        record.chunks = zero_table(record)
        writer.put(record)
        self._fresh.add(name)
        try:
            return self[name]
        except BaseException:
            self.remove(name)
            raise

    @locked
    def put(
        self,
        name: str,
        tensor: torch.Tensor | np.ndarray,
        *,
        access: str | None = None,
        compression: str | None = None,
    ) -> None:
        """Writes a whole tensor, replacing one of that name; durable after commit().

        Args:
            access, compression: as create() takes them; None: those of the tensor that it replaces.
        """
        writer = self._writer()
        old = writer.records.get(name) if isinstance(name, str) else None
        chunk_bytes = chunk_bytes_for(access, usual=old.chunk_bytes if old else CHUNK_BYTES)
        compress = is_compressed(compression, usual=not (old and old.spec.is_uncompressed))
        value = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else tensor
        add_tensor(writer, name, value, None, chunk_bytes, compress)
        self._let_go(name, "replaced")

    def _let_go(self, name: str, how: str) -> None:
        """A tensor was replaced or removed: who still holds it may read it, and must not think that writes are kept."""
        tiered = self._open.pop(name, None)
        if tiered is not None:
            tiered.freeze(f"is not what the store holds: it was {how} since; take what is there now from the store")
            tiered.origin = None
        self._fresh.discard(name)
        self._shapes.pop(name, None)
        for cyclic in (False, True):  # a range over what was there is not one over what is there now
            self._live.pop((name, cyclic), None)

    @locked
    def adopt(
        self,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        chunk_bytes: int,
        spec: Spec,
        chunks: np.ndarray,
        metadata: dict[str, Any],
    ) -> None:
        """Takes chunks that native code has appended to `file` as a tensor; durable after commit()."""
        self._writer().put(TensorRecord(name, name_of(dtype), shape, spec, chunk_bytes, chunks, metadata=metadata))

    @locked
    def append(self, name: str, rows: torch.Tensor) -> TieredTensor:
        """Adds rows along the first dimension and returns the longer tensor; durable after commit().

        Tensors taken before stay valid and see the old length.

        Args:
            rows: (k, *shape[1:]) of the tensor's dtype.

        Raises:
            UsageError: shape or dtype do not fit.
        """
        self._writable_range(name)
        record, shape = self.record(name), self._shapes[name]
        if not isinstance(rows, torch.Tensor):
            raise UsageError(f"{name!r}: rows to append are a {type(rows).__name__}; give a tensor (k, *shape[1:])")
        check_storable(name, rows)  # before the tensor is made longer
        if not shape or tuple(rows.shape[1:]) != shape[1:] or rows.dim() != len(shape):
            raise UsageError(
                f"{name!r} has shape {shape}; rows of shape {tuple(rows.shape)} cannot be appended along dimension 0"
            )
        if name_of(rows.dtype) != record.dtype:
            raise UsageError(f"{name!r} is {record.dtype}; rows are {rows.dtype}: convert them first")
        longer = self._set_rows(name, shape[0] + rows.shape[0])
        if rows.numel():
            longer[shape[0] :] = rows
        return longer

    def _set_rows(self, name: str, rows: int) -> TieredTensor:
        tiered, shape = self._open[name], (rows, *self._shapes[name][1:])
        record = replace(self.record(name), shape=shape)
        dtype = torch_dtype(record.dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > tiered.capacity_bytes:
            check_size(record)
        else:
            record.validate()
        if nbytes > tiered.capacity_bytes or nbytes < tiered.nbytes:  # who reads the old range is not cut short
            tiered = self._regrow(name, max(nbytes, tiered.nbytes))
        tiered.resize(nbytes)
        self._shapes[name] = shape
        return over_range(tiered, dtype, shape)

    def _regrow(self, name: str, nbytes: int) -> Range:
        """A range with more address space. Tensors over the old one become read-only: two writers would lose writes."""
        old = self._open[name]
        self._save_range(name, old, last=True)
        old.freeze("was taken before the tensor was made longer or shorter; take it anew from the store")
        old.origin = None
        del self._open[name]
        return self._writable_range(name, nbytes)

    @locked
    def remove(self, name: str) -> None:
        """Forgets a tensor; durable after commit(). Its bytes in the file become dead space."""
        self._writer().remove(name)
        self._let_go(name, "removed")

    __delitem__ = remove

    @locked
    def resize(self, name: str, rows: int) -> TieredTensor:
        """Makes a tensor longer or shorter along its first dimension and returns it; durable after commit().

        New rows are zero. Tensors taken before see the old length; after a cut they are read-only.

        Raises:
            UsageError: rows below 0, or a tensor without dimensions.
        """
        self._writable_range(name)
        shape = self._shapes[name]
        if not shape:
            raise UsageError(f"{name!r} is a scalar; only a tensor with dimensions can be made longer or shorter")
        if isinstance(rows, bool) or not hasattr(rows, "__index__") or operator.index(rows) < 0:
            raise UsageError(f"{name!r} cannot have {rows!r:.100} rows; give a whole number, 0 or more")
        return self._set_rows(name, operator.index(rows))

    @locked
    def compact(self) -> int:
        """Commits, then rewrites the file without what no tensor needs any longer. Blocks on the disk.

        Takes as much free disk as the tensors take. Tensors taken before keep reading the old bytes and are read-only:
        take them again from the store. Readers in other processes keep the version that they opened. After a crash at
        any moment the file is the old one or the new one, whole.

        Returns: bytes that the file became shorter.

        Raises:
            StorageFullError, ArchiveError, CorruptBlockError: the store goes on as it was.
        """
        writer = self._writer()
        held = list(self._open.values())
        for tiered in held:  # from here on a write would be lost: it is refused
            tiered.freeze("was taken before compact(); take it anew from the store")
        try:
            self._commit(last=True)
            before = os.fstat(writer.fd).st_size
            new = compacted(writer)
        except BaseException:
            for tiered in held:
                tiered.writable = True
            raise
        self._detach(writer)
        writer.close()
        self._archive = new
        self._open.clear()
        self._live.clear()
        self._ranges.clear()
        return before - os.fstat(new.fd).st_size

    def _save_range(self, name: str, tiered: Range, *, last: bool = False) -> None:
        """last: nothing will be saved from this range again, so all of it is compared."""
        writer = self._writer()
        if last:
            tiered.recheck()
        record = writer.records[name]
        shape = self._shapes[name]
        if name in self._fresh and tiered.nbytes and not record.spec.is_uncompressed:
            spec = choose_spec(range_samples(tiered), record.dtype, record.spec.row_bytes)
            spec = replace(spec, row_bytes=record.spec.row_bytes)
            tiered.set_spec(native_spec(spec))
            record = replace(record, spec=spec)
        table, changed = _table_for(writer.chunks(record), tiered.n_blocks), list[np.ndarray]()
        record = replace(record, shape=shape, chunks=table)
        if record.n_chunks < len(writer.chunks(writer.records[name])):
            every = np.arange(record.n_chunks)
            record = replace(record, table=None, changes=(), changed=[], pending=None, unflushed=every)
        known = name not in self._unsure
        self._unsure.add(name)  # an error or an interrupt may come when new entries are in the table and not in changed
        tiered.flush_into(table, changed)
        if not known:
            changed = [np.arange(record.n_chunks)]
        writer.update(record, np.concatenate(changed) if changed else np.zeros(0, np.int64))
        self._unsure.discard(name)

    @locked
    def commit(self) -> int:
        """Makes every change since the last commit durable, all or nothing. Blocks on the disk.

        Returns: the commit's sequence number.

        Raises:
            StorageFullError, ArchiveError: the last commit stands; commit() may be called again.
        """
        return self._commit()

    def _commit(self, *, last: bool = False) -> int:
        writer = self._writer()
        for name, tiered in list(self._open.items()):
            self._save_range(name, tiered, last=last)
        sequence = writer.commit()
        for name, tiered in self._open.items():
            tiered.origin = self._origin(name)
        self._fresh.clear()
        return sequence

    # ---- end ----

    @locked
    def close(self, *, commit: bool = True) -> None:
        """Commits (unless told not to) and lets go of the file. A second close does nothing.

        If the commit fails the store stays open: free space and close again, or close(commit=False), which leaves no
        file where mode "w" found none and nothing was committed.
        """
        if self._archive is None:
            return
        archive = self._archive
        if isinstance(archive, Writer) and os.getpid() == self._pid:
            if commit:
                self._commit(last=True)
            else:
                for tiered in self._open.values():
                    tiered.origin = None  # it may hold what was never committed
            self._detach(archive)
            if not self._ranges and not self._was_forked:  # nobody reads what no commit covers
                with suppress(ArchiveError):  # whoever writes next cuts it off
                    archive.cut_tail()
            if not commit:
                archive.forget()
            archive.close()
        self._archive = None
        self._open.clear()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)


def _table_for(table: np.ndarray, n_chunks: int) -> np.ndarray:
    """A chunk table that may be changed, of a tensor's new length: the same array where it can be."""
    if len(table) == n_chunks and table.flags.writeable:
        return table
    longer = np.zeros(n_chunks, CHUNK_DTYPE)
    longer[: len(table)] = table[:n_chunks]
    return longer
