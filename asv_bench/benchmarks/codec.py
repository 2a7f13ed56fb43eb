"""The chunk codec: bytes stored, and GB/s on one thread, of each filter and of peers on the same TENSOR_BYTES, chunk by
chunk: values like a KV cache's, and trained weights (SmolLM2 as bfloat16) where the demo's model is at hand. Only
h3store's decode verifies a checksum. blosc2 and zipnn are measured where they are installed.

    python -m asv_bench.benchmarks.codec    one process: every coder on the trained weights, as JSON
"""

from __future__ import annotations

import contextlib
import importlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import zstandard

from h3store._ffi import CHUNK_DTYPE, check, ffi, lib
from h3store.archive import DEFAULT_CHUNK_BYTES
from h3store.codec import Codec, Filter, Spec, default_spec

from .common import TENSOR_BYTES, fresh_medians, kv_like, named, print_result

DTYPES = {"bfloat16": 2, "float32": 4}
# What is encoded: name in the pages, dtype, where the bytes come from.
DATA = {"KV-like bfloat16": ("bfloat16", lambda: kv_like(TENSOR_BYTES, "bfloat16")),
        "KV-like float32": ("float32", lambda: kv_like(TENSOR_BYTES, "float32")),
        "trained bfloat16": ("bfloat16", lambda: trained_weights())}
TRAINED = "trained bfloat16"
ROUNDS = 3

# Encode: a chunk to what is kept, and its size. Decode: what is kept to the chunk.
Coder = tuple[Callable[[np.ndarray], tuple[Any, int]], Callable[[Any], Any]]


class Ours:
    """Our codec with one filter, called as the pager calls it: once a chunk, into memory that is there."""

    def __init__(self, filter_: Filter, dtype: str) -> None:
        self.codec: Any = Codec()
        spec: Spec = replace(default_spec(dtype), filter=filter_)
        self.spec, self.out = spec.to_native(), np.empty(DEFAULT_CHUNK_BYTES, np.uint8)
        self.out_pointer = ffi.from_buffer("uint8_t[]", self.out)

    def encode(self, chunk: np.ndarray) -> tuple[Any, int]:
        """The entry and the stored bytes."""
        entry, size = np.zeros(1, CHUNK_DTYPE), chunk.nbytes
        pointer = ffi.cast("h3_chunk *", ffi.from_buffer(entry))
        check(lib.h3_chunk_encode(self.codec._native, self.spec, ffi.from_buffer(chunk), size, ffi.NULL,
                                  self.out_pointer, size, pointer), "encode")
        stored = bytes(ffi.buffer(self.out_pointer, pointer.stored_bytes))
        return (entry, pointer, stored), len(stored)

    def decode(self, kept: Any) -> np.ndarray:
        """The chunk, its check compared."""
        _, pointer, stored = kept
        check(lib.h3_chunk_decode(self.codec._native, self.spec, pointer, ffi.from_buffer(stored), ffi.NULL,
                                  self.out_pointer, self.out.nbytes), "decode")
        return self.out


def ours(filter_: Filter, dtype: str) -> Coder:
    """Our codec with one filter."""
    coder = Ours(filter_, dtype)
    return coder.encode, coder.decode


def trained_weights() -> np.ndarray:
    """The first TENSOR_BYTES of the demo's model.

    Raises:
        ImportError: it was never fetched (make demo does); as with peers that are not installed.
    """
    import torch
    from safetensors.torch import load_file

    from h3store.models.fetch import cache_dir

    folder = cache_dir() / "SmolLM2-135M-Instruct"
    if not (folder / "model.safetensors").is_file():
        raise ImportError(f"no model in {folder}")
    parts, size = [], 0
    for tensor in load_file(folder / "model.safetensors").values():
        parts.append(tensor.to(torch.bfloat16).reshape(-1).view(torch.uint8))
        size += parts[-1].numel()
        if size >= TENSOR_BYTES:
            break
    return torch.cat(parts)[:TENSOR_BYTES].numpy()


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


# What asv tracks of a coder that is not installed, or of a model that is not at hand.
MISSING = [math.nan] * 3


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


def measure_data(data: str) -> dict[str, list[float]]:
    """Ratio, encode and decode of every installed coder on one kind of data: medians of ROUNDS rounds in turn."""
    dtype, load = DATA[data]
    chunks = np.split(load(), TENSOR_BYTES // DEFAULT_CHUNK_BYTES)
    coders = {}
    for name, make in CODERS.items():
        with contextlib.suppress(ImportError):
            coders[name] = make(dtype)
    rounds = [{name: measure(coder, chunks) for name, coder in coders.items()} for _ in range(ROUNDS)]
    return {name: [statistics.median(column) for column in zip(*(r[name] for r in rounds), strict=True)]
            for name in coders}


def measure_all(processes: int) -> dict[str, dict[str, Any]]:
    """{coder: {"ratio", "encode", "decode": median, all}} on trained weights, or KV-like ones where there are none."""
    found = fresh_medians("codec", [], processes)
    result: dict[str, dict[str, Any]] = {}
    for work, values in found.items():
        coder, what = work.rsplit(": ", 1)
        result.setdefault(coder, {})[what] = values
    return result


class Coders:
    """Filters and peers; those that are not installed are skipped."""

    params = [list(CODERS), list(DATA)]  # noqa: RUF012  asv reads it as a plain class attribute
    param_names = ["coder", "data"]  # noqa: RUF012
    timeout = 600

    def setup_cache(self) -> dict[tuple[str, str], list[float]]:
        """All of them in turn, ROUNDS times in one process, so that a slow moment hits each alike; medians."""
        results: dict[tuple[str, str], list[float]] = {}
        for data in DATA:
            with contextlib.suppress(ImportError):  # no model at hand
                results |= {(name, data): found for name, found in measure_data(data).items()}
        return results

    @named("Raw bytes for one stored byte, chunks of 64 KiB", "raw/stored")
    def track_ratio(self, results: dict[tuple[str, str], list[float]], coder: str, data: str) -> float:
        """Raw bytes for one stored byte."""
        return results.get((coder, data), MISSING)[0]

    @named("Encode, one thread, chunks of 64 KiB", "GB/s")
    def track_encode(self, results: dict[tuple[str, str], list[float]], coder: str, data: str) -> float:
        """Raw bytes a second, to stored bytes."""
        return results.get((coder, data), MISSING)[1]

    @named("Decode, one thread, chunks of 64 KiB", "GB/s")
    def track_decode(self, results: dict[tuple[str, str], list[float]], coder: str, data: str) -> float:
        """Raw bytes a second, from stored bytes."""
        return results.get((coder, data), MISSING)[2]


if __name__ == "__main__":
    try:
        figures = measure_data(TRAINED)
    except ImportError:
        figures = measure_data("KV-like bfloat16")
    print_result({f"{coder}: {what}": value for coder, values in figures.items()
                  for what, value in zip(("ratio", "encode", "decode"), values, strict=True)})
