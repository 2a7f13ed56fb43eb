"""inspect, verify and compact: what lies in an archive."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from h3store.cli.flags import DONE, command, print_json
from h3store.console import JobProgress, stdout_console
from h3store.errors import CorruptArchiveError
from h3store.units import counted, exact_bytes, format_bytes

if TYPE_CHECKING:
    from h3store.archive import ArchiveInfo, BadChunk

__all__ = ["add_to"]

# Ratios above are of nearly empty tensors: their digits say nothing.
_MAX_RATIO = 1000


def add_to(commands: Any) -> None:
    """Adds this group's commands."""
    _add_inspect(commands)
    _add_verify(commands)
    _add_compact(commands)


def _add_inspect(commands: Any) -> None:
    parser = command(commands, "inspect", _inspect, "show what an archive holds", "h3store inspect weights.h3")
    parser.add_argument("file", type=Path, metavar="FILE", help="an archive")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _inspect(args: argparse.Namespace) -> int:
    from h3store import archive

    info = archive.describe(args.file)
    if args.json:
        print_json(_archive_json(info))
    else:
        _print_archive(info)
    return DONE


def _archive_json(info: ArchiveInfo) -> dict[str, Any]:
    shown = dataclasses.asdict(info) | {"raw_bytes": info.raw_bytes, "stored_bytes": info.stored_bytes}
    for row, tensor in zip(shown["tensors"], info.tensors, strict=True):
        row["ratio"] = tensor.ratio if tensor.stored_bytes else None  # JSON has no infinity
    return shown


def _print_archive(info: ArchiveInfo) -> None:
    table = Table("tensor", "dtype", "shape", "raw", "stored", "ratio", "chunk", "chunks by filter", box=None,
                  pad_edge=False)
    for column in table.columns[3:7]:
        column.justify = "right"
    for t in info.tensors:
        filters = ", ".join(f"{name} {count}" for name, count in t.filters.items())
        filters += " (compression none)" if t.compression == "none" else ""
        chunk = exact_bytes(t.chunk_bytes) + (f" {t.access}" if t.access in ("random", "stream") else "")
        table.add_row(escape(t.name), t.dtype, " x ".join(map(str, t.shape)) or "scalar", format_bytes(t.raw_bytes),
                      format_bytes(t.stored_bytes), _ratio(t.raw_bytes, t.stored_bytes), chunk, filters)
    table.add_row("total", "", counted(len(info.tensors), "tensor"), format_bytes(info.raw_bytes),
                  format_bytes(info.stored_bytes), _ratio(info.raw_bytes, info.stored_bytes), "", "")
    stdout_console().print(table)
    print(f"file {format_bytes(info.file_bytes)}, of which {format_bytes(info.dead_bytes)} no longer in use; "
          f"commit {info.sequence}")


def _add_verify(commands: Any) -> None:
    parser = command(commands, "verify", _verify, "read every block of an archive and check it",
                     "h3store verify weights.h3")
    parser.add_argument("file", type=Path, metavar="FILE", help="an archive")
    parser.add_argument("--rollback", action="store_true",
                        help="first give a damaged last commit up for the one before it; there is no way back")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _verify(args: argparse.Namespace) -> int:
    from h3store import archive

    if args.rollback:
        print(f"{args.file}: now at commit {archive.rollback(args.file)}", file=sys.stderr)
    with JobProgress("chunk bytes", 0) as progress:
        report = archive.verify(args.file, progress=progress.amount)
    if args.json:
        print_json(dataclasses.asdict(report) | {"ok": report.ok})
    else:
        for bad in report.bad:
            print(f"damaged: {_place(bad)}: {bad.reason}")
        print(f"{args.file}: {counted(report.tensors, 'tensor')}, {counted(report.chunks, 'block')}, "
              f"{format_bytes(report.raw_bytes)}: " + ("sound" if report.ok else f"{len(report.bad)} damaged"))
    if not report.ok:
        what = "damaged block" if all(bad.block >= 0 for bad in report.bad) else "damaged part"
        raise CorruptArchiveError(f"{args.file}: {counted(len(report.bad), what)}, the first is "
                                  f"{_place(report.bad[0])}; take the file from a copy")
    return DONE


def _add_compact(commands: Any) -> None:
    parser = command(commands, "compact", _compact, "rewrite an archive without what is no longer in use",
                     "h3store compact weights.h3")
    parser.add_argument("file", type=Path, metavar="FILE", help="an archive that no other process is writing")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _compact(args: argparse.Namespace) -> int:
    from h3store.store import open as open_store

    with open_store(args.file, mode="r+") as store:
        freed = store.compact()
    kept = args.file.stat().st_size
    if args.json:
        print_json({"file": str(args.file), "file_bytes": kept, "freed_bytes": freed})
    else:
        print(f"{args.file}: {format_bytes(kept)}, {format_bytes(freed)} less")
    return DONE


def _place(bad: BadChunk) -> str:
    part = "its chunk table" if bad.block < 0 else f"block {bad.block}"
    return f"tensor {bad.tensor}, {part}, offset {bad.offset}"


def _ratio(raw_bytes: int, stored_bytes: int) -> str:
    if raw_bytes == 0:
        return "-"
    return f">{_MAX_RATIO}" if raw_bytes > _MAX_RATIO * stored_bytes else f"{raw_bytes / stored_bytes:.2f}"
