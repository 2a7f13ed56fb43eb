"""What the commands share: the parser, types of flags, exit codes, JSON on stdout. Knows no command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from h3store.errors import UsageError
from h3store.units import parse_bytes

__all__ = ["DONE", "ERROR_ROWS", "INTERRUPTED", "STORAGE", "TERMINATED", "USAGE", "Parser", "add_model_flags",
           "command", "file", "positive", "print_json", "size"]

DONE, ERROR_ROWS, USAGE, STORAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str,
             example: str) -> argparse.ArgumentParser:
    """Adds a command to the subparsers `commands` and returns its parser; run(args) returns the exit code."""
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".",
                                 epilog=f"example: {example}")
    parser.set_defaults(run=run)
    return parser


def size(text: str) -> int:
    """A flag's type: bytes, such as "64MiB"."""
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """A flag's type: a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def file(text: str) -> Path:
    """A flag's type: the path of a file, not "-"."""
    if text == "-":
        raise argparse.ArgumentTypeError("standard input and output are not served; name a file")
    return Path(text)


def add_model_flags(parser: argparse.ArgumentParser, dtype: str | None) -> None:
    """Adds what commands that run a model share; dtype is the default of --dtype, None for the checkpoint's."""
    parser.add_argument("--store", type=Path, metavar="FILE", help="archive of KV caches, created if absent; "
                        "a document in it is restored, not computed (default: a temporary one)")
    parser.add_argument("--ddr", type=size, metavar="SIZE", help='host memory for KV blocks at most, such as "64MiB"')
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default=dtype,
                        help="what weights are rounded to and KV is kept in (default: "
                        f"{dtype or 'as the checkpoint says'})")


def print_json(value: Any) -> None:
    """Prints what `--json` promises."""
    print(json.dumps(value, indent=2))
