"""One chunk to stored bytes and back, from Python. Owns native codecs and their buffers; refuses to know files."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from h3store._ffi import CHUNK_DTYPE, check, ffi, lib
from h3store.codec.spec import Spec

__all__ = ["Codec", "check_holds", "decode_chunk", "encode_chunk"]

Buffer = bytes | bytearray | memoryview | np.ndarray


class Codec:
    """Working memory of one encode or decode at a time, about 13 MiB of address space, touched as chunks need it."""

    def __init__(self) -> None:
        out = ffi.new("h3_codec **")
        check(lib.h3_codec_create(out), "codec")
        self._native = ffi.gc(out[0], lib.h3_codec_destroy)
        self._spec: Spec | None = None
        self._native_spec: Any = None
        self._out = ffi.new("uint8_t[]", 1)

    def _to_native(self, spec: Spec) -> Any:
        """The spec of the last call, mostly: chunks come tensor by tensor, and making one takes as long as 8 KiB do."""
        if spec is not self._spec:
            self._spec, self._native_spec = spec, spec.to_native()
        return self._native_spec

    def encode(self, raw: Buffer, spec: Spec, base: Buffer | None = None) -> tuple[np.void, bytes]:
        """Encodes one chunk.

        Args:
            raw: 1 to MAX_CHUNK_BYTES bytes, any alignment.
            spec: how.
            base: the base tensor's bytes at the same place, as long as raw; None: delta to a base is skipped.

        Returns:
            The table entry (dtype CHUNK_DTYPE, offset 0) and the stored bytes, never more than raw has.

        Raises:
            NativeError: a size or spec out of its range.
        """
        data, native = ffi.from_buffer(raw), self._to_native(spec)
        size = len(data)
        if len(self._out) < size:
            self._out = ffi.new("uint8_t[]", size)
        out, entry = self._out, np.zeros(1, CHUNK_DTYPE)
        status = lib.h3_chunk_encode(self._native, native, data, size, _base(base, size), out, size, _entry(entry))
        check(status, f"encode of a chunk of {size} bytes")
        return entry[0], bytes(ffi.buffer(out, int(entry[0]["stored_bytes"])))

    def decode_into(self, entry: np.void, stored: Buffer, spec: Spec, raw: np.ndarray,
                    base: Buffer | None = None) -> int:
        """Decodes one chunk into raw (uint8, writable, contiguous) and returns the native status, 0 or negative.

        stored must hold the entry's stored_bytes; it is untrusted otherwise.
        """
        held = ffi.from_buffer(stored)
        if len(held) < int(entry["stored_bytes"]):
            return lib.H3_E_TRUNCATED
        out, native = ffi.from_buffer(raw, require_writable=True), self._to_native(spec)
        size = len(out)
        return lib.h3_chunk_decode(self._native, native, _entry(entry), held, _base(base, size), out, size)


def _entry(entry: np.ndarray | np.void) -> Any:
    # A plain pointer: the caller keeps the entry alive over the call.
    return ffi.cast("h3_chunk *", ffi.from_buffer(entry))


def _base(base: Buffer | None, size: int) -> Any:
    if base is None:
        return ffi.NULL
    held = ffi.from_buffer(base)
    check(0 if len(held) >= size else lib.H3_E_INVALID, f"base chunk of {len(held)} bytes for a chunk of {size}")
    return held


def check_holds(entry: np.void, raw: Buffer) -> bool:
    """Whether raw bytes have the check of a chunk's entry, by the hash that it names."""
    data = ffi.from_buffer(raw)
    return bool(lib.h3_check_holds(_entry(entry), data, len(data)))


_local = threading.local()


def _codec() -> Codec:
    if not hasattr(_local, "codec"):
        _local.codec = Codec()
    return _local.codec


def encode_chunk(raw: Buffer, spec: Spec, base: Buffer | None = None) -> tuple[np.void, bytes]:
    """Codec.encode with this thread's own codec."""
    return _codec().encode(raw, spec, base)


def decode_chunk(entry: np.void, stored: Buffer, spec: Spec, raw_bytes: int, base: Buffer | None = None) -> np.ndarray:
    """Decodes and verifies one chunk.

    Returns:
        uint8 array of raw_bytes.

    Raises:
        CorruptBlockError: the stored bytes are not what the entry's check promises.
    """
    raw = np.empty(raw_bytes, np.uint8)
    check(_codec().decode_into(entry, stored, spec, raw, base), f"decode of a chunk of {raw_bytes} bytes")
    return raw
