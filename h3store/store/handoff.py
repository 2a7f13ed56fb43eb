"""TieredTensors in other processes. Owns the reference that a pickle holds instead of bytes, the proof that an archive
still holds exactly those bytes, and the stores that a receiving process opens for it. A tensor whose values no archive
holds travels by value."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from h3store.archive import Reader
from h3store.errors import ArchiveChangedError, H3Error
from h3store.pager import Range
from h3store.store.encode import torch_dtype
from h3store.store.named import Store
from h3store.store.origin import Origin, origin_of, unchanged_origin
from h3store.tensor import TieredTensor, on_reference, over_range, plain_copy, python_state, range_of
from h3store.units import MiB

__all__ = ["register"]

_BUDGET_BYTES = 64 * MiB  # of a store that a reference opens, at most
_RECENT_STORES = 4  # kept open for the next reference though no tensor is left
_stores: weakref.WeakSet[Store] = weakref.WeakSet()  # opened here; each range holds its own, and shares its budget
_recent: deque[Store] = deque(maxlen=_RECENT_STORES)
_live: weakref.WeakValueDictionary[Origin, Range] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _in_forked_child() -> None:
    """A thread that held the lock over the fork is not here to let go of it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_forked_child)


# ---- sending ----


@functools.lru_cache(maxsize=64)
def _identities(path: str, _signature: tuple[int, ...]) -> dict[str, tuple[bytes, int]]:
    """What each tensor of the file's last commit is known by."""
    with Reader(path) as reader:
        return {name: origin_of(reader, name) for name in reader.records}


def _is_there(origin: Origin) -> bool:
    """Whether the file at the path holds this very version of the tensor now, so that a reference can be followed."""
    path, name, identity = origin
    try:
        stat = os.stat(path)
        now = _identities(path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    except (OSError, H3Error):
        return False
    return now.get(name) == identity


def _kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    return getattr(tensor, "_is_param", False), tensor.requires_grad


def _reference(tensor: TieredTensor, tiered: Range) -> tuple[Any, ...] | None:
    origin = unchanged_origin(tiered)
    if origin is None or not _is_there(origin):
        return None
    geometry = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), str(tensor.dtype).removeprefix("torch."))
    if not tiered.writable:
        _live.setdefault(origin, tiered)
    return _attach, (*origin, min(tiered.pager.ddr_bytes, _BUDGET_BYTES), geometry, _kind(tensor), python_state(tensor))


# ---- receiving ----


def _store(path: str, name: str, identity: tuple[bytes, int], ddr_bytes: int) -> Store:
    """The store of this process that holds this version; one is opened if none does."""

    def holds(store: Store) -> bool:
        return name in store and origin_of(store.archive, name) == identity

    for store in list(_stores):
        if (os.fspath(store.path), store.ddr_bytes) == (path, ddr_bytes) and holds(store):
            return store
    store = Store(path, "r", ddr_bytes)
    if not holds(store):
        raise ArchiveChangedError(
            f"{path}: tensor {name!r} is not the one that was pickled: the archive has changed since. A reference is "
            "good as long as its archive stays as it was; to keep values use torch.save, or pickle a clone()"
        )
    _stores.add(store)
    return store


def _range(origin: Origin, ddr_bytes: int) -> Range:
    """The range over this version of the tensor: one that is here already, or one of a store that is opened for it."""
    with _lock:
        tiered = _live.get(origin)
        if tiered is None:
            store = _store(*origin, ddr_bytes)
            tiered = store.range(origin[1])
            tiered.keep(store)
            _recent.append(store)
            _live[origin] = tiered
        return tiered


def _attach(
    path: str,
    name: str,
    identity: tuple[bytes, int],
    ddr_bytes: int,
    geometry: tuple[tuple[int, ...], tuple[int, ...], int, str],
    kind: tuple[bool, bool],
    state: dict[str, Any],
) -> torch.Tensor:
    """Returns the same view of the same tensor in this process: over the memory of one that is here already, if any.

    Raises:
        ArchiveNotFoundError: the archive has moved. ArchiveChangedError: it has changed. ArchiveError: no reading it.
    """
    tiered = _range((path, name, identity), ddr_bytes)
    size, stride, offset, dtype_name = geometry
    is_parameter, requires_grad = kind
    dtype = torch_dtype(dtype_name)
    whole = over_range(tiered, dtype, (tiered.nbytes // dtype.itemsize,))
    view = whole.as_strided(size, stride, offset)
    tensor: torch.Tensor = (
        torch.nn.Parameter(view, requires_grad) if is_parameter else view.requires_grad_(requires_grad)
    )
    for attribute, value in state.items():
        setattr(tensor, attribute, value)
    return tensor


def _rebuild(data: bytearray, dtype: torch.dtype, size: tuple[int, ...], kind: tuple[bool, bool]) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    is_parameter, requires_grad = kind
    tensor = flat.reshape(size)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _reduce(tensor: TieredTensor) -> Any:
    """For a process that is waiting: values go through the pipe, not through shared memory, which may be small."""
    tiered = range_of(tensor)
    reference = _reference(tensor, tiered) if tiered is not None and tensor.is_leaf else None
    if reference is not None:
        return reference
    plain = plain_copy(tensor).detach().contiguous()
    data = bytearray(plain.reshape(-1).view(torch.uint8).numpy().data)
    return _rebuild, (data, tensor.dtype, tuple(tensor.shape), _kind(tensor))


def register() -> None:
    """Makes pickles of TieredTensors references, where they can be."""
    on_reference(_reference)
    ForkingPickler.register(TieredTensor, _reduce)
