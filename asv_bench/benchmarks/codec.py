"""The chunk codec: bytes stored, and GB/s on one thread, of each filter and of peers on the same TENSOR_BYTES of values
like a KV cache's, chunk by chunk. Only h3store's decode verifies a checksum. blosc2 and zipnn are measured
where they are installed."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import zstandard

from h3store.archive import DEFAULT_CHUNK_BYTES
from h3store.codec import Codec, Filter, default_spec

from .common import TENSOR_BYTES, kv_like

DTYPES = {"bfloat16": 2, "float32": 4}
ROUNDS = 3

# Encode: a chunk to what is kept, and its size. Decode: what is kept to the chunk.
Coder = tuple[Callable[[np.ndarray], tuple[Any, int]], Callable[[Any], Any]]


def ours(filter_: Filter, dtype: str) -> Coder:
    """Our codec with one filter."""
    codec, spec, out = Codec(), replace(default_spec(dtype), filter=filter_), np.empty(DEFAULT_CHUNK_BYTES, np.uint8)

    def encode(chunk: np.ndarray) -> tuple[Any, int]:
        kept = codec.encode(chunk, spec)
        return kept, len(kept[1])

    def decode(kept: Any) -> np.ndarray:
        if codec.decode_into(*kept, spec, out):
            raise RuntimeError("the chunk does not decode")
        return out

    return encode, decode


def sized(encode: Callable[[Any], bytes]) -> Callable[[np.ndarray], tuple[Any, int]]:
    """An encoder that gives bytes, with their count."""
    def both(chunk: np.ndarray) -> tuple[Any, int]:
        kept = encode(chunk)
        return kept, len(kept)

    return both


def zstd(level: int, dtype: str) -> Coder:
    """The zstandard package."""
    return sized(zstandard.ZstdCompressor(level=level).compress), zstandard.ZstdDecompressor().decompress


def blosc2(dtype: str) -> Coder:
    """The blosc2 package: shuffle and zstd, level 1."""
    module = importlib.import_module("blosc2")
    how = {"typesize": DTYPES[dtype], "clevel": 1, "codec": module.Codec.ZSTD, "filters": [module.Filter.SHUFFLE]}
    return (sized(lambda chunk: module.compress2(chunk, nthreads=1, **how)),
            lambda kept: module.decompress2(kept, nthreads=1))


def zipnn(dtype: str) -> Coder:
    """The zipnn package; it works inside its input, so it is given a copy."""
    module = importlib.import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
    return sized(lambda chunk: module.compress(bytearray(chunk))), module.decompress


CODERS: dict[str, Callable[[str], Coder]] = {
    **{name: lambda dtype, name=name: ours(Filter[name], dtype) for name in ("EXPNIBBLE", "BYTEPLANE", "ZSTD", "RAW")},
    "zstandard 1": lambda dtype: zstd(1, dtype), "zstandard 3": lambda dtype: zstd(3, dtype),
    "blosc2": blosc2, "zipnn": zipnn}


def gb_per_s(work: Callable[[], object]) -> float:
    """Of TENSOR_BYTES, in time on the processor: what others run meanwhile matters less."""
    start = time.thread_time()
    work()
    return TENSOR_BYTES / (time.thread_time() - start) / 1e9


def measure(coder: Coder, chunks: list[np.ndarray]) -> tuple[float, float, float]:
    """Ratio, GB/s of encode, GB/s of decode."""
    encode, decode = coder
    kept: list[tuple[Any, int]] = []
    encoded = gb_per_s(lambda: kept.extend(map(encode, chunks)))
    decoded = gb_per_s(lambda: [decode(item) for item, _ in kept])
    if bytes(decode(kept[-1][0])) != chunks[-1].tobytes():
        raise RuntimeError("the last chunk does not come back")
    return TENSOR_BYTES / sum(size for _, size in kept), encoded, decoded


class Coders:
    """Filters and peers; those that are not installed are skipped."""

    params = [list(CODERS), list(DTYPES)]  # noqa: RUF012  asv reads it as a plain class attribute
    param_names = ["coder", "dtype"]  # noqa: RUF012

    def setup_cache(self) -> dict[tuple[str, str], list[float]]:
        """All of them in turn, ROUNDS times in one process, so that a slow moment hits each alike; medians."""
        results: dict[tuple[str, str], list[float]] = {}
        for dtype in DTYPES:
            raw = kv_like(TENSOR_BYTES, dtype)
            chunks = np.split(raw, TENSOR_BYTES // DEFAULT_CHUNK_BYTES)
            coders = {}
            for name, make in CODERS.items():
                try:
                    coders[name] = make(dtype)
                except ImportError:
                    continue
            rounds = [{name: measure(coder, chunks) for name, coder in coders.items()} for _ in range(ROUNDS)]
            for name in coders:
                results[name, dtype] = [statistics.median(column) for column in zip(*(r[name] for r in rounds),
                                                                                   strict=True)]
        return results

    def setup(self, results: dict[tuple[str, str], list[float]], coder: str, dtype: str) -> None:
        """Skips peers that are not installed."""
        if (coder, dtype) not in results:
            raise NotImplementedError(f"{coder} is not installed")

    def track_ratio(self, results: dict[tuple[str, str], list[float]], coder: str, dtype: str) -> float:
        """Raw bytes for one stored byte."""
        return results[coder, dtype][0]

    def track_encode(self, results: dict[tuple[str, str], list[float]], coder: str, dtype: str) -> float:
        """Raw bytes a second, to stored bytes."""
        return results[coder, dtype][1]

    def track_decode(self, results: dict[tuple[str, str], list[float]], coder: str, dtype: str) -> float:
        """Raw bytes a second, from stored bytes."""
        return results[coder, dtype][2]

    track_ratio.unit = "raw/stored"
    track_encode.unit = track_decode.unit = "GB/s"
