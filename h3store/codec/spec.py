"""How a tensor's chunks are encoded, and what each element type is made of. Owns Spec and the dtype table; refuses to
import torch: types are their torch names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

from h3store._ffi import ffi, lib
from h3store.errors import UsageError

__all__ = ["DTYPES", "MAX_BASE_DEPTH", "MAX_CHUNK_BYTES", "MIN_CHUNK_BYTES", "CheckKind", "Delta", "DtypeInfo",
           "Filter", "Spec", "default_spec", "dtype_info", "raw_spec"]

MIN_CHUNK_BYTES: int = lib.H3_MIN_CHUNK
MAX_BASE_DEPTH: int = lib.H3_MAX_BASE_DEPTH
MAX_CHUNK_BYTES: int = lib.H3_MAX_CHUNK


class Filter(IntEnum):
    """What is done to a chunk's bytes; values are part of the file format."""

    RAW = lib.H3_FILTER_RAW
    ZERO = lib.H3_FILTER_ZERO
    ZSTD = lib.H3_FILTER_ZSTD
    BYTEPLANE = lib.H3_FILTER_BYTEPLANE
    EXPNIBBLE = lib.H3_FILTER_EXPNIBBLE
    PATCH = lib.H3_FILTER_PATCH  # of chunks that a range changed in few pages; no spec names it


class Delta(IntEnum):
    """What is subtracted before the filter; values are part of the file format."""

    NONE = lib.H3_DELTA_NONE
    ROW = lib.H3_DELTA_ROW
    BASE = lib.H3_DELTA_BASE


class CheckKind(IntEnum):
    """The hash that a chunk's check was made by; values are part of the file format. New chunks get XXH3."""

    XXH64 = lib.H3_CHECK_XXH64
    XXH3 = lib.H3_CHECK_XXH3


class DtypeInfo(NamedTuple):
    """What one element is made of.

    Attributes:
        item_bytes: bytes of one element of a tensor.
        elem_bytes: bytes of what the filters treat as one element; half of item_bytes for complex types.
        exp_bits: bits of a float's exponent, 0 for other types.
    """

    item_bytes: int
    elem_bytes: int
    exp_bits: int


def _plain(item_bytes: int, *names: str) -> dict[str, DtypeInfo]:
    return {name: DtypeInfo(item_bytes, item_bytes, 0) for name in names}


# Quantised types are absent on purpose: their scales live outside their bytes.
DTYPES: dict[str, DtypeInfo] = {
    **_plain(1, "bool", "uint8", "int8", "bits8", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2"),
    **_plain(1, *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))),
    **_plain(2, "uint16", "int16", "bits16"),
    **_plain(4, "uint32", "int32"),
    **_plain(8, "uint64", "int64"),
    "float8_e4m3fn": DtypeInfo(1, 1, 4),
    "float8_e4m3fnuz": DtypeInfo(1, 1, 4),
    "float8_e5m2": DtypeInfo(1, 1, 5),
    "float8_e5m2fnuz": DtypeInfo(1, 1, 5),
    "float8_e8m0fnu": DtypeInfo(1, 1, 0),
    "float16": DtypeInfo(2, 2, 5),
    "bfloat16": DtypeInfo(2, 2, 8),
    "float32": DtypeInfo(4, 4, 8),
    "float64": DtypeInfo(8, 8, 11),
    "complex32": DtypeInfo(4, 2, 5),
    "complex64": DtypeInfo(8, 4, 8),
    "complex128": DtypeInfo(16, 8, 11),
}


def dtype_info(dtype: str) -> DtypeInfo:
    """Returns what an element of a dtype is made of.

    Args:
        dtype: a torch dtype's name, such as "bfloat16" or "torch.bfloat16".

    Raises:
        UsageError: a type that archives do not hold.
    """
    info = DTYPES.get(dtype.removeprefix("torch."))
    if info is None:
        raise UsageError(f"dtype {dtype!r} cannot be stored; convert the tensor to one of {', '.join(DTYPES)}")
    return info


@dataclass(frozen=True, slots=True)
class Spec:
    """How chunks are encoded; the Python form of h3_spec.

    Attributes:
        elem_bytes: 1, 2, 4 or 8.
        row_bytes: distance of Delta.ROW in bytes, a multiple of elem_bytes; 0: no rows.
        filter: tried first; a chunk that does not shrink is stored raw.
        delta: subtracted before the filter.
        exp_bits: exponent bits of a float, 0 for other types.
        level: zstd level, 1 to 3; 0 with Filter.RAW: raw because the writer asked for it, see raw_spec.
    """

    elem_bytes: int
    row_bytes: int = 0
    filter: Filter = Filter.ZSTD
    delta: Delta = Delta.NONE
    exp_bits: int = 0
    level: int = 1

    def to_native(self) -> Any:
        """A new h3_spec; keep the returned object alive while native code uses it."""
        return ffi.new("h3_spec *", dict(zip(self.__slots__, self.to_list(), strict=True)))

    def to_list(self) -> list[int]:
        """The six numbers of the file format, in its order."""
        return [self.elem_bytes, self.row_bytes, int(self.filter), int(self.delta), self.exp_bits, self.level]

    @property
    def is_uncompressed(self) -> bool:
        """The writer asked for raw chunks; where a trial found nothing better, level is not 0."""
        return self.filter == Filter.RAW and self.level == 0

    @classmethod
    def from_list(cls, numbers: list[int]) -> Spec:
        """The inverse of to_list.

        Raises:
            ValueError: not six numbers in their ranges; the numbers may come from an untrusted file.
        """
        elem_bytes, row_bytes, filter_, delta, exp_bits, level = numbers
        spec = cls(elem_bytes, row_bytes, Filter(filter_), Delta(delta), exp_bits, level)
        spec.validate()
        return spec

    def validate(self) -> None:
        """Raises ValueError when a field breaks its rule."""
        if self.elem_bytes not in (1, 2, 4, 8):
            raise ValueError(f"elem_bytes is {self.elem_bytes}, must be 1, 2, 4 or 8")
        if not 0 <= self.row_bytes < 2**32 or self.row_bytes % self.elem_bytes:
            raise ValueError(f"row_bytes is {self.row_bytes}, must be a multiple of {self.elem_bytes} below 2^32")
        if self.delta == Delta.ROW and not self.row_bytes:
            raise ValueError("row_bytes is 0, but delta along rows needs a row")
        if not 0 <= self.exp_bits < 8 * self.elem_bytes:
            raise ValueError(f"exp_bits is {self.exp_bits}, must be below {8 * self.elem_bytes}")
        if not 0 <= self.level <= 3:
            raise ValueError(f"level is {self.level}, must be 0 to 3")
        if self.filter == Filter.PATCH:
            raise ValueError("PATCH is a filter of single chunks, not of a spec")


def default_spec(dtype: str, row_bytes: int = 0) -> Spec:
    """The usual best for a type, for tensors whose contents are not known yet.

    Args:
        dtype: a torch dtype's name.
        row_bytes: kept in the spec, so that a later trial may use Delta.ROW; dropped when no multiple of the element.
    """
    info = dtype_info(dtype)
    filter_ = Filter.ZSTD if info.elem_bytes == 1 else Filter.BYTEPLANE
    if info.exp_bits == 8:
        filter_ = Filter.EXPNIBBLE
    rows = row_bytes if row_bytes % info.elem_bytes == 0 and row_bytes < 2**32 else 0
    return replace(Spec(info.elem_bytes, rows), filter=filter_, exp_bits=info.exp_bits)


def raw_spec(dtype: str, row_bytes: int = 0) -> Spec:
    """The spec of a tensor that is never to be compressed; arguments as of default_spec."""
    return replace(default_spec(dtype, row_bytes), filter=Filter.RAW, level=0)
