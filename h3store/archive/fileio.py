"""Bytes of an archive file through the native engine, so that reads, writes and their failures take one path. Owns an
h3_file; refuses to know what the bytes mean."""

from __future__ import annotations

from typing import Any

from h3store._ffi import check, ffi, lib
from h3store.errors import StoreClosedError

__all__ = ["FileIO"]


class FileIO:
    """Positions of one open file. The descriptor is the owner's to close, after this."""

    def __init__(self, fd: int, tail: int, path: str, *, writable: bool) -> None:
        out = ffi.new("h3_file **")
        check(lib.h3_file_create(fd, tail, int(writable), out), path)
        self.path = path
        self._native: Any = out[0]

    @property
    def native(self) -> Any:
        """The h3_file, for native code; valid until close.

        Raises:
            StoreClosedError: after close.
        """
        if self._native is None:
            raise StoreClosedError(f"{self.path}: the archive is closed; open it again")
        return self._native

    @property
    def tail(self) -> int:
        """Where the next append goes."""
        return lib.h3_file_tail(self.native)

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Exactly size bytes from offset; what names them in an error."""
        out = bytearray(size)
        buffer = ffi.from_buffer(out, require_writable=True)
        check(lib.h3_file_read(self.native, offset, buffer, size), f"{self.path}: {what} at byte {offset}")
        return bytes(out)

    def append(self, data: bytes, what: str) -> int:
        """Appends and returns the offset."""
        at = ffi.new("uint64_t *")
        status = lib.h3_file_append(self.native, ffi.from_buffer(data), len(data), at)
        check(status, f"{self.path}: write of {what} at byte {at[0]}")
        return at[0]

    def overwrite(self, offset: int, data: bytes, what: str) -> None:
        """Replaces bytes at offset."""
        status = lib.h3_file_overwrite(self.native, offset, ffi.from_buffer(data), len(data))
        check(status, f"{self.path}: write of {what} at byte {offset}")

    def sync(self, what: str) -> None:
        """Waits until everything written is on the disk."""
        check(lib.h3_file_sync(self.native), f"{self.path}: flush of {what}")

    def close(self) -> None:
        """Frees the h3_file. No native code may still use it."""
        if self._native is not None:
            lib.h3_file_destroy(self._native)
            self._native = None
