"""Files that others write of TieredTensors: torch.save and safetensors. A system call given absent memory fails, or
writes short, so bytes go through a small resident buffer here. Owns the hooks in those two libraries; refuses to choose
what is written."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import safetensors
import torch
from torch import serialization

from h3store._ffi import ffi, lib
from h3store.archive import is_archive
from h3store.errors import UsageError
from h3store.pager import Range, range_holding
from h3store.tensor.pickling import Values, writing_values
from h3store.tensor.subclass import in_operation
from h3store.units import MiB

__all__ = ["install"]

_PIECE_BYTES = 1 * MiB


def _ranges_of(addresses: Iterable[int]) -> list[Range]:
    found = (range_holding(address) for address in addresses if lib.h3_is_tiered(address))
    return [tiered for tiered in found if tiered is not None]


def _address(view: memoryview) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(view))) if view.nbytes else 0


def _refuse_archive(path: str | os.PathLike[str]) -> None:
    """Opening a file to write it over ends what it held, and it may hold the very tensors that are to be written.

    Raises:
        UsageError: an archive lies there.
    """
    if is_archive(path):
        raise UsageError(f"{os.fspath(path)} is an h3store archive, perhaps the one that these tensors are read from; "
                         "choose another path, or delete it first")


def _write_resident(write: Callable[[memoryview], Any], view: memoryview) -> None:
    """Writes bytes that may be absent, a piece at a time; a fault is taken here, in user mode.

    Raises:
        CorruptBlockError, ArchiveError: a block could not be read; what was written before stays in the file.
    """
    view = view.cast("B")
    buffer = bytearray(min(_PIECE_BYTES, view.nbytes))
    held = _ranges_of([_address(view)])
    for start in range(0, view.nbytes, _PIECE_BYTES):
        piece = view[start : start + _PIECE_BYTES]
        with in_operation(held):
            buffer[: piece.nbytes] = piece
        _write_all(write, memoryview(buffer)[: piece.nbytes])


def _write_all(write: Callable[[memoryview], Any], piece: memoryview) -> None:
    """An unbuffered file may take less than it is given."""
    while piece.nbytes:
        taken = write(piece)
        if not isinstance(taken, int) or taken >= piece.nbytes:
            return
        piece = piece[taken:]


class _ResidentFile:
    """What torch writes a zip file to: the target, given resident bytes only."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes and lib.h3_is_tiered(_address(view)):
            _write_resident(self._target.write, view)
        else:
            self._target.write(data)
        return view.nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _ZipWriter:
    """In place of torch's writer of one zip file. The real one opens at the first record: all is pickled by then,
    and it is known whether tiered memory goes into the file. If none does, nothing changes."""

    def __init__(self, open_writer: Callable[[Any], Any], target: Any) -> None:
        self._open_writer, self._target = open_writer, target
        self._resources = ExitStack()
        self._values: Values | None = None
        self._writer: Any = None

    def __enter__(self) -> _ZipWriter:
        self._values = self._resources.enter_context(writing_values(in_place=True))
        return self

    def _opened(self) -> Any:
        if self._writer is None:
            target = self._target
            if self._values is not None and self._values.met:
                if isinstance(target, (str, os.PathLike)):
                    _refuse_archive(target)
                    target = self._resources.enter_context(open(target, "wb"))  # noqa: SIM115  # it is one
                target = _ResidentFile(target)
            self._writer = self._resources.enter_context(self._open_writer(target))
        return self._writer

    def write_record(self, name: str, data: Any, size: int) -> None:
        held = _ranges_of([data.data_ptr()]) if torch.is_storage(data) else []
        with in_operation(held):  # torch sums the bytes up before it writes them
            self._opened().write_record(name, data, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened(), name)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self._opened()
            self._resources.close()
            return
        with suppress(RuntimeError):  # of torch, which cannot finish a file that broke off: not the reason
            self._resources.close()


def _hook_torch_save() -> None:
    open_writer, legacy_save = serialization._open_zipfile_writer, serialization._legacy_save

    @functools.wraps(open_writer)
    def opened(name_or_buffer: Any) -> Any:
        return _ZipWriter(open_writer, name_or_buffer)

    @functools.wraps(legacy_save)
    def saved(*args: Any, **kwargs: Any) -> None:
        with writing_values(in_place=False):
            legacy_save(*args, **kwargs)

    serialization._open_zipfile_writer = opened
    serialization._legacy_save = saved


# ---- safetensors ----

_FLOAT8 = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
_TYPE_NAMES = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 complex64 "
    "float4_e2m1fn_x2 " + _FLOAT8
)


@functools.cache
def _type_names() -> dict[str, str]:
    """A dtype as a spec names it -> as a spec is asked for it."""
    found = {}
    for name in _TYPE_NAMES.split():
        with suppress(safetensors.SafetensorError):  # another release may not know all of them
            found[safetensors.TensorSpec(dtype=name, shape=[0], data_ptr=0, data_len=0).dtype] = name
    return found


def _empty(spec: Any) -> Any:
    return safetensors.TensorSpec(dtype=_type_names()[spec.dtype], shape=[0], data_ptr=spec.data_ptr, data_len=0)


def _header(specs: Mapping[str, Any], metadata: Mapping[str, str] | None, serialize: Callable[..., bytes]) -> tuple[
    bytes, list[str]
]:
    """The file up to its data, and the order of the tensors in it: as the library itself writes both, which is asked to
    write the same tensors with no elements."""
    none = {name: _empty(spec) for name, spec in specs.items()}
    empty = serialize(none, metadata=metadata)
    described = json.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])
    at = 0
    for name, entry in described.items():
        if name != "__metadata__":
            entry["shape"] = list(specs[name].shape)
            entry["data_offsets"] = [at, at := at + specs[name].data_len]
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [name for name in described if name != "__metadata__"]


def _write_file(serialize: Callable[..., bytes], specs: Mapping[str, Any], filename: Any, metadata: Any) -> None:
    _refuse_archive(filename)
    header, order = _header(specs, metadata, serialize)
    with open(filename, "wb") as file:
        file.write(header)
        for name in order:
            spec = specs[name]
            data = ffi.buffer(ffi.cast("char *", spec.data_ptr), spec.data_len)
            _write_resident(file.write, memoryview(data))


def _hook_safetensors() -> None:
    serialize, serialize_file = safetensors.serialize, safetensors.serialize_file

    @functools.wraps(serialize)
    def to_bytes(tensor_dict: dict[str, Any], metadata: Any = None) -> bytes:
        with in_operation(_ranges_of(getattr(spec, "data_ptr", 0) for spec in tensor_dict.values())):
            return serialize(tensor_dict, metadata=metadata)

    @functools.wraps(serialize_file)
    def to_file(tensor_dict: dict[str, Any], filename: Any, metadata: Any = None) -> None:
        if any(lib.h3_is_tiered(getattr(spec, "data_ptr", 0)) for spec in tensor_dict.values()):
            _write_file(serialize, tensor_dict, filename, metadata)
        else:
            serialize_file(tensor_dict, filename, metadata=metadata)

    for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):  # those that are imported later take ours
        module = sys.modules.get(name)
        if module is not None:
            module.serialize, module.serialize_file = to_bytes, to_file  # type: ignore[attr-defined]  # the library's own


@functools.cache
def install() -> None:
    """Puts the hooks in place. Does nothing the second time."""
    _hook_torch_save()
    _hook_safetensors()
