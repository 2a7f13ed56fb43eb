"""Fixed structures of the file: header page and commit slots, to bytes and back. Owns their offsets and limits as
FORMAT.md states them; refuses to do input or output."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np

from h3store._ffi import ffi, lib
from h3store.errors import ArchiveFormatError, CorruptArchiveError

__all__ = ["FEATURE_BASE", "FEATURE_CHANGES", "FEATURE_PATCH", "FEATURE_QUICK", "FEATURE_XXH3", "HEADER_BYTES",
           "MAX_INDEX_BYTES", "SLOT_BYTES", "SLOT_OFFSETS", "Header", "Slot", "xxh64"]

MAGIC = b"\x89H3S\r\n\x1a\n"
MAJOR, MINOR = 1, 0
HEADER_BYTES = 4096
SLOT_OFFSETS = (512, 1024)
SLOT_BYTES = 88
MAX_INDEX_BYTES = 256 * 1024**2
FEATURE_BASE = 1
FEATURE_PATCH = 2
FEATURE_CHANGES = 4
FEATURE_QUICK = 8
FEATURE_XXH3 = 16
_KNOWN_REQUIRED = FEATURE_BASE | FEATURE_PATCH | FEATURE_CHANGES | FEATURE_QUICK | FEATURE_XXH3

_HEADER = struct.Struct("<8sHHIQQ16s")
_SLOT = struct.Struct("<QQQQQQQ")
_QUICK = struct.Struct("<QQ")
_FIRST_BYTES, _SEAL_AT = 64, 80
_CHECK = struct.Struct("<Q")
_USED_BY_HEADER = _HEADER.size + _CHECK.size
_RESERVED = ((_USED_BY_HEADER, 512), (512 + SLOT_BYTES, 1024), (1024 + SLOT_BYTES, HEADER_BYTES))


def xxh64(data: bytes | np.ndarray, seed: int = 0) -> int:
    """XXH64 of bytes or of a contiguous uint8 array, as an unsigned int."""
    return lib.h3_xxh64(ffi.from_buffer(data), len(data), seed)


def _check_features(required: int, where: str) -> None:
    unknown = required & ~_KNOWN_REQUIRED
    if unknown:
        raise ArchiveFormatError(f"{where}: needs features {unknown:#x} that this build does not know; "
                                 "install a newer h3store")


@dataclass(frozen=True, slots=True)
class Header:
    """What the header page says apart from its commit slots.

    Attributes:
        uuid: 16 random bytes, made with the file.
    """

    uuid: bytes

    def to_bytes(self) -> bytes:
        """The 4096-byte page, both slots empty."""
        fields = _HEADER.pack(MAGIC, MAJOR, MINOR, HEADER_BYTES, 0, 0, self.uuid)
        return (fields + _CHECK.pack(xxh64(fields))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, page: bytes, path: str) -> Header:
        """Reads a page.

        Raises:
            ArchiveFormatError: no archive, or a version or feature that this build does not know.
            CorruptArchiveError: the page is cut or fails its check.
        """
        if page[:8] != MAGIC[:len(page)]:
            raise ArchiveFormatError(f"{path}: not an h3store archive: it starts with {page[:8]!r}, not {MAGIC!r}")
        if len(page) < HEADER_BYTES:
            raise CorruptArchiveError(f"{path}: the file ends at byte {len(page)}, inside its header of {HEADER_BYTES} "
                                      "bytes; restore it from a copy")
        _, major, _, header_bytes, required, _, uuid = _HEADER.unpack_from(page)
        if major != MAJOR:
            raise ArchiveFormatError(f"{path}: format version {major} at byte 8; this build reads version {MAJOR}")
        (check,) = _CHECK.unpack_from(page, _HEADER.size)
        if check != xxh64(page[:_HEADER.size]) or header_bytes != HEADER_BYTES:
            raise CorruptArchiveError(f"{path}: the header fails its check at byte {_HEADER.size}; "
                                      "restore it from a copy")
        if any(any(page[start:end]) for start, end in _RESERVED):
            raise CorruptArchiveError(f"{path}: reserved bytes of the header are not zero; restore it from a copy")
        _check_features(required, f"{path}: header")
        return cls(uuid)


@dataclass(frozen=True, slots=True)
class Slot:
    """One commit.

    Attributes:
        sequence: 1 for a file's first commit.
        index_offset, index_bytes, index_check: where the index lies, and its XXH64.
        covered_bytes: length of the file in this commit.
        required: required feature bits of the contents.
        start: with FEATURE_QUICK, the lowest offset of what may not have been on disk when the slot was written.
        sealed: with FEATURE_QUICK, all of it is on disk.
    """

    sequence: int
    index_offset: int
    index_bytes: int
    index_check: int
    covered_bytes: int
    required: int = 0
    start: int = 0
    sealed: bool = False

    @property
    def unsealed(self) -> bool:
        """Whether a crash may have left the slot and not all that it refers to."""
        return bool(self.required & FEATURE_QUICK) and not self.sealed

    @property
    def which(self) -> int:
        """The slot that this commit lies in, 0 or 1."""
        return self.sequence % 2

    @property
    def offset(self) -> int:
        """Where in the header page this commit's slot lies."""
        return SLOT_OFFSETS[self.which]

    def to_bytes(self, uuid: bytes) -> bytes:
        """The 88 bytes of the slot."""
        fields = _SLOT.pack(self.sequence, self.index_offset, self.index_bytes, self.index_check, self.covered_bytes,
                            self.required, 0)
        fields += _CHECK.pack(xxh64(fields, _seed(uuid)))
        if not self.required & FEATURE_QUICK:
            return fields.ljust(SLOT_BYTES, b"\0")
        fields += _CHECK.pack(self.start)
        fields += _CHECK.pack(xxh64(fields, _seed(uuid)))
        return fields + (_CHECK.pack(xxh64(fields, _seed(uuid))) if self.sealed else bytes(8))

    def seal(self, uuid: bytes) -> tuple[int, bytes]:
        """What says that all of a quick commit is on disk: offset in the file, and bytes."""
        return self.offset + _SEAL_AT, replace(self, sealed=True).to_bytes(uuid)[_SEAL_AT:]

    @classmethod
    def from_page(cls, page: bytes, which: int, uuid: bytes, path: str) -> Slot | None:
        """Reads slot 0 or 1 of a header page; None when it was never written.

        Raises:
            CorruptArchiveError: it fails its check, or a bound that does not depend on the file's length.
            ArchiveFormatError: the commit needs a feature that this build does not know.
        """
        at = SLOT_OFFSETS[which]
        data = page[at:at + SLOT_BYTES]
        if not any(data):
            return None
        where = f"{path}: commit slot {which} at byte {at}"
        if _CHECK.unpack_from(data, _SLOT.size)[0] != xxh64(data[:_SLOT.size], _seed(uuid)):
            raise CorruptArchiveError(f"{where} fails its check")
        slot = cls(*_SLOT.unpack_from(data)[:6])
        _check_features(slot.required, where)
        if slot.required & FEATURE_QUICK:
            slot = slot._with_quick_part(data, uuid, where)
        elif any(data[_FIRST_BYTES:]):
            raise CorruptArchiveError(f"{where}: reserved bytes are not zero")
        slot._check_bounds(which, where)
        return slot

    def _with_quick_part(self, data: bytes, uuid: bytes, where: str) -> Slot:
        start, check = _QUICK.unpack_from(data, _FIRST_BYTES)
        (seal,) = _CHECK.unpack_from(data, _SEAL_AT)
        right = xxh64(data[:_SEAL_AT], _seed(uuid))
        if check != xxh64(data[:_SEAL_AT - 8], _seed(uuid)) or seal not in (0, right):
            raise CorruptArchiveError(f"{where} fails its check")
        return replace(self, start=start, sealed=seal == right)

    def _check_bounds(self, which: int, where: str) -> None:
        if self.sequence < 1 or self.sequence % 2 != which:
            raise CorruptArchiveError(f"{where}: sequence {self.sequence} does not belong there")
        if not 2 <= self.index_bytes <= MAX_INDEX_BYTES:
            raise CorruptArchiveError(f"{where}: an index of {self.index_bytes} bytes; the limit is {MAX_INDEX_BYTES}")
        if self.index_offset < HEADER_BYTES or self.index_offset + self.index_bytes > self.covered_bytes:
            raise CorruptArchiveError(f"{where}: index at byte {self.index_offset} of {self.index_bytes} bytes; "
                                      f"the commit covers bytes {HEADER_BYTES} to {self.covered_bytes}")
        if self.required & FEATURE_QUICK and not HEADER_BYTES <= self.start <= self.index_offset:
            raise CorruptArchiveError(f"{where}: new bytes start at {self.start}, the index at {self.index_offset}")

    def check_length(self, path: str, file_bytes: int) -> None:
        """Raises CorruptArchiveError when the file is shorter than the commit."""
        where = f"{path}: commit slot {self.which} at byte {self.offset}"
        if self.covered_bytes > file_bytes:
            raise CorruptArchiveError(f"{where}: the commit covers {self.covered_bytes} bytes, "
                                      f"the file has {file_bytes}")


def _seed(uuid: bytes) -> int:
    return int.from_bytes(uuid[:8], "little")
