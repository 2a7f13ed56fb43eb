"""What a model folder holds: which files, which of them are weights. Owns the walk and the reading of pieces; refuses
to know archives."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from h3store.errors import CheckpointError, UsageError
from h3store.packed.header import Entry, parse, read_header

__all__ = ["SourceFile", "files_of", "weight_map_of"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SUFFIX = ".safetensors"


@dataclass
class SourceFile:
    """A file to be packed, open while in a with-block.

    Attributes:
        path: where it is.
        name: its path in the folder, with slashes.
        nbytes: its length.
        header: of a safetensors file, as it stands there; empty for others.
        entries: tensors of a safetensors file; none for others.
    """

    path: Path
    name: str
    nbytes: int
    header: bytes = b""
    entries: list[Entry] = field(default_factory=list)
    _fd: int = -1
    _seen: tuple[int, int] = (0, 0)
    _buffer: bytearray = field(default_factory=bytearray)

    def read(self, start: int, stop: int) -> memoryview:
        """Returns bytes of the file, valid until the next read. Asks the kernel for what comes next meanwhile.

        Raises:
            CheckpointError: the file has become shorter.
        """
        if len(self._buffer) < stop - start:
            self._buffer = bytearray(stop - start)
        view = memoryview(self._buffer)[: stop - start]
        done = 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], start + done)
            if not got:
                raise CheckpointError(f"{self.path} was cut while it was packed; pack again when nothing writes it")
            done += got
        os.posix_fadvise(self._fd, stop, stop - start, os.POSIX_FADV_WILLNEED)
        return view

    def check_same(self) -> None:
        """Raises CheckpointError when the file was written meanwhile."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != self._seen:
            raise CheckpointError(f"{self.path} changed while it was packed; pack again when nothing writes it")

    def __enter__(self) -> SourceFile:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        now = os.fstat(self._fd)
        self.nbytes, self._seen = now.st_size, (now.st_size, now.st_mtime_ns)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        os.close(self._fd)
        self._fd, self._buffer = -1, bytearray()

    def find_tensors(self, must: bool) -> None:
        """Reads the header of a safetensors file; one that is none is carried as bytes, unless it must be one.

        Raises:
            CheckpointError: it must, and is not whole.
        """
        self.header, self.entries = b"", []
        if not self.name.endswith(_SUFFIX):
            return
        try:
            self.header = read_header(lambda at, n: bytes(self.read(at, at + n)), self.nbytes)
            self.entries = parse(self.header, self.nbytes)
        except (ValueError, RecursionError) as error:  # of JSON and UTF-8, too
            self.header = b""
            if must:
                raise CheckpointError(f"{self.path} is not a whole safetensors file: {error}; fetch it again"
                                      ) from error


def files_of(source: Path) -> tuple[list[SourceFile], list[str]]:
    """Returns the files of a folder by name, and its folders without files. A file stands for itself.

    Raises:
        UsageError: no such folder, or something in it that is neither file nor folder, or has no UTF-8 name.
    """
    if source.is_file():
        return [SourceFile(source, _utf8(source, source.name), source.stat().st_size)], []
    if not source.is_dir():
        raise UsageError(f"{source}: no such folder; give a Hugging Face model folder, or a safetensors file")
    files, empty = [], []
    for folder, folders, names in os.walk(source, onerror=_raise):
        folders.sort()
        here = Path(folder)
        for name in folders:
            if (here / name).is_symlink():
                raise UsageError(f"{here / name} is a link to a folder; replace it by a copy, or move it away")
        for name in names:
            files.append(_file(here / name, _utf8(here / name, str((here / name).relative_to(source)))))
        if not names and not folders and here != source:
            empty.append(_utf8(here, str(here.relative_to(source))))
    return sorted(files, key=lambda file: file.name), sorted(empty)


def _raise(error: OSError) -> None:
    raise error


def _file(path: Path, name: str) -> SourceFile:
    try:
        found = path.stat()  # of what a link leads to: caches of hubs are made of links
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; a link that leads nowhere? fetch the file again") from error
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is neither file nor folder; move it away")
    return SourceFile(path, name, found.st_size)


def _utf8(path: Path, name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{os.fsencode(path)!r}: its name is not UTF-8; rename it") from None
    return name


def weight_map_of(source: Path, files: list[SourceFile]) -> dict[str, str] | set[str]:
    """Returns the file of each weight as the index says, or the one file that holds all.

    Raises:
        CheckpointError: a broken index, or one that names a file that is not there.
        UsageError: nothing says which file holds the weights.
    """
    names = {file.name for file in files}
    if _INDEX in names and source.is_dir():
        return _read_index(source / _INDEX, names)
    if _SINGLE in names:
        return {_SINGLE}
    single = {name for name in names if name.endswith(_SUFFIX) and "/" not in name}
    if len(single) != 1:
        raise UsageError(f"{source} has neither {_INDEX} nor {_SINGLE}, and {len(single)} other safetensors files; "
                         "give a Hugging Face model folder, or one safetensors file")
    return single


def _read_index(path: Path, names: set[str]) -> dict[str, str]:
    try:
        where = json.loads(path.read_text("utf-8"))["weight_map"]
    except (UnicodeDecodeError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} has no weight_map ({error})") from error
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise CheckpointError(f"{path}: weight_map is no object of file names")
    for shard in sorted(set(where.values()) - names):
        raise CheckpointError(f"{path.parent / shard} is missing, though {path.name} names it; fetch it again")
    return where
