"""Torch modules whose weights are tiered: read ahead and held in the order in which they run."""

from __future__ import annotations

from h3store.modules.attached import Attached, attach

__all__ = ["Attached", "attach"]
