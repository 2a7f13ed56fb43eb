"""The boundary to native code. Owns the import of the compiled module, its start, the map from native statuses to the
error tree, and the numpy form of structures that cross in arrays. Refuses to hold any policy."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from h3store import errors

__all__ = ["CHUNK_DTYPE", "check", "ffi", "lib"]

_ZSTD_SYMBOLS = {
    "version_number": "ZSTD_versionNumber",
    "estimate_dctx_size": "ZSTD_estimateDCtxSize",
    "init_static_dctx": "ZSTD_initStaticDCtx",
    "decompress_dctx": "ZSTD_decompressDCtx",
    "estimate_cctx_size": "ZSTD_estimateCCtxSize",
    "init_static_cctx": "ZSTD_initStaticCCtx",
    "compress_cctx": "ZSTD_compressCCtx",
    "is_error": "ZSTD_isError",
    "compress_bound": "ZSTD_compressBound",
}


def _import_native() -> ModuleType:
    try:
        return import_module("h3store._native")
    except ImportError as error:
        raise errors.Unavailable(
            f"the compiled module h3store._native does not load ({error}); build it with: pip install -e . "
            "(needs a C compiler and the Python headers)"
        ) from error


def _zstd_addresses() -> dict[str, int]:
    """Address of each zstd function inside the zstandard package's own cffi module."""
    way_out = 'install the tested range with: pip install "zstandard>=0.23,<0.26"'
    try:
        zstandard, _cffi = import_module("zstandard"), import_module("zstandard._cffi")
    except ImportError as error:
        raise errors.Unavailable(f"zstandard's module zstandard._cffi does not load ({error}); {way_out}") from error
    found: dict[str, int] = {}
    for field, symbol in _ZSTD_SYMBOLS.items():
        try:
            found[field] = int(_cffi.ffi.cast("uintptr_t", _cffi.ffi.addressof(_cffi.lib, symbol)))
        except AttributeError as error:
            raise errors.Unavailable(f"zstandard {zstandard.__version__} has no {symbol}; {way_out}") from error
    return found


_native = _import_native()
ffi: Any = _native.ffi
lib: Any = _native.lib

_ERRORS: dict[int, type[errors.H3Error]] = {
    lib.H3_E_NOMEM: errors.NativeError,
    lib.H3_E_IO: errors.ArchiveError,
    lib.H3_E_NOSPACE: errors.StorageFullError,
    lib.H3_E_CORRUPT: errors.CorruptBlockError,
    lib.H3_E_BUDGET: errors.BudgetError,
    lib.H3_E_INVALID: errors.NativeError,
    lib.H3_E_UNSUPPORTED: errors.Unavailable,
    lib.H3_E_READONLY: errors.ReadOnlyError,
    lib.H3_E_CLOSED: errors.StoreClosedError,
    lib.H3_E_BUSY: errors.NativeError,
    lib.H3_E_TRUNCATED: errors.CorruptArchiveError,
}
_WITH_ERRNO = (lib.H3_E_NOMEM, lib.H3_E_IO, lib.H3_E_NOSPACE)


def check(status: int, what: str) -> None:
    """Raises the error of a negative native status; does nothing for 0 and above.

    Args:
        status: what a native function returned.
        what: the object and action for the message, such as "weights.h3: read of block 7".

    Raises:
        H3Error: of the type that the status maps to; its message is what, the status text, and the errno if any.
    """
    if status >= 0:
        return
    message = f"{what}: {ffi.string(lib.h3_strerror(status)).decode()}"
    if status in _WITH_ERRNO and (number := lib.h3_last_errno()):
        message += f" ({os.strerror(number)})"
    raise _ERRORS.get(status, errors.NativeError)(message)


check(lib.h3_init(ffi.new("h3_zstd *", _zstd_addresses())), "start of the native engine with zstandard's zstd")


def _struct_dtype(name: str) -> np.dtype[Any]:
    """The numpy form of a native structure of unsigned integers: the header stays the only list of its fields."""
    fields = ffi.typeof(name).fields
    return np.dtype({"names": [field for field, _ in fields],
                     "formats": [f"<u{ffi.sizeof(place.type)}" for _, place in fields],
                     "offsets": [place.offset for _, place in fields], "itemsize": ffi.sizeof(name)})


# One entry of a chunk table, in the file as in memory.
CHUNK_DTYPE = _struct_dtype("h3_chunk")
