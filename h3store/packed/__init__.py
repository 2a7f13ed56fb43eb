"""Model folders in archives: packed, read in place, and unpacked bit for bit."""

from __future__ import annotations

from h3store.packed.contents import PackedFolder
from h3store.packed.pack import PackReport, pack
from h3store.packed.unpack import unpack

__all__ = ["PackReport", "PackedFolder", "pack", "unpack"]
