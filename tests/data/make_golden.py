"""Makes the frozen archives of tests/data/golden. Files that exist are never made again: they stand for what older
builds wrote. A new format feature gets a new file name here.

Run from the repository: python tests/data/make_golden.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "uint8": 1, "int16": 2, "int32": 4, "int64": 8,
          "complex64": 8, "float8_e4m3fn": 1}


def noise(count: int, seed: int) -> np.ndarray:
    """uint64 values of a fixed generator (splitmix64), the same on every numpy."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def expected(name: str) -> np.ndarray:
    """The raw bytes of a golden tensor, from its name "KIND/DTYPE/SEED" alone: uint8, a chunk and a little more."""
    kind, dtype, seed = name.split("/")
    item = DTYPES[dtype]
    count = 4096 // item + 40 + int(seed)
    values = noise(count, int(seed) * 1000 + sum(map(ord, dtype + kind)))
    if kind == "patched":
        raw = expected(f"weights/{dtype}/{seed}")
        raw[5000:7000] = raw[3000:5000]
        raw[-100:] = 7
        return raw
    if kind == "patched-zero":
        raw = np.zeros(count * item, np.uint8)
        raw[5000:7000] = expected(f"weights/{dtype}/{seed}")[3000:5000]
        raw[-100:] = 7
        return raw
    if kind == "zero":
        return np.zeros(count * item, np.uint8)
    if kind == "noise":
        return values.astype("<u8").view(np.uint8)[: count * item].copy()
    if kind == "ramp":  # slowly rising integers
        return np.cumsum(values % np.uint64(5)).astype(f"<u{item}").view(np.uint8)
    # floats near 0.02 in size, as weights are: sums of uniform values are exact in float64
    uniform = (values >> np.uint64(11)).astype(np.float64) * 2.0**-53
    weights = (uniform + np.roll(uniform, 1) + np.roll(uniform, 2) - 1.5) * 0.03
    if kind == "near":  # a later checkpoint of the same weights
        weights = weights + 2.0**-20
    if dtype == "bfloat16":
        return np.ascontiguousarray(weights.astype("<f4").view("<u2")[1::2]).view(np.uint8)
    if dtype == "complex64":
        return np.repeat(weights.astype("<f4"), 2).view(np.uint8)
    floats = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
    return weights.astype(floats[dtype]).view(np.uint8)


def main() -> None:
    from h3store.archive import BaseRef, Writer
    from h3store.codec import DTYPES as TYPES
    from h3store.codec import Delta, Filter, Spec, default_spec

    def spec(dtype: str, filter_: Filter, delta: Delta = Delta.NONE) -> Spec:
        elem = TYPES[dtype].elem_bytes
        return Spec(elem, 64 * elem, filter_, delta, TYPES[dtype].exp_bits)

    def add(writer: Writer, name: str, how: Spec, **keywords: object) -> None:
        raw, dtype = expected(name), name.split("/")[1]
        writer.add(name, raw, dtype, (len(raw) // DTYPES[dtype],), how, 4096, threads=1, **keywords)  # type: ignore[arg-type]

    def filters(path: Path) -> None:
        with Writer(path) as writer:
            for seed, dtype in enumerate(("bfloat16", "float32", "float16", "float64", "complex64")):
                for filter_ in (Filter.EXPNIBBLE, Filter.BYTEPLANE, Filter.ZSTD):
                    add(writer, f"weights/{dtype}/{10 * seed + filter_}", spec(dtype, filter_))
            for dtype in ("int16", "int32", "int64"):
                for seed, delta in enumerate((Delta.NONE, Delta.ROW)):
                    add(writer, f"ramp/{dtype}/{seed}", spec(dtype, Filter.BYTEPLANE, delta))
                    add(writer, f"ramp/{dtype}/{seed + 2}", spec(dtype, Filter.ZSTD, delta))
            add(writer, "ramp/uint8/0", spec("uint8", Filter.ZSTD, Delta.ROW))
            add(writer, "noise/float8_e4m3fn/0", default_spec("float8_e4m3fn"))
            add(writer, "zero/float32/1", default_spec("float32"))
            writer.metadata["about"] = "every filter and delta of format 1.0"
            writer.commit()

    def base(path: Path) -> None:
        with Writer(path) as writer:
            add(writer, "weights/bfloat16/90", spec("bfloat16", Filter.EXPNIBBLE))
            writer.commit()

    def leaning(path: Path) -> None:
        with Writer(path.with_name("v1-base.h3"), "r+") as writer:
            ref = BaseRef("v1-base.h3", writer.uuid, writer.sequence, "weights/bfloat16/90")
        with Writer(path) as writer:
            for filter_ in (Filter.BYTEPLANE, Filter.ZSTD):
                how = spec("bfloat16", filter_, Delta.BASE)
                raw = expected("near/bfloat16/90")
                writer.add(f"near/bfloat16/90:{filter_.name}", raw, "bfloat16", (len(raw) // 2,), how, 4096, threads=1,
                           base=ref, base_data=expected("weights/bfloat16/90"))
            writer.commit()

    def patches(path: Path) -> None:
        """Chunks of four pages of which one changed, on a whole chunk and on zeros."""
        import torch

        import h3store

        size = len(expected("patched/bfloat16/14000")) // 2
        with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
            tensor = store.create("patched/bfloat16/14000", (size,), torch.bfloat16, chunk_bytes=16384)
            tensor.view(torch.uint8)[:] = torch.from_numpy(expected("weights/bfloat16/14000"))
            store.create("patched-zero/bfloat16/14000", (size,), torch.bfloat16, chunk_bytes=16384)
        with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
            for name in ("patched", "patched-zero"):
                raw = store[f"{name}/bfloat16/14000"].view(torch.uint8)
                raw[5000:7000] = torch.from_numpy(expected("patched/bfloat16/14000")[5000:7000])
                raw[-100:] = 7

    def checks(path: Path) -> None:
        """A file whose chunks have checks of both kinds: one of 1.1 that was written to, whole chunks and records."""
        import torch

        import h3store

        name = "patched/bfloat16/14000"
        path.write_bytes((GOLDEN / "v1.1-patches.h3").read_bytes())
        with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
            whole = torch.from_numpy(expected("weights/bfloat16/14000"))
            store.put("weights/bfloat16/14000", whole.view(torch.bfloat16))
            raw = store[name].view(torch.uint8)
            raw[5000:6000] = 0  # to a value and back: a record of the same bytes
            store.commit()
            raw[5000:6000] = torch.from_numpy(expected(name)[5000:6000])

    for file, make in {"v1-filters.h3": filters, "v1-base.h3": base, "v1-leaning.h3": leaning,
                       "v1.1-patches.h3": patches, "v1.2-checks.h3": checks}.items():
        if not (GOLDEN / file).exists():
            make(GOLDEN / file)
            print("made", GOLDEN / file, file=sys.stderr)


if __name__ == "__main__":
    main()
