"""Named tensors in archives: opened, saved, loaded, held, sent to other processes."""

from __future__ import annotations

from h3store.store.encode import add_tensor
from h3store.store.files import load, open, save
from h3store.store.handoff import register
from h3store.store.hold import pin, prefetch
from h3store.store.named import Store

__all__ = ["Store", "add_tensor", "load", "open", "pin", "prefetch", "save"]

register()
