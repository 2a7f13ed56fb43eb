"""The chunk codec: one core, one chunk of CHUNK_BYTES, each filter on values like a KV cache's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import zstandard

from h3store.codec import Codec, Filter, default_spec

from .common import CHUNK_BYTES, kv_like


class Chunk:
    """Encode and decode of one bfloat16 chunk."""

    params = [["EXPNIBBLE", "BYTEPLANE", "ZSTD", "RAW"]]  # noqa: RUF012  asv reads it as a plain class attribute
    param_names = ["filter"]  # noqa: RUF012

    def setup(self, name: str) -> None:
        """One encoded chunk and a place to decode it to."""
        self.raw = kv_like(4096)[:CHUNK_BYTES].copy()
        self.spec = replace(default_spec("bfloat16"), filter=Filter[name])
        self.codec = Codec()
        self.entry, self.stored = self.codec.encode(self.raw, self.spec)
        self.out = np.empty_like(self.raw)

    def time_warm_encode(self, name: str) -> None:
        """Raw bytes to stored bytes."""
        self.codec.encode(self.raw, self.spec)

    def time_warm_decode(self, name: str) -> None:
        """Stored bytes to raw bytes, checksum included."""
        if self.codec.decode_into(self.entry, self.stored, self.spec, self.out):
            raise RuntimeError("the chunk does not decode")

    def track_ratio(self, name: str) -> float:
        """Raw bytes for one stored byte."""
        return self.raw.nbytes / len(self.stored)


class Peer:
    """Plain zstd level 1 through its own package, on the same bytes."""

    def setup(self) -> None:
        """One frame."""
        self.raw = kv_like(4096)[:CHUNK_BYTES].tobytes()
        self.packed = zstandard.ZstdCompressor(level=1).compress(self.raw)
        self.unpacker = zstandard.ZstdDecompressor()

    def time_warm_zstd_decode(self) -> None:
        """Frame to bytes, without a checksum."""
        self.unpacker.decompress(self.packed)

    def track_zstd_ratio(self) -> float:
        """Raw bytes for one stored byte."""
        return len(self.raw) / len(self.packed)
