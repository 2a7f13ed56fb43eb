"""Which committed tensor a range holds: what a reference to it names instead of its bytes."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from h3store.archive import Reader, Writer
from h3store.archive.layout import xxh64
from h3store.errors import H3Error
from h3store.pager import Range

__all__ = ["Origin", "origin_of", "unchanged_origin"]

Origin = tuple[str, str, tuple[bytes, int]]  # absolute path, tensor, what origin_of says of it


def origin_of(archive: Reader | Writer, name: str) -> tuple[bytes, int]:
    """Returns what tells one committed version of a tensor from every other: file uuid, check of its table."""
    record = archive.records[name]
    if record.table is None or record.pending is not None:
        return archive.uuid, 0
    return archive.uuid, xxh64(archive.chunks(record).view(np.uint8)) if record.changes else record.table.check


def unchanged_origin(tiered: Range) -> Origin | None:
    """Returns which committed tensor a range holds, or None if it was changed since, or never was one.

    May block on the disk: changed blocks of a writable range are saved, as eviction would.
    """
    if tiered.origin is None or not tiered.writable:
        return tiered.origin
    with suppress(H3Error):  # what can't be saved has changed
        if xxh64(tiered.flush().tobytes()) == tiered.origin[2][1]:
            return tiered.origin
    return None
