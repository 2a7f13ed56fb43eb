"""The nvme tier: files that blocks are read from and appended to. Owns native file handles and scratch files; the
archive's format is the archive's."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

from h3store._ffi import check, ffi, lib
from h3store.errors import ArchiveError, StorageFullError

__all__ = ["ScratchFile", "file_handle"]


def file_handle(fd: int, tail: int, writable: bool) -> Any:
    """Returns a native file over a descriptor that the caller keeps open longer than the handle; freed with it."""
    out = ffi.new("h3_file **")
    check(lib.h3_file_create(fd, tail, int(writable), out), f"file descriptor {fd}")
    return ffi.gc(out[0], lib.h3_file_destroy)


class ScratchFile:
    """An unnamed file for blocks that need not outlive the process; its space returns when the last user is gone.

    Args:
        folder: where the space is taken from.

    Raises:
        StorageFullError, ArchiveError: the file could not be made there.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.fd, name = tempfile.mkstemp(prefix=".h3-scratch-", dir=folder)
            os.unlink(name)
        except OSError as error:
            kind = StorageFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ArchiveError
            raise kind(
                f"{folder}: no scratch file could be made there ({error.strerror}); give a store on a disk with room"
            ) from error
        self.native = file_handle(self.fd, 0, writable=True)

    @property
    def nbytes(self) -> int:
        """Bytes appended so far."""
        return int(lib.h3_file_tail(self.native))

    def __del__(self) -> None:
        fd = getattr(self, "fd", -1)
        if fd >= 0:
            self.native = None
            os.close(fd)
            self.fd = -1
