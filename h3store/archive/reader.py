"""Reading an archive at its last commit. Owns an open descriptor and the checks of chunk tables; refuses to open at an
older commit when the last one is damaged, and to decode chunks: tensors are filled by the pager."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from h3store.archive.commits import Damage, examine
from h3store.archive.fileio import FileIO
from h3store.archive.layout import MAGIC
from h3store.archive.records import TensorRecord
from h3store.archive.tables import read_table
from h3store.errors import (
    ArchiveError,
    ArchiveFormatError,
    ArchiveNotFoundError,
    CorruptArchiveError,
    StoreClosedError,
    TensorNotFoundError,
    UsageError,
)

__all__ = ["Reader", "checked_path", "is_archive", "open_regular"]


def checked_path(path: object, what: str = "path") -> str:
    """Returns a path as text.

    Raises:
        UsageError: it is none; what names it in the message.
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str):
        raise UsageError(f"{what} is {path!r:.100}, a {type(path).__name__}; give the archive's path as a str or Path")
    if not name or "\0" in name:
        raise UsageError(f"{what} is {name!r:.100}, which names no file; give the path of an archive")
    return name


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file at path begins as an archive does."""
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Opens an existing regular file and returns the descriptor.

    Raises:
        ArchiveNotFoundError, ArchiveFormatError (a folder, device or pipe), ArchiveError (no permission).
    """
    name = os.fspath(path)
    try:
        fd = os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArchiveNotFoundError(f"{name}: no archive there; check the path") from error
    except OSError as error:
        if error.errno == errno.EISDIR:
            raise ArchiveFormatError(f"{name}: a folder, not an archive file") from error
        way_out = "; check who may read it" if error.errno in (errno.EACCES, errno.EPERM) else ""
        raise ArchiveError(f"{name}: cannot be opened: {error.strerror}{way_out}") from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or pipe"
        raise ArchiveFormatError(f"{name}: {kind}, not an archive file")
    return fd


class Reader:
    """An archive as its last commit left it.

    Attributes:
        path: as given.
        fd: descriptor, open for reading until close.
        uuid: 16 bytes, made with the file.
        sequence: number of the commit in use.
        records: tensors by name.
        metadata: the writer's own.
        file_bytes: length of the file that the commit covers.
        unfinished: slot of a newer commit that a crash cut short, if there is one.
    """

    def __init__(self, path: str | os.PathLike[str], *, fd: int | None = None) -> None:
        """Opens and checks; fd, when given, is an open descriptor of path that the caller keeps.

        Raises:
            CorruptArchiveError: the file was cut or damaged; h3store.archive.rollback returns to an older commit where
            there is one. ArchiveNotFoundError, ArchiveFormatError, ArchiveError.
        """
        self.path = checked_path(path)
        self._owns_fd = fd is None
        self.fd = open_regular(path, os.O_RDONLY) if fd is None else fd
        self._io: FileIO | None = None
        try:
            self._io = FileIO(self.fd, os.fstat(self.fd).st_size, self.path, writable=False)
            found = examine(self._io, self.fd)
            if isinstance(found, Damage):
                raise CorruptArchiveError(found.message)
            self.uuid, self.slot, self.unfinished = found.uuid, found.slot, found.unfinished
            self.records, self.metadata = found.records, found.metadata
        except BaseException:
            self.close()
            raise

    @property
    def sequence(self) -> int:
        """Number of the commit in use."""
        return self.slot.sequence

    @property
    def file_bytes(self) -> int:
        """Length of the file that the commit covers."""
        return self.slot.covered_bytes

    @property
    def file(self) -> Any:
        """The h3_file that ranges read from; valid until close."""
        return self.io.native

    @property
    def io(self) -> FileIO:
        """The open file.

        Raises:
            StoreClosedError: after close.
        """
        if self._io is None:
            raise StoreClosedError(f"{self.path}: the archive is closed; open it again")
        return self._io

    def record(self, name: str) -> TensorRecord:
        """The record of a tensor.

        Raises:
            TensorNotFoundError.
        """
        if name not in self.records:
            raise TensorNotFoundError(f"{self.path}: no tensor {name!r} among {len(self.records)}")
        return self.records[name]

    def chunks(self, record: TensorRecord) -> np.ndarray:
        """The chunk table of a record: dtype CHUNK_DTYPE, shape (n_chunks,), read-only; read and checked once.

        Raises:
            CorruptArchiveError: it fails its check, or an entry breaks a rule.
        """
        if record.chunks is None:
            record.chunks = read_table(self.io, record, self.slot.covered_bytes)
        return record.chunks

    def base_path(self, record: TensorRecord) -> Path:
        """Where the archive of a record's base lies."""
        if record.base is None:
            raise CorruptArchiveError(f"{self.path}: tensor {record.name[:80]!r} names no base")
        return Path(self.path).parent / record.base.path

    def close(self) -> None:
        """Closes the descriptor; nothing may still read through it. Closing twice is fine."""
        if self._io is not None:
            self._io.close()
            self._io = None
        if self._owns_fd and self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        # Ranges hold their reader: the descriptor goes with the last of them.
        if getattr(self, "_io", None) is not None:
            self.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
