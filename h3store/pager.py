"""Ranges of address space under one byte budget. Owns the Python handles of the native pager: creation, prefetch,
holds, saving, counters. Refuses to know about files' formats, tensors or policies; page states and eviction live
in C."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from h3store._ffi import CHUNK_DTYPE, check, ffi, lib
from h3store.errors import BudgetError, StoreClosedError, UsageError
from h3store.units import MiB, exact_bytes, format_bytes

__all__ = [
    "DELIVERIES",
    "PAGE",
    "Pager",
    "Range",
    "RangeConfig",
    "check_blocks_fit",
    "live_ranges",
    "native_probe",
    "range_holding",
]

PAGE = 4096
DELIVERIES = {
    "auto": lib.H3_DELIVERY_AUTO,
    "signal": lib.H3_DELIVERY_SIGNAL,
    "dispatch": lib.H3_DELIVERY_DISPATCH,
    "signal-copy": lib.H3_DELIVERY_SIGNAL_COPY,
}
_DELIVERY_NAMES = {value: name for name, value in DELIVERIES.items()}
# Native calls that may be long are cut into pieces, so that Ctrl-C is seen within 100 ms or so.
_SLICE_BYTES = 8 * MiB
_PORTION_BYTES = 64 * MiB  # of blocks, which are read at queue depth
_FLUSH_BYTES = 64 * MiB
_CHANGES = 1024  # numbers of changed blocks that one native call returns

_ranges: weakref.WeakValueDictionary[int, Range] = weakref.WeakValueDictionary()


def _in_forked_child() -> None:
    """A child reads what its parent saw; the file's tail is the parent's to write."""
    for tiered in list(_ranges.values()):
        if tiered.writable:
            tiered.freeze("belongs to the parent process: a forked child only reads it; write there, or clone() it")
            tiered.origin = None  # it may hold what the parent has not committed


os.register_at_fork(after_in_child=_in_forked_child)


def live_ranges() -> list[Range]:
    """Returns every range there is."""
    return list(_ranges.values())


def range_holding(address: int) -> Range | None:
    """Returns the live range that this address lies in, or None."""
    start = lib.h3_range_start(address)
    return _ranges.get(start) if start else None


def native_probe() -> tuple[int, int]:
    """Returns the set of h3_probe_bit that this machine has, and the errno userfaultfd gave (0: it works)."""
    errno_out = ffi.new("int *")
    return int(lib.h3_probe(errno_out)), int(errno_out[0])


def _numbers(values: Any, count: int) -> np.ndarray:
    return np.frombuffer(ffi.buffer(values, 8 * count), np.int64).copy()


def check_blocks_fit(block_bytes: int, ddr_bytes: int, what: str) -> None:
    """Raises BudgetError when a budget is too small for blocks: one instruction may straddle two, so both must fit."""
    if 2 * block_bytes > ddr_bytes:
        raise BudgetError(
            f"{what}: two blocks of {format_bytes(block_bytes)} do not fit the ddr budget of "
            f"{format_bytes(ddr_bytes)}; give ddr_bytes of at least {exact_bytes(4 * block_bytes)}"
        )


class Pager:
    """One budget of resident bytes, shared by any number of ranges.

    Args:
        ddr_bytes: hard bound on the bytes of resident blocks, a page at least.
        delivery: "auto" (the default; also when the environment variable H3STORE_DELIVERY is unset), "signal",
            "dispatch", or "signal-copy" (as signal on a kernel that cannot move pages).

    Raises:
        BudgetError: ddr_bytes is below one page.
        Unavailable: the asked delivery is refused by this kernel.
    """

    def __init__(self, ddr_bytes: int, delivery: str | None = None) -> None:
        name = delivery or os.environ.get("H3STORE_DELIVERY", "auto")
        if name not in DELIVERIES:
            raise UsageError(f"fault delivery {name!r} is not known; use one of {', '.join(DELIVERIES)}")
        if ddr_bytes < PAGE:
            raise BudgetError(f"ddr_bytes={exact_bytes(ddr_bytes)} is below one page of 4KiB; give at least 1MiB")
        out = ffi.new("h3_pager **")
        config = ffi.new("h3_pager_config *", {"budget_bytes": ddr_bytes, "delivery": DELIVERIES[name]})
        check(lib.h3_pager_create(config, out), f"pager of {format_bytes(ddr_bytes)}, fault delivery {name!r}")
        self._native = ffi.gc(out[0], lib.h3_pager_destroy)
        self.ddr_bytes = ddr_bytes
        self.dispatch = self.stats()["delivery"] == "dispatch"

    @property
    def native(self) -> Any:
        if self._native is None:
            raise StoreClosedError("the pager was closed")
        return self._native

    def stats(self) -> dict[str, int | str]:
        """Returns counters since the start: resident bytes, faults, fills, evictions, write-backs, ..."""
        out = ffi.new("h3_pager_stats *")
        lib.h3_pager_get_stats(self.native, out)
        values: dict[str, int | str] = {
            name: int(getattr(out, name)) for name, _ in ffi.typeof("h3_pager_stats").fields
        }
        values["ddr_bytes"] = values.pop("budget_bytes")
        values["delivery"] = _DELIVERY_NAMES[int(out.delivery)]
        return values


@dataclass(frozen=True)
class RangeConfig:
    """What a range is made of; see h3_range_config in native/h3store.h."""

    nbytes: int
    block_bytes: int
    spec: dict[str, int]  # fields of h3_spec
    writable: bool = False
    cyclic: bool = False
    capacity_bytes: int = 0  # 0: nbytes
    file: Any = None  # h3_file *, kept alive by `owner`
    owner: Any = None
    chunks: np.ndarray | None = None  # (n_blocks,) of the 24-byte chunk entry
    base: Range | None = None
    label: str = ""


class Range:
    """A run of ordinary address space whose blocks come and go. Freed with its last reference."""

    def __init__(self, pager: Pager, config: RangeConfig) -> None:
        check_blocks_fit(config.block_bytes, pager.ddr_bytes, config.label or "range")
        fields: dict[str, Any] = {
            "bytes": config.nbytes,
            "capacity_bytes": max(config.capacity_bytes, config.nbytes),
            "block_bytes": config.block_bytes,
            "writable": config.writable,
            "cyclic": config.cyclic,
            "spec": config.spec,
            "file": config.file if config.file is not None else ffi.NULL,
            "base": config.base.native if config.base is not None else ffi.NULL,
        }
        label = ffi.new("char[]", config.label.encode("utf-8", "replace")[:255])
        native_config = ffi.new("h3_range_config *", fields | {"label": label})
        if config.chunks is not None:
            table = np.ascontiguousarray(config.chunks)
            native_config.chunks = ffi.from_buffer("h3_chunk[]", table.view(np.uint8))
        out = ffi.new("h3_range **")
        check(lib.h3_range_create(pager.native, native_config, out), config.label or "range")
        # The destructor holds what the native range borrows: pager, file, base.
        keep = self._kept = [pager, config.owner, config.file, config.base]
        self._native = ffi.gc(out[0], lambda native, _keep=keep: lib.h3_range_destroy(native))
        self.pager = pager
        self.dispatch = pager.dispatch
        self.config = config
        self.label = config.label
        self.writable = config.writable
        self.frozen = ""  # why it is not writable any longer, and the way out
        self.origin: tuple[str, str, tuple[bytes, int]] | None = None  # path, tensor, version: set by a store
        self._reported: np.ndarray | None = None  # the table that the last flush of all blocks has brought up to date
        self.block_bytes = config.block_bytes
        self.nbytes = config.nbytes
        self.capacity_bytes = int(native_config.capacity_bytes)
        self.address = int(ffi.cast("uintptr_t", lib.h3_range_address(self._native)))
        _ranges[self.address] = self

    @property
    def native(self) -> Any:
        return self._native

    @property
    def n_blocks(self) -> int:
        return -(-self.nbytes // self.block_bytes)

    @property
    def base_depth(self) -> int:
        """How many ranges it leans on, one on another."""
        return 0 if self.config.base is None else 1 + self.config.base.base_depth

    @property
    def resident_bytes(self) -> int:
        return int(lib.h3_range_resident_bytes(self._native))

    def freeze(self, why: str) -> None:
        """Refuses writes from now on; why follows "t, which " in the error, and ends with the way out."""
        if self.writable:
            self.frozen = why
        self.writable = False

    def buffer(self) -> Any:
        """Returns a buffer over the data that keeps this range alive. Touching it faults blocks in."""
        pointer = ffi.gc(ffi.cast("char *", self.address), lambda _pointer, _keep=self: None)
        return ffi.buffer(pointer, self.nbytes)

    def _sliced(self, offset: int, nbytes: int, step: Callable[[int, int], int]) -> int:
        done = 0
        while done < nbytes:
            part = min(max(_SLICE_BYTES, self.block_bytes), nbytes - done)
            got = step(offset + done, part)
            done += got
            if got < part:
                break
        return done

    def prefetch(self, offset: int = 0, nbytes: int | None = None) -> int:
        """Makes bytes resident, as far as the budget allows. Blocks on the disk.

        Returns: bytes made (or found) resident.

        Raises:
            CorruptBlockError, ArchiveError: a block could not be read.
        """
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        out = ffi.new("uint64_t *")
        room = self.pager.ddr_bytes - int(self.pager.stats()["pinned_bytes"])

        def step(at: int, part: int) -> int:
            status = lib.h3_range_prefetch(self._native, at, part, out)
            if status < 0:  # it stops at the block that failed
                self._check_block(status, at + int(out[0]))
            return int(out[0])

        return self._sliced(offset, min(nbytes, room), step)

    def _portions(self, offsets: np.ndarray, row_bytes: int) -> Iterator[slice]:
        """Slices of ascending rows whose blocks hold about _PORTION_BYTES."""
        blocks = offsets // self.block_bytes
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))  # rows that are the first of a block
        per_block = max(1, -(-row_bytes // self.block_bytes))
        cuts = [*starts[:: max(1, _PORTION_BYTES // (self.block_bytes * per_block))].tolist(), len(offsets)]
        return (slice(start, end) for start, end in pairwise(cuts))

    def read_rows(self, offsets: np.ndarray, positions: np.ndarray, row_bytes: int, out: int) -> None:
        """Copies rows to ordinary memory, each block read once, whatever the budget. Blocks on the disk; Ctrl-C works.

        Args:
            offsets: int64, ascending, byte offsets of rows in this range.
            positions: int64, of each row in out, counted in rows.
            out: address of the memory for them.

        Raises:
            CorruptBlockError, ArchiveError: a block could not be read; out is undefined.
        """
        failed = ffi.new("uint64_t *")
        for part in self._portions(offsets, row_bytes):
            at, to = (ffi.from_buffer("int64_t[]", values[part]) for values in (offsets, positions))
            n, target = part.stop - part.start, ffi.cast("void *", out)
            status = lib.h3_rows_gather(self._native, at, to, n, row_bytes, target, failed)
            if status < 0:
                self._check_block(status, int(failed[0]) * self.block_bytes)

    def fetch_rows(self, offsets: np.ndarray, row_bytes: int) -> None:
        """Makes the blocks of rows resident, as many as half the budget holds. A hint: failures show when touched.

        Args:
            offsets: int64, ascending, byte offsets of rows in this range.
        """
        reach = np.arange(0, row_bytes + self.block_bytes - 1, self.block_bytes)
        ends = np.minimum(reach, row_bytes - 1)
        blocks = np.unique((offsets[:, None] + ends) // self.block_bytes)
        self.fetch(blocks[: self.pager.ddr_bytes // 2 // self.block_bytes])

    def fetch(self, blocks: np.ndarray) -> None:
        """Makes blocks resident, read at queue depth. A hint: failures show when touched.

        Args:
            blocks: ascending block numbers, as many as fit the budget. Blocks on the disk; Ctrl-C works.
        """
        failed = ffi.new("uint64_t *")
        blocks = np.ascontiguousarray(blocks, np.uint64)
        step = max(1, _PORTION_BYTES // self.block_bytes)
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            lib.h3_range_fetch(self._native, ffi.from_buffer("uint64_t[]", part), len(part), failed)

    def pin(self, offset: int, nbytes: int) -> None:
        """Holds bytes resident until as many unpin calls. Blocks on the disk.

        Raises:
            BudgetError: they do not fit beside what is pinned already; then nothing stays pinned.
        """
        status = lib.h3_range_pin(self._native, offset, nbytes)
        if status == lib.H3_E_BUDGET:
            pinned = int(self.pager.stats()["pinned_bytes"])
            raise BudgetError(
                f"{self.label}: pinning {format_bytes(nbytes)} does not fit the ddr budget of "
                f"{format_bytes(self.pager.ddr_bytes)} with {format_bytes(pinned)} pinned; pin less, or raise ddr_bytes"
            )
        check(status, f"{self.label}: pin of bytes {offset} to {offset + nbytes}")

    def unpin(self, offset: int, nbytes: int) -> None:
        lib.h3_range_unpin(self._native, offset, nbytes)

    def flush(self) -> np.ndarray:
        """Saves every changed block and returns the chunk table, (n_blocks,). Blocks on the disk."""
        table = np.zeros(self.n_blocks, CHUNK_DTYPE)
        self.flush_into(table, [])
        return table

    def flush_into(self, table: np.ndarray, changed: list[np.ndarray]) -> None:
        """Saves every changed block and brings a chunk table, (n_blocks,), up to date. Blocks on the disk.

        Args:
            changed: gets the numbers of the blocks whose entries are new, in pieces; also of those before an error.
        """
        if table is self._reported:
            self._flush_changes(table, changed)
            return
        self._reported = None
        per_call = max(1, _FLUSH_BYTES // self.block_bytes)
        numbers, count = ffi.new("uint64_t[]", min(per_call, self.n_blocks)), ffi.new("uint64_t *")
        entries = ffi.from_buffer("h3_chunk[]", table.view(np.uint8), require_writable=True)
        for first in range(0, self.n_blocks, per_call):
            part = min(per_call, self.n_blocks - first)
            status = lib.h3_range_flush(self._native, first, part, entries + first, numbers, count)
            check(status, f"{self.label}: write back")
            if count[0]:
                changed.append(_numbers(numbers, count[0]))
        self._reported = table

    def _flush_changes(self, table: np.ndarray, changed: list[np.ndarray]) -> None:
        """flush_into for the table that was given last: looks at nothing that has not changed since."""
        numbers, count, at = ffi.new("uint64_t[]", _CHANGES), ffi.new("uint64_t *"), ffi.new("uint64_t *")
        entries = ffi.from_buffer("h3_chunk[]", table.view(np.uint8), require_writable=True)
        while at[0] < len(table):
            status = lib.h3_range_flush_changes(self._native, at, entries, len(table), numbers, _CHANGES, count)
            if count[0]:
                changed.append(_numbers(numbers, count[0]))
            check(status, f"{self.label}: write back")

    def recheck(self) -> None:
        """Makes the next flush compare all that is resident, also what no processor has written to since the last."""
        lib.h3_range_recheck(self._native)

    def export(self, first: int, count: int, spec: dict[str, int], file: Any) -> np.ndarray:
        """Encodes blocks into another file and returns their chunk entries, (count,). Blocks on the disk."""
        table = np.zeros(count, CHUNK_DTYPE)
        native_spec = ffi.new("h3_spec *", spec)
        per_call = max(1, _SLICE_BYTES // self.block_bytes)
        for start in range(0, count, per_call):
            part = table[start : start + per_call]
            target = ffi.from_buffer("h3_chunk[]", part.view(np.uint8), require_writable=True)
            status = lib.h3_range_export(self._native, first + start, len(part), native_spec, file, target)
            check(status, f"{self.label}: export of block {first + start}")
        return table

    def drop(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Evicts blocks that are not pinned, saving changed ones first. Blocks on the disk."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes

        def step(at: int, part: int) -> int:
            check(lib.h3_range_drop(self._native, at, part), f"{self.label}: eviction")
            return part

        self._sliced(offset, nbytes, step)

    def resize(self, nbytes: int) -> None:
        """Changes the data length within capacity_bytes; new bytes are zero, dropped bytes are gone."""
        check(lib.h3_range_resize(self._native, nbytes), f"{self.label}: resize to {format_bytes(nbytes)}")
        self.nbytes = nbytes

    def set_spec(self, spec: dict[str, int]) -> None:
        """Changes how blocks are encoded from now on."""
        check(lib.h3_range_set_spec(self._native, ffi.new("h3_spec *", spec)), f"{self.label}: new spec")

    def detach(self, file: Any, owner: Any) -> None:
        """Reads from another handle of the same bytes from now on and no longer writes back."""
        self.freeze('is read-only since its store was closed; open the store with mode="r+" and take it anew')
        self._kept.append((file, owner))
        check(lib.h3_range_detach(self._native, file), f"{self.label}: detach")

    def keep(self, owner: Any) -> None:
        """Keeps an object alive as long as this range."""
        self._kept.append(owner)

    def raise_error(self, entered: int) -> None:
        """Raises the error of a failed fill that an operation, entered then (h3_op_enter), may have seen; if any."""
        block = ffi.new("uint64_t *")
        status = lib.h3_range_take_error(self._native, entered, block)
        if status < 0:
            self._check_block(status, int(block[0]) * self.block_bytes)

    def _check_block(self, status: int, offset: int) -> None:
        block = offset // self.block_bytes
        check(status, f"{self.label}, block {block} (bytes from {block * self.block_bytes})")
