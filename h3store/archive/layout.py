"""Fixed structures of the file: header page and commit slots, to bytes and back. Owns their offsets and limits as
FORMAT.md states them; refuses to do input or output."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from h3store._ffi import ffi, lib
from h3store.errors import ArchiveFormatError, CorruptArchiveError

__all__ = ["FEATURE_BASE", "FEATURE_PATCH", "HEADER_BYTES", "MAX_INDEX_BYTES", "SLOT_BYTES", "SLOT_OFFSETS", "Header",
           "Slot", "xxh64"]

MAGIC = b"\x89H3S\r\n\x1a\n"
MAJOR, MINOR = 1, 0
HEADER_BYTES = 4096
SLOT_OFFSETS = (512, 1024)
SLOT_BYTES = 64
MAX_INDEX_BYTES = 256 * 1024**2
FEATURE_BASE = 1
FEATURE_PATCH = 2
_KNOWN_REQUIRED = FEATURE_BASE | FEATURE_PATCH

_HEADER = struct.Struct("<8sHHIQQ16s")
_SLOT = struct.Struct("<QQQQQQQ")
_CHECK = struct.Struct("<Q")
_USED_BY_HEADER = _HEADER.size + _CHECK.size
_RESERVED = ((_USED_BY_HEADER, 512), (512 + SLOT_BYTES, 1024), (1024 + SLOT_BYTES, HEADER_BYTES))


def xxh64(data: bytes, seed: int = 0) -> int:
    """XXH64 of bytes, as an unsigned int."""
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
    """

    sequence: int
    index_offset: int
    index_bytes: int
    index_check: int
    covered_bytes: int
    required: int = 0

    @property
    def which(self) -> int:
        """The slot that this commit lies in, 0 or 1."""
        return self.sequence % 2

    @property
    def offset(self) -> int:
        """Where in the header page this commit's slot lies."""
        return SLOT_OFFSETS[self.which]

    def to_bytes(self, uuid: bytes) -> bytes:
        """The 64 bytes of the slot."""
        fields = _SLOT.pack(self.sequence, self.index_offset, self.index_bytes, self.index_check, self.covered_bytes,
                            self.required, 0)
        return fields + _CHECK.pack(xxh64(fields, _seed(uuid)))

    @classmethod
    def from_page(cls, page: bytes, which: int, uuid: bytes, path: str, file_bytes: int) -> Slot | None:
        """Reads slot 0 or 1 of a header page; None when it was never written.

        Raises:
            CorruptArchiveError: it fails its check, or points outside the file.
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
        slot._check_bounds(which, where, file_bytes)
        return slot

    def _check_bounds(self, which: int, where: str, file_bytes: int) -> None:
        if self.sequence < 1 or self.sequence % 2 != which:
            raise CorruptArchiveError(f"{where}: sequence {self.sequence} does not belong there")
        if not 2 <= self.index_bytes <= MAX_INDEX_BYTES:
            raise CorruptArchiveError(f"{where}: an index of {self.index_bytes} bytes; the limit is {MAX_INDEX_BYTES}")
        if self.index_offset < HEADER_BYTES or self.index_offset + self.index_bytes > self.covered_bytes:
            raise CorruptArchiveError(f"{where}: index at byte {self.index_offset} of {self.index_bytes} bytes; "
                                      f"the commit covers bytes {HEADER_BYTES} to {self.covered_bytes}")
        if self.covered_bytes > file_bytes:
            raise CorruptArchiveError(f"{where}: the commit covers {self.covered_bytes} bytes, "
                                      f"the file has {file_bytes}")


def _seed(uuid: bytes) -> int:
    return int.from_bytes(uuid[:8], "little")
