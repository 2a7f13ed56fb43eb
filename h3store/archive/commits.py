"""Which commit of a file is in use. Owns the reading of commit slots and indexes, and the rule that damage is never
passed over for an older commit; refuses to write.

A slot lies within one sector: whatever crashed, it is as it was or whole. It is written when all that it refers to is
on disk, or, by a quick commit, before that, and is sealed afterwards. So a slot that fails a check, or a sealed one
that leads to an index that does, is damage that came later; an unsealed one was cut short, and its commit never
counted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from h3store.archive.chunks import load_chunk
from h3store.archive.fileio import FileIO
from h3store.archive.index import decode_index
from h3store.archive.layout import HEADER_BYTES, Header, Slot, xxh64
from h3store.archive.records import TensorRecord
from h3store.archive.tables import read_table
from h3store.errors import ArchiveFormatError, CorruptArchiveError, CorruptBlockError

__all__ = ["Commit", "Damage", "examine"]


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit whose slot and index verify; uuid is the file's.

    Attributes:
        unfinished: a newer quick commit that a crash cut short; it never counted.
    """

    uuid: bytes
    slot: Slot
    records: dict[str, TensorRecord]
    metadata: dict[str, Any]
    unfinished: Slot | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """Why the newest commit cannot be read.

    Attributes:
        which: the slot to give up when there is an older commit.
        reason: what failed, with file and offset.
        older: the commit that is left, if one is.
    """

    path: str
    which: int
    reason: str
    older: Commit | None

    @property
    def message(self) -> str:
        """The text of the error."""
        if self.older is None:
            return f"{self.reason}; no other commit of the file can be read: restore it from a copy"
        return (f"{self.reason}: the file was cut or damaged since it was written. Restore it from a copy, or go back "
                f"to commit {self.older.slot.sequence} ({len(self.older.records)} tensors), which can be read: "
                f"h3store verify {self.path} --rollback")


def examine(io: FileIO, fd: int) -> Commit | Damage:
    """Looks for the last commit of an open file.

    Raises:
        ArchiveFormatError: no archive, or a version or feature that this build does not know.
        CorruptArchiveError: the header is damaged. ArchiveError: a read failed.
    """
    page = b""
    while True:
        # The size after the page: a writer may finish a commit in between.
        before, page = page, io.read(0, min(os.fstat(fd).st_size, HEADER_BYTES), "header")
        found = _examine(io, page, os.fstat(fd).st_size)
        # A slot may be read while it is written: only what stays as it is is damage.
        if isinstance(found, Commit) or page == before:
            return found


def _examine(io: FileIO, page: bytes, size: int) -> Commit | Damage:
    uuid = Header.from_bytes(page, io.path).uuid
    slots: list[Slot] = []
    damaged: dict[int, str] = {}
    for which in (0, 1):
        try:
            slot = Slot.from_page(page, which, uuid, io.path)
            if slot is not None and not slot.unsealed:
                slot.check_length(io.path, size)
        except CorruptArchiveError as error:
            damaged[which] = str(error)
        else:
            slots += [slot] if slot else []
    slots.sort(key=lambda slot: slot.sequence, reverse=True)
    if damaged or not slots:
        reason = "; ".join(damaged.values()) or f"{io.path}: both commit slots are empty"
        return Damage(io.path, min(damaged, default=0), reason, _first_readable(io, uuid, slots))
    if slots[0].unsealed and len(slots) == 2 and not _is_whole(io, uuid, slots[0], size):
        return _previous(io, uuid, slots, size)
    try:
        slots[0].check_length(io.path, size)
        return _read(io, uuid, slots[0])
    except CorruptArchiveError as error:
        return Damage(io.path, slots[0].which, str(error), _first_readable(io, uuid, slots[1:]))


def _is_whole(io: FileIO, uuid: bytes, slot: Slot, size: int) -> bool:
    """Whether all that an unsealed commit refers to is in the file. Decodes its new chunks."""
    try:
        slot.check_length(io.path, size)
        for record in _read(io, uuid, slot).records.values():
            assert record.table is not None
            if max(place.offset for place in (record.table, *record.changes)) >= slot.start:
                _check_new(io, record, slot)
    except (CorruptArchiveError, CorruptBlockError):
        return False
    return True


def _check_new(io: FileIO, record: TensorRecord, slot: Slot) -> None:
    chunks = read_table(io, record, slot.covered_bytes)
    for block in np.flatnonzero((chunks["offset"] >= slot.start) & (chunks["stored_bytes"] > 0)).tolist():
        load_chunk(io, record, block, chunks[block], slot.covered_bytes, _no_base)


def _no_base(record: TensorRecord, block: int) -> np.ndarray:
    raise CorruptBlockError(f"tensor {record.name[:80]!r}, block {block}: a quick commit leans on no other archive")


def _previous(io: FileIO, uuid: bytes, slots: list[Slot], size: int) -> Commit | Damage:
    newest, slot = slots
    try:
        if slot.sequence != newest.sequence - 1:
            raise CorruptArchiveError(f"{io.path}: commit {newest.sequence} is cut short, and the other slot holds "
                                      f"commit {slot.sequence}, not the one before")
        slot.check_length(io.path, size)
        return replace(_read(io, uuid, slot), unfinished=newest)
    except CorruptArchiveError as error:
        return Damage(io.path, slot.which, str(error), None)


def _first_readable(io: FileIO, uuid: bytes, slots: list[Slot]) -> Commit | None:
    for slot in slots:
        try:
            return _read(io, uuid, slot)
        except (CorruptArchiveError, ArchiveFormatError):
            continue
    return None


def _read(io: FileIO, uuid: bytes, slot: Slot) -> Commit:
    data = io.read(slot.index_offset, slot.index_bytes, "index")
    where = f"{io.path}: index of commit {slot.sequence} at byte {slot.index_offset}"
    if xxh64(data) != slot.index_check:
        raise CorruptArchiveError(f"{where} fails its check")
    return Commit(uuid, slot, *decode_index(data, slot.covered_bytes, where))
