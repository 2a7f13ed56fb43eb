"""Batch files: rows in from one file, results appended to another. Owns durability and resuming; runs no model.

A result is on disk before the next row runs. A run that ended early, even by kill -9, leaves whole lines and at most
one torn one; the same command drops the torn line and goes on with the rows that have no result.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from h3store.batch.rows import Rows, read_rows
from h3store.errors import StorageFullError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_input(path: Path) -> Rows:
    """Reads and checks a batch file.

    Raises:
        UsageError: no such file, not readable, not UTF-8 text, or two rows with one custom_id.
    """
    try:
        with open(path, "rb") as file:
            return read_rows(_text_lines(file))
    except OSError as error:
        raise UsageError(f"input {path}: {error.strerror}; give a batch file with one JSON object a line") from None
    except UsageError as error:
        raise UsageError(f"input {path}: {error}") from None


def _text_lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Numbered lines. A line that is no UTF-8 text costs its row; a file of mostly such lines is something else."""
    lines = bad = start = 0
    first = ""
    for number, line in enumerate(file, 1):
        if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UsageError("line 1 starts, at byte 0, with the mark of UTF-16; save the file as UTF-8")
        at = _not_text_at(line)
        bad += at is not None
        lines += bool(line.strip())
        if at is not None and not first:
            first = f"line {number}, byte {start + at} of the file"
        start += len(line)
        yield number, line
    if 2 * bad > lines:
        raise UsageError(f"{bad} of {lines} lines are not UTF-8 text, the first at {first}; save the file as UTF-8, "
                         "one JSON object a line")


def _not_text_at(line: bytes) -> int | None:
    """Where a line stops being UTF-8 text; None if it is."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return error.start
    at = line.find(b"\0")
    return at if at >= 0 else None


class ResultFile:
    """The output of a run, open for appending and held by this process alone.

    Attributes:
        custom_ids: rows that have a result already.
        nameless_lines: input lines without a custom_id that have their error row already.
        error_rows: results so far that are errors.
        resumed_rows: results that were there when the file was opened.
    """

    def __init__(self, path: Path, source: Path) -> None:
        """Opens the file, and drops a torn last line.

        Args:
            path: where results go; created if absent.
            source: the input, which must be another file.

        Raises:
            UsageError: the file can't be opened, is the input, is written by another process, or holds something that
                is not a result row.
        """
        self.path = path
        self.custom_ids: set[str] = set()
        self.nameless_lines: set[int] = set()
        self.error_rows = 0
        self.resumed_rows = 0
        self._is_new = not path.exists()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"output {path}: {error.strerror}; give a file in a folder that can be written") from None
        try:
            self._claim(source)
        except BaseException:
            os.close(self._fd)
            raise

    def _claim(self, source: Path) -> None:
        if source.exists() and os.path.samestat(os.fstat(self._fd), os.stat(source)):
            raise UsageError(f"output {self.path} is the input file; give another name")
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            return  # a device or pipe: nothing to resume from
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"output {self.path} is being written by another run; wait for it or give another "
                             "name") from None
        self._resume()
        _sync_folder(self.path)

    def _resume(self) -> None:
        whole = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                self._count(_result(line, self.path, number))
                whole += len(line)
        os.ftruncate(self._fd, whole)
        self.resumed_rows = len(self.custom_ids) + len(self.nameless_lines)

    def _count(self, row: dict[str, Any]) -> None:
        if row["custom_id"] is not None:
            self.custom_ids.add(row["custom_id"])
        else:
            self.nameless_lines.add(row["error"]["line"])
        self.error_rows += row["error"] is not None

    def remaining(self, rows: Rows) -> Rows:
        """Returns the rows that have no result yet.

        Raises:
            UsageError: the file holds a result of a row that the input does not have.
        """
        errors = [row for row in rows.errors if row["custom_id"] is not None or
                  row["error"]["line"] not in self.nameless_lines]
        known = {request.custom_id for request in rows.requests} | {row["custom_id"] for row in rows.errors}
        if foreign := sorted(self.custom_ids - known):
            raise UsageError(f"output {self.path} holds a result for custom_id {foreign[0]!r}, which the input "
                             "does not have; give another output for another batch")
        return Rows([request for request in rows.requests if request.custom_id not in self.custom_ids],
                    [row for row in errors if row["custom_id"] not in self.custom_ids])

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes result rows and returns when they are on disk.

        Raises:
            StorageFullError: no room; the file keeps the rows before these.
        """
        rows = list(rows)
        data = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
        start = os.fstat(self._fd).st_size
        try:
            self._write(data)
        except OSError as error:
            self._undo(start)
            if error.errno not in _FULL:
                raise
            raise StorageFullError(f"output {self.path}: {error.strerror} after {start} bytes; results so far are "
                                   "kept. Make room and run the same command again") from None
        for row in rows:
            self._count(row)

    def _write(self, data: bytes) -> None:
        # One call for the whole text, so that a signal's exception comes before or after a row, not inside it.
        while data:
            data = data[os.write(self._fd, data):]
        self._sync()

    def _undo(self, size: int) -> None:
        if stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.ftruncate(self._fd, size)

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EROFS):  # pipes and devices have nothing to sync
                raise

    def close(self) -> None:
        """Syncs and closes the file, and lets others write it."""
        try:
            self._sync()
        finally:
            os.close(self._fd)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and self._is_new and stat.S_ISREG((at := os.fstat(self._fd)).st_mode) and at.st_size == 0:
            self.path.unlink(missing_ok=True)  # nothing came of the run; the lock is still ours
        self.close()


def _result(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
        good = isinstance(row["custom_id"], str) or (row["custom_id"] is None and isinstance(row["error"]["line"], int))
        good = good and "error" in row
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise UsageError(f"output {path}: line {number} is not a result row, so the file is left alone; give another "
                         "name")
    return row


def _sync_folder(path: Path) -> None:
    """Makes the file's name itself durable."""
    fd = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(out: ResultFile, rows: Rows, answered: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Appends error rows at once, then each answer as it comes, and yields what was written.

    Args:
        out: where to.
        rows: what remains.
        answered: result rows of `rows.requests`.
    """
    if rows.errors:
        out.append(rows.errors)
        yield from rows.errors
    for row in answered:
        out.append([row])
        yield row
