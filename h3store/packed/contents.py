"""A packed folder, read in place. Owns the list of its files and streams over them; refuses to trust either: paths and
sizes are checked before they are used."""

from __future__ import annotations

import bisect
import io
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from h3store.archive.records import CARRIED_PREFIX, PACKED_KEY
from h3store.errors import ArchiveFormatError, CorruptArchiveError
from h3store.packed.header import Entry, parse
from h3store.packed.pack import VERSION
from h3store.pager import Range
from h3store.store import Store
from h3store.tensor import in_operation

__all__ = ["PackedFile", "PackedFolder"]


@dataclass(frozen=True)
class PackedFile:
    """One file of a packed folder.

    Attributes:
        name: its path in the folder, with slashes.
        nbytes: its length.
        header_bytes: of a safetensors file; 0 for others.
        carried: the tensor that holds its bytes, or its header.
        renamed: tensors of it that are stored under another name.
    """

    name: str
    nbytes: int
    header_bytes: int
    carried: str
    renamed: dict[str, str]


class PackedFolder:
    """The files of a packed archive.

    Args:
        path: of the archive.
        ddr_bytes: budget of what is read.

    Raises:
        ArchiveFormatError: an archive that was not made by pack, or by a newer one.
        CorruptArchiveError: its list of files contradicts its tensors.
    """

    def __init__(self, path: str | os.PathLike[str], ddr_bytes: int | str | None = None) -> None:
        self.store = Store(path, "r", ddr_bytes)
        self.path = Path(path)
        try:
            self.files, self.folders = self._read_list()
        except BaseException:
            self.close()
            raise

    def _read_list(self) -> tuple[dict[str, PackedFile], list[str]]:
        listed = self.store.archive.metadata.get(PACKED_KEY)
        if listed is None:
            raise ArchiveFormatError(f"{self.path} holds tensors, but no packed folder; h3store pack makes one")
        if not isinstance(listed, dict) or listed.get("version") != VERSION:
            raise ArchiveFormatError(f"{self.path}: a packed folder of another version; use a newer h3store")
        try:
            files = [self._file(entry) for entry in listed["files"]]
            folders = [_checked(name) for name in listed["folders"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptArchiveError(f"{self.path}: its list of files is damaged: {error}") from error
        named = {file.name: file for file in files}
        if len(named) != len(files):
            raise CorruptArchiveError(f"{self.path}: its list of files names one twice")
        return named, folders

    def _file(self, entry: dict[str, Any]) -> PackedFile:
        name = _checked(entry["path"])
        nbytes, head, renamed = entry["bytes"], entry.get("header_bytes", 0), entry.get("renamed", {})
        carried = CARRIED_PREFIX + name
        if type(nbytes) is not int or type(head) is not int or not isinstance(renamed, dict):
            raise ValueError(f"{name!r:.200} is described by {entry!r:.200}")
        if carried not in self.store or self.store.record(carried).nbytes != (head or nbytes):
            raise ValueError(f"{name!r:.200} has no tensor of its {head or nbytes} bytes")
        return PackedFile(name, nbytes, head, carried, renamed)

    def open(self, name: str) -> io.BufferedReader:
        """Returns a seekable binary stream over a file; its blocks are read as it is.

        Raises:
            FileNotFoundError: no such file.
            CorruptArchiveError: its header does not fit its tensors.
        """
        if name not in self.files:
            raise FileNotFoundError(f"{self.path} holds no file {name!r}")
        return io.BufferedReader(PackedStream(self.store, self._parts(self.files[name])), 1 << 16)

    def tensors(self, name: str) -> dict[str, str]:
        """Returns the tensors of a safetensors file: name there to name in the store.

        Raises:
            CorruptArchiveError: its header does not fit the store's tensors.
        """
        file = self.files[name]
        return {entry.name: file.renamed.get(entry.name, entry.name) for entry in self._entries(file)}

    def _entries(self, file: PackedFile) -> list[Entry]:
        header = io.BufferedReader(PackedStream(self.store, [(0, file.carried)])).read()
        try:
            entries = parse(header, file.nbytes)
        except (ValueError, RecursionError) as error:
            raise CorruptArchiveError(f"{self.path}: header of {file.name}: {error}") from error
        for entry in entries:
            name = file.renamed.get(entry.name, entry.name)
            if name not in self.store or self.store.record(name).nbytes != entry.stop - entry.start:
                raise CorruptArchiveError(f"{self.path}: {file.name} needs a tensor {name[:80]!r} of "
                                          f"{entry.stop - entry.start} bytes, and there is none")
        return entries

    def _parts(self, file: PackedFile) -> list[tuple[int, str]]:
        """What a file is made of: (start in the file, tensor), by start."""
        entries = self._entries(file) if file.header_bytes else []
        filled = [entry for entry in entries if entry.stop > entry.start]
        return [(0, file.carried), *((entry.start, file.renamed.get(entry.name, entry.name)) for entry in filled)]

    def close(self) -> None:
        """Closes the archive; streams already open stay usable."""
        self.store.close()

    def __enter__(self) -> PackedFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


class PackedStream(io.RawIOBase):
    """A file as a run of tensors.

    Args:
        store: that holds them.
        parts: (start in the file, tensor) by start; each ends where the next starts.
    """

    def __init__(self, store: Store, parts: list[tuple[int, str]]) -> None:
        self._store, self._parts = store, parts
        self._starts = [start for start, _ in parts]
        self._end = parts[-1][0] + store.record(parts[-1][1]).nbytes
        self._at = 0
        self._tiered: tuple[str, Range] | None = None  # the tensor in hand: an older one's blocks are dropped

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        if at < 0:
            raise ValueError(f"seek to {at}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._at >= self._end or not len(view):
            return 0
        start, name = self._parts[bisect.bisect_right(self._starts, self._at) - 1]
        if self._tiered is None or self._tiered[0] != name:
            self._tiered = name, self._store.range(name)
        tiered, offset = self._tiered[1], self._at - start
        size = min(len(view), tiered.nbytes - offset, tiered.pager.ddr_bytes // 2)
        tiered.prefetch(offset, size)
        with in_operation([tiered]):
            view[:size] = tiered.buffer()[offset : offset + size]
        self._at += size
        return size


def _checked(name: Any) -> str:
    """A path that stays in its folder, or ValueError."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        raise ValueError(f"{name!r:.200} is no path")
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != name or pure.name in ("", "."):
        raise ValueError(f"{name!r:.200} leads out of its folder")
    return name
