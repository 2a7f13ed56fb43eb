"""pack, unpack and import-gguf: models in and out of Hugging Face folders."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from h3store.cli.flags import DONE, command, print_json
from h3store.console import JobProgress
from h3store.units import counted, format_bytes

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Adds this group's commands."""
    _add_pack(commands)
    _add_unpack(commands)
    _add_import_gguf(commands)


def _add_pack(commands: Any) -> None:
    parser = command(commands, "pack", _pack, "write a Hugging Face folder as one compressed archive",
                     "h3store pack ./model model.h3")
    parser.add_argument("folder", type=Path, metavar="FOLDER",
                        help="a Hugging Face folder, or one safetensors file; every file of it is kept")
    parser.add_argument("out", type=Path, metavar="OUT", help="archive to write; it appears when it is whole")
    parser.add_argument("--base", type=Path, metavar="ARCHIVE", help="archive of a related checkpoint: store what "
                        "differs; it must stay where it is as long as OUT is used")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _pack(args: argparse.Namespace) -> int:
    from h3store import packed

    with JobProgress("bytes packed", 0) as progress:
        report = packed.pack(args.folder, args.out, base=args.base, force=args.force, progress=progress.amount)
    if args.json:
        print_json(dataclasses.asdict(report))
    else:
        ratio = f", ratio {report.raw_bytes / report.archive_bytes:.2f}" if report.raw_bytes else ""
        print(f"{report.archive}: {counted(report.tensors, 'tensor')} and {counted(report.files, 'file')}, "
              f"{format_bytes(report.raw_bytes)} in {format_bytes(report.archive_bytes)}{ratio}")
    return DONE


def _add_unpack(commands: Any) -> None:
    parser = command(commands, "unpack", _unpack, "write the folder that was packed, bit for bit",
                     "h3store unpack model.h3 ./model")
    parser.add_argument("archive", type=Path, metavar="ARCHIVE", help="an archive that pack made")
    parser.add_argument("out", type=Path, metavar="FOLDER", help="folder to make; it appears when it is whole")
    parser.add_argument("--force", action="store_true", help="put the files into a folder that has files already")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _unpack(args: argparse.Namespace) -> int:
    from h3store import packed

    with JobProgress("bytes unpacked", 0) as progress:
        report = packed.unpack(args.archive, args.out, force=args.force, progress=progress.amount)
    if args.json:
        print_json({"folder": str(args.out)} | report)
    else:
        print(f"{args.out}: {counted(report['files'], 'file')}, {format_bytes(report['bytes'])}")
    return DONE


def _add_import_gguf(commands: Any) -> None:
    parser = command(commands, "import-gguf", _import_gguf, "write a GGUF file as an ordinary Hugging Face folder",
                     "h3store import-gguf model.Q4_1.gguf ./model")
    parser.add_argument("source", type=Path, metavar="SRC", help="a GGUF file of the llama family")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16",
                        help="dtype of the written weights (default: bfloat16)")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _import_gguf(args: argparse.Namespace) -> int:
    from h3store.models.gguf_import import import_gguf

    folder = import_gguf(args.source, args.out, dtype=args.dtype)
    if args.json:
        print_json({"folder": str(folder), "bytes": sum(f.stat().st_size for f in folder.iterdir())})
    else:
        print(folder)
    return DONE
