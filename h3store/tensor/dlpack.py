"""TieredTensors through DLPack. Owns the read-only mark of a capsule, which torch does not set, and the type of what
torch takes back; the memory is shared as ever."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from h3store._ffi import ffi

__all__ = ["export", "take_back"]

_VERSIONED = b"dltensor_versioned"
_READ_ONLY = 1
# Of a DLManagedTensorVersioned: after the version (two uint32), the context and the deleter (pointers).
_FLAGS_OFFSET = 24
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def export(tensor: torch.Tensor, *, read_only: bool, **kwargs: Any) -> Any:
    """Returns a capsule over the tensor's memory.

    Raises:
        BufferError: read-only, and the consumer speaks a version of DLPack that cannot say so.
    """
    version = kwargs.get("max_version")
    shares = read_only and not kwargs.get("copy")
    if shares and (version is None or version[0] < 1):
        raise BufferError(
            "a read-only TieredTensor goes only to consumers of DLPack 1.0 and later, which can be told so; this one "
            "asks for an older version: give it a clone()"
        )
    with torch._C.DisableTorchFunctionSubclass():
        capsule = torch.Tensor.__dlpack__(tensor, **kwargs)
    if shares:
        flags = ffi.cast("uint64_t *", _pointer_of(capsule, _VERSIONED) + _FLAGS_OFFSET)
        flags[0] |= _READ_ONLY
    return capsule


def take_back(retype: Callable[[Any], Any]) -> None:
    """Makes torch.from_dlpack give tiered memory back under its own type, so that read-only stays so."""
    plain = torch._C._from_dlpack

    @functools.wraps(plain)
    def from_dlpack(capsule: Any) -> Any:
        return retype(plain(capsule))

    setattr(torch._C, "_from_dlpack", from_dlpack)  # noqa: B010  # no plain assignment: mypy knows its exact type
