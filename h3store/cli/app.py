"""From arguments to an exit code. Owns the list of commands, signals, and which error ends with which code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

from h3store.cli import archives, jobs, machine, models
from h3store.cli.flags import DONE, INTERRUPTED, STORAGE, TERMINATED, USAGE, Parser
from h3store.errors import ArchiveError, ArchiveFormatError, ArchiveNotFoundError, BudgetError, H3Error
from h3store.version import __version__

__all__ = ["main"]

# A path that leads nowhere useful: the caller's to mend, unlike a disk that fails.
_BAD_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)


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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="h3store", description="Tensors larger than memory, and long documents asked many questions.",
                    epilog="exit codes: 0 done; 1 finished with error rows; 2 usage or bad input before work began; "
                           "3 storage or integrity error; 130 or 143 interrupted")
    parser.add_argument("--version", action="version", version=f"h3store {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for group in (jobs, archives, machine, models):
        group.add_to(commands)
    return parser
