"""A model folder into one archive. Owns what is stored under which name; memory does not grow with the model.

Weights keep their names. Everything else that the folder's bytes need is stored as uint8 tensors named "@files/PATH":
whole files, and the headers of safetensors files; FORMAT.md has the list that ties them together.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from h3store.archive import BaseRef, Writer, refuse_circle
from h3store.archive.records import CARRIED_PREFIX, PACKED_KEY, check_name
from h3store.codec import DTYPES, MAX_BASE_DEPTH, Delta, choose_spec, default_spec
from h3store.errors import CheckpointError, UsageError
from h3store.packed.folder import SourceFile, files_of, weight_map_of
from h3store.units import MiB

if TYPE_CHECKING:
    from h3store.pager import Range
    from h3store.store import Store

__all__ = ["PackReport", "pack"]

VERSION = 1
CHUNK_BYTES = 256 * 1024  # weights are read whole and in order
_SMALL_CHUNK_BYTES = 64 * 1024
_SAMPLES = 4
_SAMPLE_BYTES = 64 * 1024
_BASE_BYTES = 64 * MiB  # budget for the base's blocks while it is compared


@dataclass(frozen=True)
class PackReport:
    """What was packed.

    Attributes:
        archive: the file.
        base: what it leans on; None if it stands alone.
        files, tensors: how many.
        raw_bytes, archive_bytes: before and after.
        leaning_tensors: stored as differences to the base.
    """

    archive: str
    base: str | None
    files: int
    tensors: int
    raw_bytes: int
    archive_bytes: int
    leaning_tensors: int


@dataclass(frozen=True)
class _Part:
    """A run of a file that becomes a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def pack(source: str | os.PathLike[str], out: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None,
         force: bool = False, progress: Callable[[int, int], None] | None = None) -> PackReport:
    """Writes a Hugging Face folder as one archive, from which unpack makes the same bytes again.

    Args:
        source: the folder, or one safetensors file.
        out: of the archive; it appears there when it is whole and on the disk.
        base: an archive of a related checkpoint: what is stored smaller as a difference to it is, and reading then
            needs that archive at the same place relative to this one.
        force: replace an archive that is there.
        progress: called with (bytes done, bytes in all).

    Raises:
        UsageError, CheckpointError: what cannot be packed, found before or while it is read.
        ArchiveError, StorageFullError: whatever was at out is still there.
    """
    folder, target = Path(source), Path(out)
    _check_target(folder, target, None if base is None else Path(base), force)
    files, empty = files_of(folder)
    weights = weight_map_of(folder, files)
    with ExitStack() as resources:
        related = _open_base(base, resources)
        writer = resources.enter_context(Writer(target, "w", visible=False))
        packer = _Packer(writer, related, target, sum(file.nbytes for file in files), progress)
        listed = [packer.add(file, weights) for file in files]
        writer.metadata[PACKED_KEY] = {"version": VERSION, "files": listed, "folders": empty}
        packer.check_found(folder, weights)
        writer.commit()
        return PackReport(str(target), None if base is None else os.fspath(base), len(files), packer.tensors,
                          packer.done, os.fstat(writer.fd).st_size, packer.leaning)


def _check_target(folder: Path, target: Path, base: Path | None, force: bool) -> None:
    if target.is_dir():
        raise UsageError(f"{target} is a folder; give the archive's name")
    if target.exists() and not force:
        raise UsageError(f"{target} is there already; --force replaces it")
    if folder.is_dir() and target.resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"{target} lies in the folder that is packed; choose a place outside of it")
    if folder.exists() and target.exists() and folder.samefile(target):
        raise UsageError(f"{target} would replace what it is made from; choose another name")
    if base is not None:
        refuse_circle(base, target)


def _open_base(base: str | os.PathLike[str] | None, resources: ExitStack) -> Store | None:
    if base is None:
        return None
    from h3store.store import Store  # brings torch, which nothing else here needs

    return resources.enter_context(Store(base, "r", _BASE_BYTES))


class _Packer:
    """Adds files to an archive.

    Attributes:
        done: bytes so far.
        tensors: weights so far.
        leaning: tensors stored as differences so far.
    """

    def __init__(self, writer: Writer, base: Store | None, target: Path, total: int,
                 progress: Callable[[int, int], None] | None) -> None:
        self._writer, self._base, self._total = writer, base, total
        self._progress = progress or (lambda done, total: None)
        self._folder = target.parent
        self._found: set[tuple[str, str]] = set()
        self.done = self.tensors = self.leaning = 0

    def add(self, file: SourceFile, weights: dict[str, str] | set[str]) -> dict[str, Any]:
        """Stores one file and returns its entry of the list."""
        shards = weights if isinstance(weights, set) else set(weights.values())
        with file:
            file.find_tensors(file.name in shards)
            listed: dict[str, Any] = {"path": file.name, "bytes": file.nbytes}
            head = len(file.header) if file.header else file.nbytes
            self._store(file, _Part(self._free_name(CARRIED_PREFIX + file.name), "uint8", (head,), 0, head))
            if file.header:
                listed["header_bytes"] = head
                renamed = self._add_tensors(file, weights)
                if renamed:
                    listed["renamed"] = renamed
            file.check_same()
        return listed

    def _add_tensors(self, file: SourceFile, weights: dict[str, str] | set[str]) -> dict[str, str]:
        renamed = {}
        for i, entry in enumerate(file.entries):
            ours = weights.get(entry.name) == file.name if isinstance(weights, dict) else file.name in weights
            name = entry.name
            if not ours or not self._is_free(name):
                name = renamed[entry.name] = self._free_name(f"{CARRIED_PREFIX}{file.name}#{i}")
            self._store(file, _Part(name, entry.dtype, entry.shape, entry.start, entry.stop))
            self._found.add((entry.name, file.name))
            self.tensors += 1
        return renamed

    def check_found(self, folder: Path, weights: dict[str, str] | set[str]) -> None:
        """Raises CheckpointError when the index promises a tensor that its file does not hold."""
        for name, shard in weights.items() if isinstance(weights, dict) else ():
            if (name, shard) not in self._found:
                raise CheckpointError(f"{folder / shard} has no tensor {name!r}, though the index says so; fetch it "
                                      "again")

    def _is_free(self, name: str) -> bool:
        try:
            check_name(name)
        except ValueError:
            return False
        return name not in self._writer.records and not name.startswith(CARRIED_PREFIX)

    def _free_name(self, name: str) -> str:
        while name in self._writer.records:
            name += "#"
        return name

    def _store(self, file: SourceFile, part: _Part) -> None:
        nbytes = part.stop - part.start
        if nbytes == 0:
            self._writer.add(part.name, b"", part.dtype, part.shape, default_spec(part.dtype))
            return
        base, tiered = self._related(part)
        chunk_bytes = CHUNK_BYTES if nbytes >= CHUNK_BYTES else _SMALL_CHUNK_BYTES
        if tiered is not None:
            chunk_bytes = tiered.block_bytes
        with _reading(tiered):
            spec = self._tried(file, part, chunk_bytes, tiered)
            leans = tiered is not None and spec.delta == Delta.BASE
            self.leaning += leans
            self._writer.add(part.name, lambda start, stop: self._read(file, part, start, stop), part.dtype, part.shape,
                             spec, chunk_bytes, base=base if leans else None,
                             base_data=tiered.address if tiered is not None and leans else None)

    def _read(self, file: SourceFile, part: _Part, start: int, stop: int) -> memoryview:
        view = file.read(part.start + start, part.start + stop)
        self.done += len(view)
        self._progress(self.done, self._total)
        return view

    def _tried(self, file: SourceFile, part: _Part, chunk_bytes: int, base: Range | None) -> Any:
        """The spec that stores a sample best."""
        nbytes = part.stop - part.start
        picked = sorted({int(i) * chunk_bytes for i in np.linspace(0, (nbytes - 1) // chunk_bytes, _SAMPLES)})
        spans = [(at, min(at + min(_SAMPLE_BYTES, chunk_bytes), nbytes)) for at in picked]
        samples = [bytes(file.read(part.start + at, part.start + end)) for at, end in spans]
        bases = None if base is None else [bytes(base.buffer()[at:end]) for at, end in spans]
        row_bytes = int(np.prod(part.shape[1:], dtype=np.int64)) * DTYPES[part.dtype].item_bytes
        return choose_spec(samples, part.dtype, row_bytes if len(part.shape) > 1 else 0, bases)

    def _related(self, part: _Part) -> tuple[BaseRef | None, Range | None]:
        """The same tensor of the base, if it has one."""
        store = self._base
        if store is None or part.name not in store:
            return None, None
        record = store.record(part.name)
        if (record.shape, record.dtype) != (part.shape, part.dtype):
            return None, None
        tiered = store.range(part.name)
        if tiered.base_depth >= MAX_BASE_DEPTH - 1:  # one more could not be read
            return None, None
        relative = os.path.relpath(store.path.resolve(), self._folder.resolve())
        return BaseRef(relative, store.archive.uuid, store.archive.sequence, part.name), tiered


def _reading(tiered: Range | None) -> Any:
    """Around code that touches a base: a block that does not read is an error, not the end of the process."""
    if tiered is None:
        return nullcontext()
    from h3store.tensor import in_operation

    return in_operation([tiered])
