"""The command line. Owns parsing, printing and exit codes; the work is done below.

Exit codes: 0 done; 1 finished with error rows; 2 usage or bad input before work began; 3 storage or integrity error;
130 or 143 interrupted. Data goes to stdout, progress and errors to stderr. H3STORE_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.markup import escape
from rich.table import Table

from h3store.console import JobProgress, stdout_console
from h3store.errors import (
    ArchiveError,
    ArchiveFormatError,
    ArchiveNotFoundError,
    BudgetError,
    CorruptArchiveError,
    H3Error,
    UsageError,
)
from h3store.units import counted, format_bytes, parse_bytes
from h3store.version import __version__

if TYPE_CHECKING:
    from h3store.archive import ArchiveInfo, BadChunk

# A path that leads nowhere useful: the caller's to mend, unlike a disk that fails.
_BAD_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)
# Ratios above are of nearly empty tensors: their digits say nothing.
_MAX_RATIO = 1000

DONE, ERROR_ROWS, USAGE, STORAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143


class _Terminated(BaseException):
    """SIGTERM arrived; not an Exception, so that nothing on the way out takes it for one row's failure."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        argv: arguments after the program's name; sys.argv's by default.
    """
    try:
        with _sigterm_raises():
            args = _parser().parse_args(argv)
            return args.run(args)
    except SystemExit as stop:  # argparse: help, or bad usage
        return stop.code if isinstance(stop.code, int) else USAGE
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted; what was finished is kept")
    except _Terminated:
        return _fail(TERMINATED, "terminated; what was finished is kept")
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not complain about it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (H3Error, OSError) as error:
        return _fail(_exit_code(error), _in_flags(error))


def _exit_code(error: Exception) -> int:
    if isinstance(error, ArchiveNotFoundError | ArchiveFormatError | BudgetError):
        return USAGE
    if any(isinstance(e, OSError) and e.errno in _BAD_PATH for e in (error, error.__cause__)):
        return USAGE
    return STORAGE if isinstance(error, ArchiveError | OSError) else USAGE


def _in_flags(error: Exception) -> str:
    """The message, in words of the command line."""
    text = str(error)
    if isinstance(error, BudgetError):
        return text.replace("ddr_bytes=", "--ddr ").replace("ddr_bytes of", "--ddr of").replace("ddr_bytes", "--ddr")
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, H3Error):
        return f"{error.filename}: {error.strerror}"
    return text


def _fail(code: int, message: str) -> int:
    if os.environ.get("H3STORE_DEBUG") == "1":
        traceback.print_exc()
    print("h3store: error: " + " ".join(message.split()), file=sys.stderr)
    return code


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: files are closed, what is finished is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def handler(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        raise _Terminated

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="h3store", description="Tensors larger than memory, and long documents asked many questions.",
                     epilog="exit codes: 0 done; 1 finished with error rows; 2 usage or bad input before work began; "
                            "3 storage or integrity error; 130 or 143 interrupted")
    parser.add_argument("--version", action="version", version=f"h3store {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for add in (_add_demo, _add_run_batch, _add_inspect, _add_verify, _add_doctor, _add_import_gguf):
        add(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str,
             example: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".",
                                 epilog=f"example: {example}")
    parser.set_defaults(run=run)
    return parser


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _file(text: str) -> Path:
    if text == "-":
        raise argparse.ArgumentTypeError("standard input and output are not served; name a file")
    return Path(text)


def _ratio(raw_bytes: int, stored_bytes: int) -> str:
    if raw_bytes == 0:
        return "-"
    return f">{_MAX_RATIO}" if raw_bytes > _MAX_RATIO * stored_bytes else f"{raw_bytes / stored_bytes:.2f}"


def _add_model_flags(parser: argparse.ArgumentParser, dtype: str | None) -> None:
    parser.add_argument("--store", type=Path, metavar="FILE", help="archive of KV caches, created if absent; "
                        "a document in it is restored, not computed (default: a temporary one)")
    parser.add_argument("--ddr", type=_size, metavar="SIZE", help='host memory for KV blocks at most, such as "64MiB"')
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default=dtype,
                        help="what weights are rounded to and KV is kept in (default: "
                        f"{dtype or 'as the checkpoint says'})")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


# ---- demo ------------------------------------------------------------------------------------------------------------


def _add_demo(commands: Any) -> None:
    parser = _command(commands, "demo", _demo, "ask a long document questions under a small memory budget",
                      "h3store demo --document contract.txt --questions 'Who signs it?' --ddr 64MiB")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="Hugging Face folder (default: "
                        "SmolLM2-135M-Instruct, fetched once)")
    parser.add_argument("--document", type=Path, metavar="FILE", help="text to ask about (default: a part of the "
                        "Python language reference)")
    parser.add_argument("--questions", nargs="+", metavar="TEXT", help="what to ask (default: three questions)")
    parser.add_argument("--max-tokens", type=_positive, default=48, metavar="N",
                        help="length of an answer (default 48)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what the table shows to this file")
    _add_model_flags(parser, "float32")


def _demo(args: argparse.Namespace) -> int:
    from h3store import demo

    job = demo.Job(model=args.model, document=args.document, questions=args.questions, store=args.store,
                   ddr_bytes=args.ddr, dtype=args.dtype, max_tokens=args.max_tokens)
    if args.json:
        _try_to_write(args.json)
    report = demo.run(job)
    demo.show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return DONE


def _try_to_write(path: Path) -> None:
    """Finds out before the work whether its report can be kept; leaves everything as it was."""
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}; give a file in a folder that can be written") from None
    if is_new:
        path.unlink()


# ---- run-batch -------------------------------------------------------------------------------------------------------


def _add_run_batch(commands: Any) -> None:
    parser = _command(commands, "run-batch", _run_batch, "answer a file of requests in the OpenAI batch format",
                      "h3store run-batch -i questions.jsonl -o answers.jsonl --model demo-data/SmolLM2-135M-Instruct "
                      "--store kv.h3 --ddr 1GiB")
    parser.add_argument("-i", "--input", type=_file, required=True, metavar="FILE", help="requests, one a line")
    parser.add_argument("-o", "--output", type=_file, required=True, metavar="FILE",
                        help="results, appended as they finish; the same command again goes on where it stopped")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="Hugging Face folder of a model")
    _add_model_flags(parser, None)
    parser.add_argument("--hbm", type=_size, metavar="SIZE",
                        help="GPU memory for KV blocks; refused today: KV is kept in host memory and on disk")
    parser.add_argument("--kv-format", default="native", metavar="NAME",
                        help="how KV is kept; today only native (the default): as it was computed")
    parser.add_argument("--policy", default="exact", metavar="NAME",
                        help="what attention reads; today only exact (the default): every token")
    parser.add_argument("--files", type=Path, metavar="FOLDER",
                        help="files that rows name; refused today: put the text into the rows")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def _refuse_unserved(args: argparse.Namespace) -> None:
    if args.hbm is not None:
        raise UsageError(f"--hbm {format_bytes(args.hbm)}: this version keeps KV in host memory and on disk only; "
                         "leave --hbm out")
    if args.kv_format != "native":
        raise UsageError(f"--kv-format {args.kv_format}: only native is served, which keeps KV as it was computed")
    if args.policy != "exact":
        raise UsageError(f"--policy {args.policy}: only exact is served, which reads every token")
    if args.files is not None:
        raise UsageError(f"--files {args.files}: rows that name files are not served; put the text in the row "
                         "and leave --files out")


def _run_batch(args: argparse.Namespace) -> int:
    _refuse_unserved(args)
    from h3store.batch import job

    summary = job.run_file(job.FileJob(source=args.input, output=args.output, model=args.model, store=args.store,
                                       ddr_bytes=args.ddr, dtype=args.dtype))
    if args.json:
        _print_json(summary)
    else:
        earlier = f", {summary['resumed_rows']} from an earlier run" if summary["resumed_rows"] else ""
        print(f"{counted(summary['rows'], 'row')} in {args.output}: {summary['answered']} answered, "
              f"{counted(summary['error_rows'], 'error row')}{earlier}")
    return ERROR_ROWS if summary["error_rows"] else DONE


# ---- inspect, verify -------------------------------------------------------------------------------------------------


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", _inspect, "show what an archive holds", "h3store inspect weights.h3")
    parser.add_argument("file", type=Path, metavar="FILE", help="an archive")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _inspect(args: argparse.Namespace) -> int:
    from h3store import archive

    info = archive.describe(args.file)
    if args.json:
        _print_json(_archive_json(info))
    else:
        _print_archive(info)
    return DONE


def _archive_json(info: ArchiveInfo) -> dict[str, Any]:
    shown = dataclasses.asdict(info) | {"raw_bytes": info.raw_bytes, "stored_bytes": info.stored_bytes}
    for row, tensor in zip(shown["tensors"], info.tensors, strict=True):
        row["ratio"] = tensor.ratio if tensor.stored_bytes else None  # JSON has no infinity
    return shown


def _print_archive(info: ArchiveInfo) -> None:
    table = Table("tensor", "dtype", "shape", "raw", "stored", "ratio", "chunks by filter", box=None, pad_edge=False)
    for column in table.columns[3:6]:
        column.justify = "right"
    for t in info.tensors:
        filters = ", ".join(f"{name} {count}" for name, count in t.filters.items())
        table.add_row(escape(t.name), t.dtype, " x ".join(map(str, t.shape)) or "scalar", format_bytes(t.raw_bytes),
                      format_bytes(t.stored_bytes), _ratio(t.raw_bytes, t.stored_bytes), filters)
    table.add_row("total", "", counted(len(info.tensors), "tensor"), format_bytes(info.raw_bytes),
                  format_bytes(info.stored_bytes), _ratio(info.raw_bytes, info.stored_bytes), "")
    stdout_console().print(table)
    print(f"file {format_bytes(info.file_bytes)}, of which {format_bytes(info.dead_bytes)} no longer in use; "
          f"commit {info.sequence}")


def _add_verify(commands: Any) -> None:
    parser = _command(commands, "verify", _verify, "read every block of an archive and check it",
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
        _print_json(dataclasses.asdict(report) | {"ok": report.ok})
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


def _place(bad: BadChunk) -> str:
    part = "its chunk table" if bad.block < 0 else f"block {bad.block}"
    return f"tensor {bad.tensor}, {part}, offset {bad.offset}"


# ---- doctor ----------------------------------------------------------------------------------------------------------


def _add_doctor(commands: Any) -> None:
    parser = _command(commands, "doctor", _doctor, "say what this machine offers and what to do about it",
                      "h3store doctor --path /mnt/nvme")
    parser.add_argument("--path", type=Path, default=Path("."), metavar="FOLDER",
                        help="where stores will live, to measure its disk (default: the current folder)")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _doctor(args: argparse.Namespace) -> int:
    from h3store import doctor

    checks = doctor.examine(args.path)
    if args.json:
        _print_json(doctor.as_dict(checks))
    else:
        for check in checks:
            print(f"{check.status:4}  {check.name}: {check.value}")
            if check.advice:
                print(f"      -> {check.advice}")
    return DONE


# ---- import-gguf -----------------------------------------------------------------------------------------------------


def _add_import_gguf(commands: Any) -> None:
    parser = _command(commands, "import-gguf", _import_gguf, "write a GGUF file as an ordinary Hugging Face folder",
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
        _print_json({"folder": str(folder), "bytes": sum(f.stat().st_size for f in folder.iterdir())})
    else:
        print(folder)
    return DONE
