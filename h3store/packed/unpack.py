"""An archive back into the folder that was packed. Owns that the folder appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from h3store.archive import check_bases
from h3store.errors import (
    ArchiveError,
    ArchiveLockedError,
    CorruptArchiveError,
    CorruptBlockError,
    StorageFullError,
    UsageError,
)
from h3store.packed.contents import PackedFolder
from h3store.units import MiB

__all__ = ["unpack"]

_DDR_BYTES = 64 * MiB
_PIECE_BYTES = 8 * MiB


def unpack(archive: str | os.PathLike[str], out: str | os.PathLike[str], *, force: bool = False,
           progress: Callable[[int, int], None] | None = None) -> dict[str, int]:
    """Writes the folder that was packed, bit for bit.

    Args:
        archive: made by pack; the archives that it leans on must be where they were.
        out: the folder to make; it appears when it is whole and on the disk.
        force: put the files into a folder that has files already, replacing those of the same names.
        progress: called with (bytes done, bytes in all).

    Returns: how many "files" and "bytes".

    Raises:
        UsageError: the folder is there and not empty, or something in it is in the way.
        ArchiveNotFoundError, CorruptArchiveError: the archive, or one that it leans on, is missing, damaged or another
            one now; nothing was made.
        StorageFullError, ArchiveError.
    """
    target = Path(out)
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; give a folder")
    if not target.resolve().parent.is_dir():
        raise UsageError(f"{target}: its folder does not exist; create it first")
    has_files = target.is_dir() and any(target.iterdir())
    if has_files and not force:
        raise UsageError(f"{target} is there and not empty; --force puts the files into it")
    with PackedFolder(archive, _DDR_BYTES) as packed:
        check_bases(packed.store.archive)
        _check_target(packed, target)
        with _new_folder(target) as fresh:
            total = sum(file.nbytes for file in packed.files.values())
            done = 0
            for name in packed.files:
                done = _write_file(packed, name, fresh, lambda now: progress and progress(now, total), done)
            for name in packed.folders:
                (fresh / name).mkdir(parents=True, exist_ok=True)
            _publish(packed, fresh, target, has_files)
    return {"files": len(packed.files), "bytes": total}


def _check_target(packed: PackedFolder, target: Path) -> None:
    """Files go into the target and nowhere else, and onto nothing but files."""
    for name in (*packed.files, *packed.folders):
        for part in reversed(Path(name).parents[:-1]):
            if (target / part).is_symlink():
                raise UsageError(f"{target / part} is a link, and {name} would be written through it; remove the link")
            if (target / part).exists() and not (target / part).is_dir():
                raise UsageError(f"{target / part} is a file, and {name} needs a folder there; move it away")
        if name in packed.files and (target / name).is_dir() and not (target / name).is_symlink():
            raise UsageError(f"{target / name} is a folder, and a file goes there; move it away")


def _write_file(packed: PackedFolder, name: str, folder: Path, report: Callable[[int], object], done: int) -> int:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with packed.open(name) as stream, path.open("xb", buffering=0) as file:
        while got := _read(packed, name, stream.raw, buffer):
            _write_all(file.fileno(), buffer[:got])
            done += got
            report(done)
        os.fsync(file.fileno())
        if file.tell() != packed.files[name].nbytes:
            raise CorruptArchiveError(f"{packed.path}: {name} came out with {file.tell()} bytes, not "
                                      f"{packed.files[name].nbytes}")
    return done


def _read(packed: PackedFolder, name: str, stream: object, buffer: memoryview) -> int:
    try:
        return stream.readinto(buffer)  # type: ignore[attr-defined]  # a RawIOBase
    except CorruptBlockError as error:
        bases = {r.base.path for n in packed.store if (r := packed.store.record(n)).base is not None}
        hint = f"; it is a difference to {', '.join(sorted(bases))}: has that archive changed since?" if bases else ""
        raise CorruptBlockError(f"{name}: {error}{hint}") from error


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A locked folder beside the target, removed at the end; one left over from a crash is taken over."""
    fresh = target.resolve().parent / f".{target.resolve().name}.partial"
    fd = -1
    try:
        fresh.mkdir(exist_ok=True)
        fd = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ArchiveLockedError(f"{target} is being unpacked by another process; wait for it") from error
        try:
            for left in fresh.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            yield fresh
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except ArchiveError:
        raise
    except OSError as error:
        raise _translated(target, error) from error
    finally:
        if fd >= 0:
            os.close(fd)


def _translated(target: Path, error: OSError) -> ArchiveError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageFullError(f"{target}: no space left ({error.strerror}); free some, nothing was made")
    return ArchiveError(f"{error.filename or target}: {error.strerror}")


def _publish(packed: PackedFolder, fresh: Path, target: Path, has_files: bool) -> None:
    if not has_files:
        os.replace(fresh, target)  # onto nothing, or an empty folder
        _sync_folder(target.resolve().parent)
        return
    for name in packed.folders:
        (target / name).mkdir(parents=True, exist_ok=True)
    for name in packed.files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(fresh / name, target / name)
    for folder in {(target / name).parent for name in packed.files}:
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
