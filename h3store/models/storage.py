"""The store behind a decoder: a path, an open store, or a temporary one. Owns its lifetime, and the words for a failure
to read from it while a kernel runs; nothing of its content."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from h3store import store as stores
from h3store._ffi import lib
from h3store.errors import ArchiveError, UsageError
from h3store.pager import range_holding
from h3store.store import Store

__all__ = ["named_failures", "open_store"]


@contextmanager
def open_store(given: str | Path | Store | None, ddr_bytes: int | str | None) -> Iterator[Store]:
    """Gives an open, writable store, and closes it if it was opened here.

    Args:
        given: a path, created if absent; an open Store, left open; or None for a temporary one, removed on close.
        ddr_bytes: its budget; None is the store's default.

    Raises:
        UsageError: ddr_bytes with an open Store, which has a budget already.
    """
    if isinstance(given, Store):
        if ddr_bytes is not None:
            raise UsageError("ddr_bytes: an open Store has its own budget; give ddr_bytes to h3store.open")
        yield given
        return
    with ExitStack() as stack:
        if given is None:
            # A killed process leaves it: only a store that has nowhere else to be is worth a folder.
            given = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="h3store-"))) / "kv.h3"
        path = Path(given)
        yield stack.enter_context(stores.open(path, mode="r+" if path.exists() else "w", ddr_bytes=ddr_bytes))


@contextmanager
def named_failures() -> Iterator[None]:
    """Says which tensor of which file it was, when a kernel fails on stored bytes: the kernel knows an address only."""
    try:
        yield
    except ArchiveError as error:
        address = int(lib.h3_failed_hold())
        tiered = range_holding(address)
        if tiered is None:
            raise
        block = (address - tiered.address) // tiered.block_bytes
        raise type(error)(f"{tiered.label}, block {block}, met by {error}") from error
