"""Patch records: chunks that say which pages differ from another chunk. Owns their bytes as FORMAT.md states them, and
the checks of untrusted ones; refuses to do input or output. Native ranges write them (native/patch.c)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from h3store.archive.fileio import FileIO
from h3store.archive.layout import HEADER_BYTES
from h3store.codec import CHUNK_DTYPE, CheckKind, Delta, Filter
from h3store.errors import CorruptBlockError

__all__ = ["PAGE_BYTES", "PatchHead", "head_bytes", "patch_bases", "read_head"]

PAGE_BYTES = 4096
_ENTRIES_BYTES = 2 * CHUNK_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class PatchHead:
    """The start of a patch record.

    Attributes:
        base: entry of the whole chunk that it leans on.
        pages: entry of the changed pages' bytes; its offset is where they are stored.
        changed: numbers of the changed pages, rising.
        nbytes: raw bytes of the changed pages.
    """

    base: np.void
    pages: np.void
    changed: list[int]
    nbytes: int

    def apply(self, raw: np.ndarray, pages: np.ndarray) -> None:
        """Puts the changed pages over the base chunk's raw bytes."""
        at = 0
        for page in self.changed:
            part = raw[page * PAGE_BYTES:(page + 1) * PAGE_BYTES]
            part[:] = pages[at:at + len(part)]
            at += len(part)


def head_bytes(raw_bytes: int) -> int:
    """Bytes of the head of a patch record of a chunk."""
    return _ENTRIES_BYTES + -(-raw_bytes // (64 * PAGE_BYTES)) * 8


def read_head(io: FileIO, entry: np.void, raw_bytes: int, covered_bytes: int, where: str) -> PatchHead:
    """Reads and checks the head of a patch record.

    Args:
        entry: of the table, filter PATCH.
        raw_bytes: of the chunk.
        covered_bytes: length of the file that the commit covers.
        where: start of error messages.

    Raises:
        CorruptBlockError: it breaks a rule. ArchiveError: it could not be read.
    """
    start, offset = head_bytes(raw_bytes), int(entry["offset"])
    stored = int(entry["stored_bytes"])
    if not start <= stored <= raw_bytes:
        raise CorruptBlockError(f"{where}: a patch record of {stored} bytes for a chunk of {raw_bytes}")
    data = io.read(offset, start, "patch record")
    base, pages = np.frombuffer(data, CHUNK_DTYPE, 2).copy()
    bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=_ENTRIES_BYTES), bitorder="little")
    n_pages = -(-raw_bytes // PAGE_BYTES)
    changed = np.flatnonzero(bits).tolist()
    sound = (base["filter"] < Filter.PATCH and pages["filter"] < Filter.PATCH and not base["reserved"]
             and (base["stored_bytes"] == 0) == (base["filter"] == Filter.ZERO) and base["stored_bytes"] <= raw_bytes
             and (base["stored_bytes"] == 0 or _inside(base, covered_bytes)) and base["delta"] <= max(Delta)
             and max(base["check_kind"], pages["check_kind"]) <= max(CheckKind)
             and pages["offset"] == 0 and pages["delta"] < Delta.BASE
             and pages["stored_bytes"] == stored - start and changed and changed[-1] < n_pages)
    if not sound:
        raise CorruptBlockError(f"{where}: its patch record breaks a rule of the format; restore the file from a copy")
    pages["offset"] = offset + start
    nbytes = len(changed) * PAGE_BYTES
    if changed[-1] == n_pages - 1:
        nbytes -= n_pages * PAGE_BYTES - raw_bytes
    return PatchHead(base, pages, changed, nbytes)


def _inside(entry: np.void, covered_bytes: int) -> bool:
    return HEADER_BYTES <= int(entry["offset"]) <= covered_bytes - int(entry["stored_bytes"])


def patch_bases(io: FileIO, chunks: np.ndarray) -> np.ndarray:
    """Entries (CHUNK_DTYPE) of the chunks that a table's patch records lean on, unchecked, in the table's order."""
    patches = chunks[chunks["filter"] == Filter.PATCH]
    bases = np.zeros(len(patches), CHUNK_DTYPE)
    for i, offset in enumerate(patches["offset"].tolist()):
        bases[i] = np.frombuffer(io.read(offset, CHUNK_DTYPE.itemsize, "patch record"), CHUNK_DTYPE)[0]
    return bases
