"""import-gguf: models in and out of Hugging Face folders."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from h3store.cli.flags import DONE, command, print_json

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Adds this group's commands."""
    _add_import_gguf(commands)


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
