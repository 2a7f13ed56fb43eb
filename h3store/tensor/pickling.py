"""What a TieredTensor becomes in a pickle: a reference to its archive where one holds exactly its values, else the
values. Owns that choice and copies; refuses to know stores: whoever can open archives registers itself here."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from h3store.pager import Range
from h3store.tensor.subclass import TieredTensor, byte_span, range_of

__all__ = [
    "Values", "by_value", "on_reference", "plain_copy", "python_state", "reduce", "shallow_copy", "writing_values",
]  # fmt: skip

Reduced = tuple[Any, ...]
_reference: Callable[[TieredTensor, Range], Reduced | None] | None = None
_saving = threading.local()
_storages: weakref.WeakKeyDictionary[Range, StorageWeakRef] = weakref.WeakKeyDictionary()


def on_reference(reference: Callable[[TieredTensor, Range], Reduced | None]) -> None:
    """Registers what makes a reference to a tensor's archive; it returns None where the archive does not hold its
    values."""
    global _reference
    _reference = reference


@dataclass
class Values:
    """A file under way that must outlive the archive.

    Attributes:
        in_place: whoever writes it takes tiered memory as it is (see saving.py); else it gets copies.
        met: a TieredTensor went into it.
    """

    in_place: bool
    met: bool = False


@contextmanager
def writing_values(*, in_place: bool) -> Iterator[Values]:
    """While such a file is written: this thread pickles values, never references."""
    before = getattr(_saving, "values", None)
    _saving.values = Values(in_place)
    try:
        yield _saving.values
    finally:
        _saving.values = before


def python_state(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns what a user set on a tensor: its attributes that are not ours."""
    return {name: value for name, value in tensor.__dict__.items() if name not in ("_h3_range", "_is_param")}


def _dressed(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor or parameter over the same memory as values, with what a user set on another one."""
    requires_grad = like.requires_grad
    dressed: torch.Tensor = (
        torch.nn.Parameter(values, requires_grad)
        if getattr(like, "_is_param", False)
        else values.requires_grad_(requires_grad)
    )
    for name, value in python_state(like).items():
        setattr(dressed, name, value)
    return dressed


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a plain tensor, or parameter, in ordinary memory with the same values and strides."""
    with torch.no_grad():
        copy = tensor.clone(memory_format=torch.preserve_format).as_subclass(torch.Tensor)
    return _dressed(copy, tensor)


def shallow_copy(tensor: TieredTensor) -> torch.Tensor:
    """Returns another tensor over the same memory, as copy.copy of a plain tensor does."""
    return _dressed(tensor.detach(), tensor)


def _storage_over(tensor: TieredTensor, tiered: Range) -> tuple[torch.UntypedStorage, int]:
    """Storage to be written for a tensor, and its offset in it, bytes: the whole one, which tied tensors share, or
    what a small view spans of it."""
    offset, nbytes = byte_span(tensor)
    if 2 * nbytes < tiered.nbytes:
        part = memoryview(tiered.buffer())[offset : offset + nbytes]
        return torch.frombuffer(part, dtype=torch.uint8).untyped_storage(), 0
    weak = _storages.get(tiered)
    known = None if weak is None or weak.expired() else torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    storage = tensor.untyped_storage() if known is None or known.nbytes() < offset + nbytes else known
    _storages[tiered] = StorageWeakRef(storage)
    return storage, offset


def _in_place(tensor: TieredTensor, tiered: Range) -> Reduced:
    """As torch reduces a plain tensor, over the tiered memory itself; the file's loader needs nothing of ours."""
    storage, offset = _storage_over(tensor, tiered)
    plain = torch.empty(0, dtype=tensor.dtype, device="cpu")
    with torch.no_grad():
        plain.set_(storage, offset // tensor.element_size(), tensor.shape, tensor.stride())
    return _dressed(plain, tensor).__reduce_ex__(2)


def by_value(tensor: TieredTensor, protocol: Any) -> Reduced:
    """Reduces a copy in ordinary memory: needs nothing of ours to load."""
    return plain_copy(tensor).__reduce_ex__(protocol)


def reduce(tensor: TieredTensor, protocol: Any) -> Reduced:
    """What __reduce_ex__ returns. May block on the disk: a writable store's tensor is compared with its commit."""
    values: Values | None = getattr(_saving, "values", None)
    tiered = range_of(tensor)
    lazily_changed = tensor.is_conj() or tensor.is_neg()  # what memory holds is not the value
    if tiered is None or not tensor.numel() or lazily_changed or (values is not None and not values.in_place):
        return by_value(tensor, protocol)
    if values is not None:
        values.met = True
        return _in_place(tensor, tiered)
    reference = _reference(tensor, tiered) if _reference is not None and tensor.is_leaf else None
    return reference if reference is not None else by_value(tensor, protocol)
