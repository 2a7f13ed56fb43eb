"""Byte sizes and counts as people write them. Owns parsing and printing; imports nothing of ours but the error tree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

from h3store.errors import UsageError

_Number = TypeVar("_Number", int, float)
KiB = 1024
MiB = 1024**2
GiB = 1024**3
_UNITS = {"": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": 1024**4,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": KiB, "m": MiB, "g": GiB, "t": 1024**4}
_MAX_BYTES = 2**47  # of address space that a process has
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, what: str = "size") -> int:
    """Returns a size in bytes.

    Args:
        value: an int of bytes, or text such as "64MiB", "1.5GiB", "200MB" (KiB, MiB, GiB are powers of two; KB, MB, GB
            of ten; a bare K, M, G means the power of two).
        what: the name that an error message gives the value.

    Raises:
        UsageError: not a size, negative, or more than a process can address.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise UsageError(f"{what}: {value} is negative; give a number of bytes or a text such as \"64MiB\"")
        return _addressable(value, value, what)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{what}: {value!r} is not a size; give a number of bytes or a text such as \"64MiB\"")
    return int(_addressable(float(match.group(1)) * unit, value, what))


def _addressable(size: _Number, value: int | str, what: str) -> _Number:
    if size > _MAX_BYTES:
        raise UsageError(f"{what}: {value!r:.40} is over {format_bytes(_MAX_BYTES)}, which is all that a process can "
                         "address; give what this machine has")
    return size


def counted(number: int, what: str) -> str:
    """Returns a number and its noun: "1 tensor", "2 tensors"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def exact_bytes(count: int) -> str:
    """Returns a size as flags and arguments take it, exact: 65536 -> "64KiB"."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)


def format_bytes(count: int) -> str:
    """Returns a size for people, in powers of two: 1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def available_memory() -> int:
    """Returns the bytes of host memory that are available now, 1 GiB where the kernel does not say."""
    try:
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * KiB
    except (OSError, IndexError, ValueError):
        return GiB
