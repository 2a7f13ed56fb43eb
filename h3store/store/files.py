"""An archive written at once, an archive read lazily, a store opened."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from h3store.archive import BaseRef, Writer, checked_path, refuse_circle
from h3store.archive.records import CARRIED_PREFIX, PACKED_KEY
from h3store.codec import MAX_BASE_DEPTH
from h3store.errors import UsageError
from h3store.store.encode import add_tensor, chunk_bytes_for, is_compressed, name_of
from h3store.store.named import Store
from h3store.tensor import TieredTensor
from h3store.units import MiB

__all__ = ["load", "open", "save"]


def save(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    access: str | None = None,
    compression: str | None = None,
) -> None:
    """Writes one archive of named tensors, atomically: the file at path is the old one until all is on disk.

    Args:
        tensors: any dtype but quantised ones; views and other devices are copied piece by piece. Names of a plain dict
            that stand for the same memory (tied weights) are stored once, and load() gives them the same memory.
        path: of the archive; replaced if it exists.
        base: an archive that holds related tensors of the same names, shapes and dtypes; where a difference is smaller
            it is what gets stored, and loading needs that archive at the same place relative to this one. Takes the
            chunk sizes of that archive, so that access and compression cannot be given with it. What is written to
            that archive later makes the blocks that lean on it unreadable.
        access: how the tensors will be read: "random" (rows here and there: chunks of 16 KiB), "stream" (whole and in
            order: 512 KiB) or "default" (64 KiB; also None).
        compression: "none" stores raw bytes; "auto" (also None) what a trial on a sample finds smallest.

    Raises:
        UsageError, StorageFullError, ArchiveError: nothing at path has changed.
    """
    if not isinstance(tensors, Mapping):
        raise UsageError(f"save() takes a mapping of names to tensors, such as model.state_dict(); got {type(tensors)}")
    checked_path(path)
    if base is not None:
        checked_path(base, "base")
        refuse_circle(base, path)
    if base is not None and (access is not None or compression is not None):
        raise UsageError("base= stores differences in the chunks of the base; leave access= and compression= out")
    chunk_bytes, compress = chunk_bytes_for(access), is_compressed(compression)
    is_new = not os.path.lexists(path)
    with Writer(path, "w") as writer, ExitStack() as resources:
        try:
            related = resources.enter_context(Store(base, "r", 64 * MiB)) if base is not None else None
            # Only what stays alive while it is saved can be told by its address.
            stored: dict[Any, str] | None = {} if type(tensors) in (dict, OrderedDict) and related is None else None
            for name, tensor in tensors.items():
                if stored is None or not _tie(writer, name, tensor, stored):
                    add_tensor(writer, name, tensor, _related(related, name, tensor, Path(path)), chunk_bytes, compress)
            writer.commit()
        except BaseException:
            if is_new:  # the writer's empty archive; its lock is still ours
                with suppress(OSError):
                    os.unlink(path)
            raise


def _tie(writer: Writer, name: str, tensor: torch.Tensor, stored: dict[Any, str]) -> bool:
    """Records a tensor over memory that is stored under another name as those chunks; else notes its memory."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return False
    if not isinstance(name, str) or tensor.is_quantized or tensor.device.type != "cpu":
        return False
    order = tensor.numel() if tensor.is_contiguous() else (tuple(tensor.shape), tensor.stride())
    key = (tensor.data_ptr(), tensor.dtype, order, tensor.is_conj(), tensor.is_neg())
    first = stored.setdefault(key, name)
    if first == name:
        return False
    writer.put(replace(writer.record(first), name=name, shape=tuple(tensor.shape), table=None))
    return True


def _related(
    store: Store | None, name: str, tensor: torch.Tensor, path: Path
) -> tuple[BaseRef, TieredTensor, int] | None:
    if store is None or name not in store or not isinstance(tensor, torch.Tensor):
        return None
    record = store.record(name)
    if record.shape != tuple(tensor.shape) or record.dtype != name_of(tensor.dtype) or not tensor.numel():
        return None
    if store.range(name).base_depth >= MAX_BASE_DEPTH - 1:  # one more could not be read
        return None
    reader = store.archive
    relative = os.path.relpath(store.path, path.parent if str(path.parent) else ".")
    return BaseRef(relative, reader.uuid, reader.sequence, name), store[name], record.chunk_bytes


def load(path: str | os.PathLike[str], *, ddr_bytes: int | str | None = None) -> dict[str, TieredTensor]:
    """Opens an archive lazily: tensors are read-only, and their blocks are read when touched.

    Of a packed folder it gives the weights, and not the other files.

    Args:
        ddr_bytes: budget that all of them share; None: a quarter of the memory that is available now.

    Raises:
        ArchiveNotFoundError, ArchiveFormatError, CorruptArchiveError, BudgetError.
    """
    store = Store(path, "r", ddr_bytes)
    is_packed = PACKED_KEY in store.archive.metadata
    return {name: store[name] for name in store if not (is_packed and name.startswith(CARRIED_PREFIX))}


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
