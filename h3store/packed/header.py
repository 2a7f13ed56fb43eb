"""The header of a safetensors file. Owns its rules and the names of its element types; refuses to read tensors.

Source: the safetensors format document: 8 bytes of length (little-endian), JSON, then data without gaps or overlaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from h3store.codec import DTYPES

__all__ = ["Entry", "parse", "read_header"]

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file.

    Attributes:
        name: as in the file.
        dtype, shape: as torch names them; (nbytes,) of uint8 for element types that torch has no name for.
        start, stop: its bytes, counted from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(read: Callable[[int, int], bytes], file_bytes: int) -> bytes:
    """Returns length and JSON of a header, unparsed.

    Args:
        read: (offset, nbytes) to bytes of the file.

    Raises:
        ValueError: what stands there is no header.
    """
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little") if file_bytes >= _LENGTH_BYTES else -1
    if not 2 <= length <= min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {file_bytes}")
    return read(0, _LENGTH_BYTES + length)


def parse(header: bytes, file_bytes: int) -> list[Entry]:
    """Returns the tensors of a header, by offset.

    Args:
        header: what read_header returned.
        file_bytes: length of the whole file.

    Raises:
        ValueError: it breaks a rule of the format, or does not describe exactly these bytes.
    """
    values = json.loads(header[_LENGTH_BYTES:].decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(values, dict):
        raise ValueError("its header is no JSON object")
    values.pop("__metadata__", None)
    entries = sorted((_entry(name, value, len(header)) for name, value in values.items()),
                     key=lambda entry: (entry.start, entry.stop))
    at = len(header)
    for entry in entries:
        if entry.start != at:
            raise ValueError(f"tensor {entry.name[:80]!r} starts at byte {entry.start}; what is before ends at {at}")
        at = entry.stop
    if at != file_bytes:
        raise ValueError(f"its tensors end at byte {at} of {file_bytes}")
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name stands twice in its header")
    return values


def _entry(name: str, value: Any, data_start: int) -> Entry:
    try:
        kind, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        sizes = (*shape, start, stop)
        if not all(type(size) is int and 0 <= size < 2**62 for size in sizes) or not isinstance(kind, str):
            raise TypeError
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"tensor {name[:80]!r} is described by {value!r:.200}") from None
    nbytes, dtype = stop - start, _NAMES.get(kind)
    if kind == "F4" and shape and shape[-1] % 2 == 0:  # torch counts pairs
        dtype, shape = "float4_e2m1fn_x2", (*shape[:-1], shape[-1] // 2)
    if dtype is None:  # newer than this table: kept as bytes
        dtype, shape = "uint8", (nbytes,)
    if nbytes != math.prod(shape) * DTYPES[dtype].item_bytes:
        raise ValueError(f"tensor {name[:80]!r}, {kind} {shape}, has {nbytes} bytes")
    return Entry(name, dtype, shape, data_start + start, data_start + stop)
