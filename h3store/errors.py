"""The error tree. Owns every exception that h3store raises on purpose; imports nothing of ours.

H3Error
├── BudgetError (also MemoryError)            a ddr, hbm or weights budget cannot hold what was asked
├── ArchiveError
│   ├── ArchiveNotFoundError (FileNotFoundError)
│   ├── ArchiveFormatError (ValueError)       not an archive, or a version or feature this build does not know
│   ├── CorruptArchiveError                   header, index or commit record fails its checksum, or the file is cut
│   │   ├── CorruptBlockError                 one chunk of one tensor fails
│   │   └── ArchiveChangedError               sound, but no longer what a reference to it was made for
│   ├── ArchiveLockedError (BlockingIOError)  another process writes the file
│   └── StorageFullError (OSError)            no space left; the last commit stands
├── ReadOnlyError (RuntimeError)              in-place or out= on a tensor opened for reading
├── StoreClosedError (ValueError)             use after close
├── TensorNotFoundError (KeyError)            no such name in a store
├── NativeError (RuntimeError)                the native engine reported something without a better name
├── CheckpointError (ValueError)              a model folder that is incomplete or contradicts itself
│   └── UnsupportedModelError                 model type, RoPE type or dtype that this build does not run
├── TokenizerError (ValueError)               no tokenizer, or one that does not load
├── RequestError (ValueError)                 a batch row that cannot be served; becomes an error row
├── UsageError (ValueError)                   bad flags or input, found before work began
└── Unavailable (RuntimeError)                a kernel feature, library or device that is needed and not there
"""

from __future__ import annotations

import errno


class H3Error(Exception):
    """Base of every error that h3store raises on purpose."""


class BudgetError(H3Error, MemoryError):
    """A byte budget cannot hold what was asked; the message names both sizes and the way out."""


class ArchiveError(H3Error):
    """Something about an archive file."""


class ArchiveNotFoundError(ArchiveError, FileNotFoundError):
    """No archive at this path."""


class ArchiveFormatError(ArchiveError, ValueError):
    """The file is not an archive, or needs a version or feature that this build does not know."""


class CorruptArchiveError(ArchiveError):
    """Header, index or commit record fails its checksum, or the file is shorter than its index says."""


class CorruptBlockError(CorruptArchiveError):
    """One chunk of one tensor does not decode to the bytes its checksum promises."""


class ArchiveChangedError(CorruptArchiveError):
    """A sound archive that no longer holds what a reference, or an archive that leans on it, was made for.

    A CorruptArchiveError, as which it used to be raised.
    """


class ArchiveLockedError(ArchiveError, BlockingIOError):
    """Another process holds the file for writing."""


class StorageFullError(ArchiveError, OSError):
    """No space left on the device; the last commit stands."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)

    def __str__(self) -> str:
        return str(self.args[1])

    def __reduce__(self) -> tuple[type[StorageFullError], tuple[str]]:
        return type(self), (str(self),)


class ReadOnlyError(H3Error, RuntimeError):
    """An in-place or out= operation on a tensor that was opened for reading.

    No TypeError: torch turns those of `t += 1` into NotImplemented, and Python then rebinds t to a copy in silence.
    """


class StoreClosedError(H3Error, ValueError):
    """A store, or a tensor of it, was used after close."""


class TensorNotFoundError(H3Error, KeyError):
    """A store holds no tensor of this name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NativeError(H3Error, RuntimeError):
    """The native engine reported a status that has no better name."""


class CheckpointError(H3Error, ValueError):
    """A model folder is incomplete or contradicts itself."""


class UnsupportedModelError(CheckpointError):
    """A model type, RoPE type or dtype that this build does not run."""


class TokenizerError(H3Error, ValueError):
    """No tokenizer where one is needed, or one that does not load."""


class RequestError(H3Error, ValueError):
    """A batch row that cannot be served; it becomes an error row.

    Args:
        message: what is wrong and the way out.
        code: a short name that programs can compare, such as "unsupported_field".
        param: the field at fault, such as "body.max_tokens"; None when it is the whole row.
    """

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class UsageError(H3Error, ValueError):
    """Bad flags or input, found before work began (exit code 2)."""


class Unavailable(H3Error, RuntimeError):
    """A kernel feature, library or device that is needed is not there."""
