"""Named tensors in one archive under one ddr budget. Owns what exists, which ranges are open, and commits; refuses
to know what tensors mean. save and load are here, too: an archive written at once, an archive read lazily."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from h3store.archive import BaseRef, Reader, TensorRecord, Writer
from h3store.codec import CHUNK_DTYPE, Delta, Spec, choose_spec, default_spec, dtype_info, encode_chunk
from h3store.errors import (
    BudgetError,
    CorruptArchiveError,
    ReadOnlyError,
    StoreClosedError,
    TensorNotFoundError,
    UsageError,
)
from h3store.pager import Pager, Range
from h3store.tensor import TieredTensor, byte_span, in_operation, over_range, range_of
from h3store.tiers import file_handle, open_range
from h3store.tiers.ddr import native_spec
from h3store.units import MiB, parse_bytes

__all__ = ["Store", "load", "open", "pin", "prefetch", "save"]

CHUNK_BYTES = 64 * 1024
_SAMPLE_CHUNKS = 4
# Writable tensors reserve this much more address space than they have bytes, so that appends need no new range.
_GROWTH = 4
_GROWTH_BYTES = 64 * MiB


def default_budget() -> int:
    """Returns the ddr budget when none is given: a quarter of the memory that is available now, 64 MiB at least."""
    try:
        text = Path("/proc/meminfo").read_text()
        available = int(text.split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        available = 1024 * MiB
    return max(64 * MiB, available // 4)


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


class Store:
    """Named tensors of one archive. Made by h3store.open().

    Tensors stay valid after close(), read-only. Leaving a with-block commits, unless an exception is under way.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str = "r", ddr_bytes: int | str | None = None) -> None:
        if mode not in ("r", "r+", "w"):
            raise UsageError(f'mode {mode!r} is not known; use "r", "r+" or "w"')
        self.path = Path(path)
        self.mode = mode
        self._ddr_bytes = default_budget() if ddr_bytes is None else parse_bytes(ddr_bytes, "ddr_bytes")
        if self._ddr_bytes < 4096:
            raise BudgetError(f"ddr_bytes={ddr_bytes} is below one page of 4096 bytes; give at least 1MiB")
        self._pager: Pager | None = None
        self._archive: Reader | Writer | None = Reader(path) if mode == "r" else Writer(path, mode)
        self._readers: dict[Path, Reader] = {}
        self._open: dict[str, Range] = {}  # writable ranges: changed blocks live in them until commit
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._fresh: set[str] = set()  # created since the last commit: their spec is still to be chosen
        self._live: weakref.WeakValueDictionary[tuple[str, bool], Range] = weakref.WeakValueDictionary()
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
    def folder(self) -> Path:
        """Where scratch files go: beside the archive."""
        return self.path.parent if str(self.path.parent) else Path(".")

    @property
    def pager(self) -> Pager:
        if self._pager is None:
            self._pager = Pager(self._ddr_bytes)
        return self._pager

    @property
    def file(self) -> Any:
        """The archive's native file, for native code that appends chunks."""
        return self._writer().file

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
        record = self.archive.records.get(name)
        if record is None:
            raise TensorNotFoundError(
                f"{self.path}: no tensor named {name!r}; it holds {len(self)} tensors, see keys()"
            )
        return record

    # ---- reading ----

    def range(self, name: str, *, cyclic: bool = False) -> Range:
        """Returns the range over a tensor: one per name, shared by every tensor over it."""
        record = self.record(name)
        if name in self._open:
            return self._open[name]
        live = self._live.get((name, cyclic))
        if live is None:
            live = self._open_range(record, self.archive, cyclic)
            self._live[name, cyclic] = live
        return live

    def __getitem__(self, name: str) -> TieredTensor:
        """Returns a tensor: writable in modes "r+" and "w", read-only in mode "r". Reads nothing yet."""
        record = self.record(name)
        tiered = self._writable_range(name) if self.writable and record.base is None else self.range(name)
        return over_range(tiered, _torch_dtype(record.dtype), self._shapes.get(name, record.shape))

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Replaces a tensor, or adds one; `store[name] += 1` changes it in place. Durable after commit()."""
        if name in self._open and range_of(value) is self._open[name]:
            return
        self.put(name, value)

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
        base = None
        if record.base is not None and bool((chunks["delta"] == Delta.BASE).any()):
            base = self._base_range(record, archive, depth)
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
            label=f"{archive.path}: tensor {record.name!r}",
        )
        if archive is self._archive:
            self._ranges.add(tiered)
            if not writable and isinstance(archive, Reader):
                tiered.origin = (os.path.abspath(archive.path), record.name, origin_of(self, record.name))
        return tiered

    def _base_range(self, record: TensorRecord, archive: Reader | Writer, depth: int) -> Range:
        ref = record.base
        assert ref is not None
        if depth >= 7:
            raise CorruptArchiveError(
                f"{archive.path}: tensor {record.name!r} leans on over 8 archives in a row; save it whole"
            )
        path = Path(archive.path).parent / ref.path
        if path not in self._readers:
            self._readers[path] = Reader(path)
        reader = self._readers[path]
        if reader.uuid != ref.uuid:
            raise CorruptArchiveError(
                f"{archive.path}: tensor {record.name!r} needs the base archive {path} that it was saved "
                "against; another file lies there now"
            )
        return self._open_range(reader.record(ref.name), reader, depth=depth + 1)

    # ---- writing ----

    def _writer(self) -> Writer:
        archive = self.archive
        if not isinstance(archive, Writer):
            raise ReadOnlyError(f'{self.path} was opened with mode="r"; open it with mode="r+" to write')
        return archive

    def _writable_range(self, name: str, min_bytes: int = 0) -> Range:
        if name not in self._open:
            record = self.record(name)
            need = max(record.nbytes, min_bytes)
            self._open[name] = self._open_range(
                record, self._writer(), writable=True, capacity_bytes=_GROWTH * need + _GROWTH_BYTES
            )
            self._shapes[name] = record.shape
        return self._open[name]

    def create(
        self, name: str, shape: tuple[int, ...] | list[int], dtype: torch.dtype, *, chunk_bytes: int = CHUNK_BYTES
    ) -> TieredTensor:
        """Returns a new writable tensor of zeros. Takes no memory or disk until written.

        Args:
            name: 1 to 1024 bytes of UTF-8, not yet in the store.
            shape, dtype: as torch.zeros takes them.
            chunk_bytes: unit of compression and residency, a multiple of 4096 up to 4 MiB; smaller suits random rows.

        Raises:
            UsageError: the name exists, or an argument breaks its rule. ReadOnlyError: mode "r".
        """
        writer = self._writer()
        if name in writer.records:
            raise UsageError(f"{self.path}: a tensor named {name!r} exists; remove it first, or choose another name")
        shape = tuple(int(size) for size in shape)
        record = TensorRecord(
            name, _name_of(dtype), shape, default_spec(str(dtype), _row_bytes(shape, dtype)), chunk_bytes
        )
        record.chunks = zero_table(record)
        writer.put(record)
        self._fresh.add(name)
        try:
            return self[name]
        except BaseException:
            self.remove(name)
            raise

    def put(self, name: str, tensor: torch.Tensor | np.ndarray) -> None:
        """Writes a whole tensor, replacing one of that name; durable after commit()."""
        value = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else tensor
        self._open.pop(name, None)
        self._fresh.discard(name)
        add_tensor(self._writer(), name, value)

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
        self._writer().put(TensorRecord(name, _name_of(dtype), shape, spec, chunk_bytes, chunks, metadata=metadata))

    def append(self, name: str, rows: torch.Tensor) -> TieredTensor:
        """Adds rows along the first dimension and returns the longer tensor; durable after commit().

        Tensors taken before stay valid and see the old length.

        Args:
            rows: (k, *shape[1:]) of the tensor's dtype.

        Raises:
            UsageError: shape or dtype do not fit.
        """
        record = self.record(name)
        tiered = self._writable_range(name)
        shape = self._shapes[name]
        if not shape or tuple(rows.shape[1:]) != shape[1:] or rows.dim() != len(shape):
            raise UsageError(
                f"{name!r} has shape {shape}; rows of shape {tuple(rows.shape)} cannot be appended along dimension 0"
            )
        if _name_of(rows.dtype) != record.dtype:
            raise UsageError(f"{name!r} is {record.dtype}; rows are {rows.dtype}: convert them first")
        new_shape = (shape[0] + rows.shape[0], *shape[1:])
        nbytes = int(np.prod(new_shape, dtype=np.int64)) * rows.element_size()
        if nbytes > tiered.capacity_bytes:
            tiered = self._regrow(name, nbytes)
        tiered.resize(nbytes)
        self._shapes[name] = new_shape
        longer = over_range(tiered, rows.dtype, new_shape)
        if rows.numel():
            longer[shape[0] :] = rows
        return longer

    def _regrow(self, name: str, nbytes: int) -> Range:
        """A range with more address space. Tensors over the old one become read-only: two writers would lose writes."""
        old = self._open[name]
        self._save_range(name, old)
        old.writable = False
        del self._open[name]
        return self._writable_range(name, nbytes)

    def remove(self, name: str) -> None:
        """Forgets a tensor; durable after commit(). Its bytes in the file become dead space."""
        self.record(name)
        self._open.pop(name, None)
        self._fresh.discard(name)
        self._writer().remove(name)

    def _save_range(self, name: str, tiered: Range) -> None:
        writer = self._writer()
        record = writer.records[name]
        shape = self._shapes[name]
        if name in self._fresh and tiered.nbytes:
            spec = choose_spec(_samples(tiered), record.dtype, record.spec.row_bytes)
            spec = replace(spec, row_bytes=record.spec.row_bytes)
            tiered.set_spec(native_spec(spec))
            record = replace(record, spec=spec)
        table = tiered.flush()
        writer.put(replace(record, shape=shape, chunks=table, table=None))

    def commit(self) -> int:
        """Makes every change since the last commit durable, all or nothing. Blocks on the disk.

        Returns: the commit's sequence number.

        Raises:
            StorageFullError, ArchiveError: the last commit stands; commit() may be called again.
        """
        writer = self._writer()
        for name, tiered in list(self._open.items()):
            self._save_range(name, tiered)
        sequence = writer.commit()
        self._fresh.clear()
        return sequence

    # ---- end ----

    def stats(self) -> dict[str, Any]:
        """Returns counters of the ddr budget (see Pager.stats) and of the file."""
        values: dict[str, Any] = dict(self.pager.stats())
        values["file_bytes"] = os.stat(self.path).st_size if self.path.exists() else 0
        values["tensors"] = len(self)
        return values

    def close(self, *, commit: bool = True) -> None:
        """Commits (unless told not to) and lets go of the file. A second close does nothing.

        If the commit fails the store stays open: free space and close again, or close(commit=False).
        """
        if self._archive is None:
            return
        archive = self._archive
        if isinstance(archive, Writer):
            if commit:
                self.commit()
            self._detach(archive)
            archive.close()
        self._archive = None
        self._open.clear()

    def _detach(self, writer: Writer) -> None:
        """Tensors that outlive the store read through a descriptor of their own."""
        live = list(self._ranges)
        if live:
            descriptor = _Descriptor(writer.fd)
            for tiered in live:
                tiered.detach(descriptor.native, descriptor)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)


# ---- helpers over tensors ----


def origin_of(store: Store, name: str) -> tuple[bytes, int]:
    """Returns what tells one committed version of a tensor from every other: file uuid, check of its table."""
    table = store.record(name).table
    return store.archive.uuid, table.check if table is not None else 0


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"dtype {name!r} is not one that this torch ({torch.__version__}) knows")
    return found


def _name_of(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    dtype_info(name)
    return name


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize if len(shape) > 1 else 0


def zero_table(record: TensorRecord) -> np.ndarray:
    """Returns the chunk table of a tensor of zeros that nothing was written of, (n_chunks,)."""
    table = np.zeros(record.n_chunks, CHUNK_DTYPE)
    for block in {0, record.n_chunks - 1} if record.n_chunks else ():
        entry, _ = encode_chunk(bytes(record.chunk_size(block)), record.spec)
        table[block] = entry
    table[:-1] = table[0] if record.n_chunks else 0
    return table


def _samples(tiered: Range, count: int = _SAMPLE_CHUNKS) -> list[np.ndarray]:
    """A few chunks spread over the range, copied."""
    view = np.frombuffer(tiered.buffer(), np.uint8)
    picked = sorted({int(i) for i in np.linspace(0, tiered.n_blocks - 1, count)})
    with in_operation([tiered]):
        return [view[i * tiered.block_bytes : (i + 1) * tiered.block_bytes].copy() for i in picked]


def _flat_bytes(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Address of a tensor's bytes in C order, and what keeps them alive."""
    with torch.no_grad():
        held = tensor.detach()
        if held.device.type != "cpu":
            held = held.cpu()
        held = held.resolve_conj().resolve_neg().contiguous()
    return held.data_ptr(), held


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    """A uint8 view of memory that the caller keeps alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _tensor_samples(tensor: torch.Tensor, chunk_bytes: int) -> list[np.ndarray]:
    """A few chunks of a contiguous tensor, copied: all of it is never read here."""
    nbytes = tensor.numel() * tensor.element_size()
    view = _bytes_at(tensor.data_ptr(), nbytes)
    picked = sorted({int(i) for i in np.linspace(0, (nbytes - 1) // chunk_bytes, _SAMPLE_CHUNKS)})
    return [view[i * chunk_bytes : (i + 1) * chunk_bytes].copy() for i in picked]


def add_tensor(
    writer: Writer,
    name: str,
    tensor: torch.Tensor,
    base: tuple[BaseRef, TieredTensor, int] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Encodes one tensor into an archive, its spec chosen by trial; durable after commit."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UsageError(f"tensor {name!r} has layout {tensor.layout}; make it dense and unquantised first")
    dtype, shape = _name_of(tensor.dtype), tuple(tensor.shape)
    if base is not None:
        chunk_bytes = base[2]
    if tensor.numel() == 0:
        writer.add(name, b"", dtype, shape, default_spec(dtype, 0), chunk_bytes)
        return
    address, held = _flat_bytes(tensor)
    sources = [tiered for source in (held, base[1] if base else held) if (tiered := range_of(source)) is not None]
    with in_operation(sources):
        samples = _tensor_samples(held, chunk_bytes)
        base_samples = _tensor_samples(base[1], chunk_bytes) if base else None
        spec = choose_spec(samples, dtype, _row_bytes(shape, tensor.dtype), base_samples)
        leans = base is not None and spec.delta == Delta.BASE
        writer.add(
            name,
            address,
            dtype,
            shape,
            spec,
            chunk_bytes,
            base=base[0] if base and leans else None,
            base_data=base[1].data_ptr() if base and leans else None,
        )


def save(
    tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None
) -> None:
    """Writes one archive of named tensors, atomically: the file at path is the old one until all is on disk.

    Args:
        tensors: any dtype but quantised ones; views and other devices are copied piece by piece.
        path: of the archive; replaced if it exists.
        base: an archive that holds related tensors of the same names, shapes and dtypes; where a difference is smaller
            it is what gets stored, and loading needs that archive at the same place relative to this one.

    Raises:
        UsageError, StorageFullError, ArchiveError: nothing at path has changed.
    """
    if not isinstance(tensors, Mapping) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise UsageError("save() takes a mapping of names to tensors, such as model.state_dict()")
    if base is not None and os.path.exists(path) and os.path.samefile(base, path):
        raise UsageError(f"{os.fspath(path)}: cannot be saved as a difference to itself; choose another path")
    with Writer(path, "w") as writer:
        related = Store(base, "r", 64 * MiB) if base is not None else None
        for name, tensor in tensors.items():
            add_tensor(writer, name, tensor, _related(related, name, tensor, Path(path)))
        writer.commit()
        if related is not None:
            related.close()


def _related(
    store: Store | None, name: str, tensor: torch.Tensor, path: Path
) -> tuple[BaseRef, TieredTensor, int] | None:
    if store is None or name not in store:
        return None
    record = store.record(name)
    if record.shape != tuple(tensor.shape) or record.dtype != _name_of(tensor.dtype) or not tensor.numel():
        return None
    reader = store.archive
    relative = os.path.relpath(store.path, path.parent if str(path.parent) else ".")
    return BaseRef(relative, reader.uuid, reader.sequence, name), store[name], record.chunk_bytes


def load(path: str | os.PathLike[str], *, ddr_bytes: int | str | None = None) -> dict[str, TieredTensor]:
    """Opens an archive lazily: tensors are read-only, and their blocks are read when touched.

    Args:
        ddr_bytes: budget that all of them share; None: a quarter of the memory that is available now.

    Raises:
        ArchiveNotFoundError, ArchiveFormatError, CorruptArchiveError, BudgetError.
    """
    store = Store(path, "r", ddr_bytes)
    return {name: store[name] for name in store}


def open(path: str | os.PathLike[str], *, mode: str = "r", ddr_bytes: int | str | None = None) -> Store:
    """Opens a store; public as h3store.open.

    Args:
        mode: "r" reads the last commit; "r+" changes it, one writer at a time; "w" starts anew: an old file stays
            until the first commit.
        ddr_bytes: hard bound on resident bytes of all its tensors, an int or text such as "64MiB"; None: a quarter of
            the memory that is available now.

    Raises:
        ArchiveNotFoundError, ArchiveLockedError, ArchiveFormatError, CorruptArchiveError, BudgetError, UsageError.
    """
    return Store(path, mode, ddr_bytes)


def prefetch(*tensors: torch.Tensor) -> int:
    """Makes tensors or slices of tensors resident, as far as their budgets allow. Blocks on the disk; Ctrl-C works.

    Returns: bytes resident afterwards, counted per call. Ordinary tensors count nothing.
    """
    total = 0
    for tensor in tensors:
        tiered = range_of(tensor)
        if tiered is not None:
            total += tiered.prefetch(*byte_span(tensor))
    return total


@contextmanager
def pin(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Holds a tensor or slice resident inside the with-block, so that system calls may be given its memory.

    Raises:
        BudgetError: it does not fit the budget beside what is pinned already.
    """
    tiered = range_of(tensor)
    if tiered is None:
        yield tensor
        return
    span = byte_span(tensor)
    tiered.pin(*span)
    try:
        yield tensor
    finally:
        tiered.unpin(*span)
