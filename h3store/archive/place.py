"""Where a writer's bytes go: the locked descriptor of an archive, or of the temporary file that replaces it. Owns
locks, the rename and the flush of the folder; refuses to know what is in the file.

A new archive grows in ".NAME.partial" beside it. That name is fixed so that its lock also excludes a second writer of
the same new archive; a file left over from a crash is taken over.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

from h3store.archive.reader import open_regular
from h3store.errors import ArchiveError, ArchiveLockedError, ArchiveNotFoundError, StorageFullError

__all__ = ["Place"]

_TRIES = 16


class Place:
    """A locked, writable descriptor.

    Attributes:
        fd: open until close.
        replaces: an older file was at the path when a new one was begun.
        pending: a new file that is not yet at its path.
    """

    def __init__(self, path: str, *, new: bool, held: bool = False) -> None:
        """Locks path, and opens its partial file when new. held: the caller has the lock of path already.

        Raises:
            ArchiveLockedError, ArchiveNotFoundError, ArchiveFormatError, StorageFullError, ArchiveError.
        """
        self.path = os.path.realpath(path)
        folder, name = os.path.split(self.path)
        self._partial = os.path.join(folder, f".{name}.partial")
        self.fd = -1
        self._old_fd = -1
        self._pid = os.getpid()
        self.pending = new
        for _ in range(_TRIES):
            if self._take(new, held):
                self.replaces = new and self._old_fd >= 0
                if not new:
                    self._sweep()
                return
            self._drop()
        raise ArchiveLockedError(f"{path}: other writers keep replacing it; stop them, then try again")

    def _take(self, new: bool, held: bool) -> bool:
        """One attempt; False when a name was replaced between its opening and its lock."""
        if not new:
            self.fd = self._locked(open_regular(self.path, os.O_RDWR))
            return _is_at(self.fd, self.path)
        if not held and os.path.lexists(self.path):
            self._old_fd = self._locked(open_regular(self.path, os.O_RDONLY))
            if not _is_at(self._old_fd, self.path):
                return False
        self.fd = self._locked(self._create_partial())
        if not _is_at(self.fd, self._partial) or (
            not held and self._old_fd < 0 and os.path.lexists(self.path)
        ):
            return False
        self.truncate(0)
        return True

    def _sweep(self) -> None:
        """Removes what a killed writer left of a file to replace this one; the holder of this lock alone may."""
        try:
            fd = os.open(self._partial, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(self._partial)
        except OSError:
            pass
        finally:
            os.close(fd)

    def _create_partial(self) -> int:
        try:
            return os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except (FileNotFoundError, NotADirectoryError) as error:
            folder = os.path.dirname(self.path)
            if os.path.isdir(folder):  # such as /proc
                raise ArchiveError(f"{self.path}: no file can be made in {folder}; choose another folder") from error
            raise ArchiveNotFoundError(f"{self.path}: its folder does not exist; create it first") from error
        except OSError as error:
            raise _translated(self.path, error) from error

    def _locked(self, fd: int) -> int:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ArchiveLockedError(f"{self.path}: another writer has it open; wait for it to close, or open the "
                                         "archive for reading") from error
            raise _translated(self.path, error) from error
        return fd

    def truncate(self, size: int) -> None:
        """Cuts the file to size bytes."""
        try:
            os.ftruncate(self.fd, size)
        except OSError as error:
            raise _translated(self.path, error) from error

    def publish(self) -> None:
        """After a flush of the file: moves a new one to its path, for good. Does nothing the next times."""
        if not self.pending:
            return
        try:
            os.replace(self._partial, self.path)
            self.pending = False
            folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise _translated(self.path, error) from error
        if self._old_fd >= 0:
            os.close(self._old_fd)
            self._old_fd = -1

    def unlink(self) -> None:
        """Takes the file's name away, if it is still this file's."""
        if os.getpid() == self._pid and self.fd >= 0 and _is_at(self.fd, self.path):
            with suppress(OSError):
                os.unlink(self.path)

    def close(self) -> None:
        """Unlocks and closes; a new file that was never published is removed. Closing twice is fine."""
        ours = os.getpid() == self._pid  # and not a forked child's, whose parent still writes it
        if ours and self.pending and self.fd >= 0 and _is_at(self.fd, self._partial):
            os.unlink(self._partial)
        self._drop()

    def _drop(self) -> None:
        for fd in (self.fd, self._old_fd):
            if fd >= 0:
                # Not left to close: a forked child that still has the descriptor would keep the lock.
                if os.getpid() == self._pid:
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)
        self.fd = self._old_fd = -1


def _is_at(fd: int, path: str) -> bool:
    """Whether path still names the file that fd has open."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _translated(path: str, error: OSError) -> ArchiveError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageFullError(f"{path}: no space left ({error.strerror}); free some, the last commit stands")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ArchiveError(f"{path}: {error.strerror}; choose a folder and a file that you may write to")
    return ArchiveError(f"{path}: {error.strerror}")
