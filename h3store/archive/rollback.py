"""The way back from a damaged last commit. Owns the one write that gives a commit up; refuses to give a sound one up
for an older."""

from __future__ import annotations

import os

from h3store.archive.commits import Commit, Damage, examine
from h3store.archive.fileio import FileIO
from h3store.archive.layout import SLOT_BYTES, SLOT_OFFSETS
from h3store.archive.place import Place
from h3store.errors import CorruptArchiveError, UsageError

__all__ = ["rollback"]


def rollback(path: str | os.PathLike[str]) -> int:
    """Gives up the damaged last commit of an archive for the one before it, for good. Blocks on the disk.

    Returns:
        The sequence number of the commit now in use.

    Raises:
        UsageError: the last commit is sound. CorruptArchiveError: no older commit can be read. ArchiveLockedError: a
        writer has the file open. ArchiveNotFoundError, ArchiveFormatError, StorageFullError, ArchiveError.
    """
    name = os.fspath(path)
    place = Place(name, new=False)
    try:
        io = FileIO(place.fd, 0, name, writable=True)
        try:
            return _rollback(io, place.fd)
        finally:
            io.close()
    finally:
        place.close()


def _rollback(io: FileIO, fd: int) -> int:
    found = examine(io, fd)
    if isinstance(found, Commit):
        raise UsageError(f"{io.path}: commit {found.slot.sequence} is the last one and sound, so there is nothing to "
                         "go back from; damage to single blocks is repaired from a copy only")
    if found.older is None:
        raise CorruptArchiveError(found.message)
    io.overwrite(SLOT_OFFSETS[found.which], bytes(SLOT_BYTES), "commit slot")
    io.sync("commit slot")
    after = examine(io, fd)
    if isinstance(after, Damage):
        raise CorruptArchiveError(after.message)
    return after.slot.sequence
