"""Which archives an archive leans on. Owns what is asked of them before the work; refuses to read a chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from h3store.archive.reader import Reader
from h3store.archive.writer import Writer
from h3store.errors import ArchiveError, ArchiveNotFoundError, CorruptArchiveError, UsageError

__all__ = ["check_bases", "refuse_circle"]


def check_bases(archive: Reader | Writer) -> None:
    """Looks for every archive that one leans on directly.

    Raises:
        ArchiveNotFoundError: one is not there. CorruptArchiveError: another file lies in its place.
    """
    for path, uuid in _bases(archive):
        try:
            with Reader(path) as base:
                found = base.uuid
        except ArchiveNotFoundError as error:
            raise ArchiveNotFoundError(f"{archive.path} is a difference to {path}, which is not there; put that "
                                       "archive back") from error
        if found != uuid:
            raise CorruptArchiveError(f"{archive.path} is a difference to the archive that was at {path}; another one "
                                      "lies there now: put that archive back")


def refuse_circle(base: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Before a difference to base is written to target.

    Raises:
        UsageError: base is target, or leans on it: neither could be read afterwards.
    """
    if not os.path.exists(target):
        return
    for path in _chain(Path(base), set()):
        if path.samefile(target):
            what = "itself" if path.samefile(base) else f"{os.fspath(base)}, which is a difference to it"
            raise UsageError(f"{os.fspath(target)}: cannot be saved as a difference to {what}; choose another path")


def _chain(path: Path, seen: set[Path]) -> Iterator[Path]:
    """An archive and all that it leans on; where one cannot be read, reading it will say so."""
    if not path.exists() or path.resolve() in seen:
        return
    seen.add(path.resolve())
    yield path
    try:
        with Reader(path) as reader:
            bases = [base for base, _ in _bases(reader)]
    except ArchiveError:
        return
    for base in bases:
        yield from _chain(base, seen)


def _bases(archive: Reader | Writer) -> set[tuple[Path, bytes]]:
    bases = [record.base for record in archive.records.values() if record.base is not None]
    return {(Path(archive.path).parent / base.path, base.uuid) for base in bases}
