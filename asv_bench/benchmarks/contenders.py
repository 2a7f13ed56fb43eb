"""Who stores the table of 4 KiB rows: h3store and what people use today. Each is prepared once from the same bytes,
opened cold, and asked for the same rows. Nothing here is timed; reads.py and writes.py do that.

A contender that is not installed is left out. Imports are lazy: each is measured in a process that loads only what it
needs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .common import BENCH_BYTES, BIG_ROW_BYTES, ROW_BYTES, ROWS, SEED, bench_folder

HEADER_BYTES = 4096  # of the raw file: a safetensors header, padded so that the data starts on a page
CHUNK_ROWS = 65536 // ROW_BYTES  # peers with chunks get the same 64 KiB
SLAB_BYTES = 8 * 2**20
QUEUE_DEPTH = 32
# Read at queue depth 1 these hold a process for minutes: they get a twentieth of the rows, and their time is scaled.
SLOW = ("zarr",)


def raw_path() -> Path:
    """The table as it is: a safetensors file that memory maps can use too."""
    return bench_folder() / "table.safetensors"


def raw_table(mode: str = "r") -> np.memmap:
    """(ROWS, ROW_BYTES / 2) of uint16: the bits of bfloat16."""
    return np.memmap(raw_path(), np.uint16, mode, HEADER_BYTES, (ROWS, ROW_BYTES // 2))


def prepare_raw() -> None:
    """Weights of rows with scales of their own, bfloat16, the same in every run."""
    if raw_path().exists():
        return
    import torch

    header = {"table": {"dtype": "BF16", "shape": [ROWS, ROW_BYTES // 2], "data_offsets": [0, BENCH_BYTES]}}
    text = json.dumps(header).encode().ljust(HEADER_BYTES - 8)
    generator = torch.Generator().manual_seed(SEED)
    with (part := raw_path().with_suffix(".part")).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        step = SLAB_BYTES // ROW_BYTES
        for first in range(0, ROWS, step):
            rows = torch.randn(min(step, ROWS - first), ROW_BYTES // 2, generator=generator)
            rows *= 0.02 * torch.exp(0.5 * torch.randn(len(rows), 1, generator=generator))
            file.write(rows.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    part.rename(raw_path())


class Contender(ABC):
    """One way to store the table. Subclasses open it in __init__, cold and with nothing read."""

    needs: tuple[str, ...] = ()

    @classmethod
    def files(cls) -> list[Path]:
        """What lies on disk, to be made cold."""
        return [raw_path()]

    @classmethod
    def prepare(cls) -> None:
        """Writes the files, if they are not there: most read the raw table as it is."""
        return

    @abstractmethod
    def gather(self, rows: np.ndarray, row_bytes: int) -> Any:
        """Rows of the table seen as rows of row_bytes, copied."""

    def scan(self) -> int | None:
        """Sum of the table's 64-bit words, modulo 2^64, read once in order; None if nobody would read it so."""
        return None


def _sum(slab: np.ndarray) -> int:
    return int(slab.reshape(-1).view(np.int64).sum())


def _scan_slabs(take: Callable[[int, int], np.ndarray]) -> int:
    step = SLAB_BYTES // ROW_BYTES
    return sum(_sum(take(first, min(first + step, ROWS))) for first in range(0, ROWS, step)) % 2**64


class H3Store(Contender):
    """This package, budget a quarter of the table."""

    access: str | None = None
    ddr_bytes = BENCH_BYTES // 4

    @classmethod
    def path(cls) -> Path:
        return bench_folder() / f"table-{cls.access or 'default'}.h3"

    @classmethod
    def files(cls) -> list[Path]:
        return [cls.path()]

    @classmethod
    def prepare(cls) -> None:
        if cls.path().exists():
            return
        import torch

        import h3store

        table = torch.from_numpy(raw_table("c")).view(torch.bfloat16)
        h3store.save({"table": table}, part := cls.path().with_suffix(".part"), access=cls.access)
        part.rename(cls.path())

    def __init__(self) -> None:
        import h3store

        self.table = h3store.load(self.path(), ddr_bytes=self.ddr_bytes)["table"]

    def gather(self, rows: np.ndarray, row_bytes: int) -> Any:
        import torch

        return self.table.view(-1, row_bytes // 2).index_select(0, torch.from_numpy(rows))

    def scan(self) -> int:
        import torch

        flat = self.table.view(torch.int64).numpy()
        return _scan_slabs(lambda first, last: flat[first:last])


class H3StoreRandom(H3Store):
    """This package, saved with access="random"."""

    access = "random"


class H3StoreStream(H3Store):
    """This package, saved with access="stream"."""

    access = "stream"


class NumpyMemmap(Contender):
    """numpy.memmap."""

    def __init__(self) -> None:
        self.table = raw_table()

    def gather(self, rows: np.ndarray, row_bytes: int) -> Any:
        return self.table.reshape(-1, row_bytes // 2)[rows]

    def scan(self) -> int:
        return _scan_slabs(lambda first, last: self.table[first:last])


class TorchFromFile(Contender):
    """torch.from_file, told MADV_RANDOM."""

    def __init__(self) -> None:
        import torch

        flat = torch.from_file(str(raw_path()), shared=False, size=(HEADER_BYTES + BENCH_BYTES) // 2,
                               dtype=torch.bfloat16)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(flat.data_ptr()), ctypes.c_size_t(HEADER_BYTES + BENCH_BYTES),
                        mmap.MADV_RANDOM):
            raise OSError(ctypes.get_errno(), "madvise")
        self.table = flat[HEADER_BYTES // 2:].view(ROWS, ROW_BYTES // 2)

    def gather(self, rows: np.ndarray, row_bytes: int) -> Any:
        import torch

        return self.table.view(-1, row_bytes // 2).index_select(0, torch.from_numpy(rows))


class Safetensors(Contender):
    """safetensors, one lazy slice a row."""

    needs = ("safetensors",)

    def __init__(self) -> None:
        from safetensors import safe_open

        self.file = safe_open(raw_path(), framework="pt")
        self.table = self.file.get_slice("table")

    def gather(self, rows: np.ndarray, row_bytes: int) -> Any:
        import torch

        wide = row_bytes // ROW_BYTES
        return torch.stack([self.table[i * wide:(i + 1) * wide].view(-1) for i in rows.tolist()])

    def scan(self) -> int:
        import torch

        return _scan_slabs(lambda first, last: self.table[first:last].view(torch.int16).numpy())


class Blosc2(Contender):
    """blosc2 NDArray on disk: zstd level 1, shuffle, blocks of 16 KiB in chunks of 256 KiB."""

    needs = ("blosc2",)

    @classmethod
    def files(cls) -> list[Path]:
        return [bench_folder() / "table.b2nd"]

    @classmethod
    def prepare(cls) -> None:
        (path,) = cls.files()
        if path.exists():
            return
        import blosc2

        how = blosc2.CParams(codec=blosc2.Codec.ZSTD, clevel=1, filters=[blosc2.Filter.SHUFFLE], typesize=2)
        part = path.with_suffix(".part.b2nd")
        blosc2.asarray(raw_table(), urlpath=str(part), mode="w", cparams=how, chunks=(64, ROW_BYTES // 2),
                       blocks=(4, ROW_BYTES // 2))
        part.rename(path)

    def __init__(self) -> None:
        import blosc2

        (path,) = self.files()
        self.table = blosc2.open(str(path), mode="r")

    def gather(self, rows: np.ndarray, row_bytes: int) -> Any:
        if row_bytes == ROW_BYTES:
            return self.table[rows]
        wide = row_bytes // ROW_BYTES
        return np.stack([self.table[i * wide:(i + 1) * wide].reshape(-1) for i in rows.tolist()])

    def scan(self) -> int:
        return _scan_slabs(lambda first, last: self.table[first:last])


def _zarr_path() -> Path:
    return bench_folder() / "table.zarr"


class Tensorstore(Contender):
    """tensorstore over zarr 3: chunks of 64 KiB, blosc (zstd level 1, shuffle), in shards of 4 MiB."""

    needs = ("tensorstore",)

    @classmethod
    def files(cls) -> list[Path]:
        return [_zarr_path()]

    @classmethod
    def prepare(cls) -> None:
        if _zarr_path().exists():
            return
        import tensorstore

        part = _zarr_path().with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        codec = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": 2}
        inner = {"chunk_shape": [CHUNK_ROWS, ROW_BYTES // 2], "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "blosc", "configuration": codec}]}
        shards = {"chunk_shape": [64 * CHUNK_ROWS, ROW_BYTES // 2]}
        metadata = {"shape": [ROWS, ROW_BYTES // 2], "data_type": "uint16",
                    "chunk_grid": {"name": "regular", "configuration": shards},
                    "codecs": [{"name": "sharding_indexed", "configuration": inner}]}
        table = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(part)},
                                  "metadata": metadata, "create": True}).result()
        for first in range(0, ROWS, 4096):
            table[first:first + 4096] = raw_table()[first:first + 4096]
        part.rename(_zarr_path())

    def __init__(self) -> None:
        import tensorstore

        self.table = tensorstore.open({"driver": "zarr3", "recheck_cached_data": False,
                                       "kvstore": {"driver": "file", "path": str(_zarr_path())}}).result()

    def gather(self, rows: np.ndarray, row_bytes: int) -> Any:
        wide = row_bytes // ROW_BYTES
        fine = (rows[:, None] * wide + np.arange(wide)).reshape(-1)
        return self.table[fine].read().result().reshape(len(rows), -1)

    def scan(self) -> int:
        return _scan_slabs(lambda first, last: self.table[first:last].read().result())


class Zarr(Contender):
    """zarr-python over the same files as tensorstore."""

    needs = ("zarr", "tensorstore")
    files = Tensorstore.files
    prepare = Tensorstore.prepare

    def __init__(self) -> None:
        import zarr

        self.table = zarr.open_array(_zarr_path(), mode="r")

    def gather(self, rows: np.ndarray, row_bytes: int) -> Any:
        wide = row_bytes // ROW_BYTES
        fine = (rows[:, None] * wide + np.arange(wide)).reshape(-1)
        return self.table.oindex[fine].reshape(len(rows), -1)

    def scan(self) -> int:
        return _scan_slabs(lambda first, last: self.table[first:last])


def _on_huge_pages(size: int) -> mmap.mmap:
    """Memory that a device writes in few pieces, where the kernel has such pages."""
    buffer = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


class Disk(Contender):
    """The disk itself: uncompressed reads past the page cache, 32 at once, into huge pages."""

    def __init__(self) -> None:
        self.fd = os.open(raw_path(), os.O_RDONLY | os.O_DIRECT)
        self.pool = ThreadPoolExecutor(QUEUE_DEPTH)

    def _read(self, task: tuple[int, mmap.mmap, int, int]) -> None:
        offset, buffer, at, size = task
        got = os.preadv(self.fd, [memoryview(buffer)[at:at + size]], offset)
        if got != size:
            raise OSError(f"{got} of {size} bytes at {offset}")

    def gather(self, rows: np.ndarray, row_bytes: int) -> Any:
        out = _on_huge_pages(len(rows) * row_bytes)
        tasks = [(HEADER_BYTES + int(row) * row_bytes, out, k * row_bytes, row_bytes) for k, row in enumerate(rows)]
        parts = [tasks[i::QUEUE_DEPTH] for i in range(QUEUE_DEPTH)]
        list(self.pool.map(lambda part: [self._read(task) for task in part], parts))
        return np.frombuffer(out, np.uint16).reshape(len(rows), -1)

    def scan(self) -> int:
        window = QUEUE_DEPTH * 2**20
        out, total = _on_huge_pages(window), 0
        for first in range(0, BENCH_BYTES, window):
            size = min(window, BENCH_BYTES - first)
            pieces = [(HEADER_BYTES + first + at, out, at, min(2**20, size - at)) for at in range(0, size, 2**20)]
            list(self.pool.map(self._read, pieces))
            total += _sum(np.frombuffer(out, np.uint8)[:size])
        return total % 2**64


OURS: dict[str, type[Contender]] = {
    "h3store": H3Store, 'h3store, access="random"': H3StoreRandom, 'h3store, access="stream"': H3StoreStream}
PEERS: dict[str, type[Contender]] = {
    "numpy.memmap": NumpyMemmap, "torch.from_file": TorchFromFile, "safetensors": Safetensors, "blosc2": Blosc2,
    "tensorstore": Tensorstore, "zarr": Zarr}
LIMIT = "disk, 32 reads at once"
CONTENDERS: dict[str, type[Contender]] = {**OURS, **PEERS, LIMIT: Disk}


def installed(name: str) -> bool:
    """Whether a contender can be measured here."""
    return all(importlib.util.find_spec(module) for module in CONTENDERS[name].needs)


def prepare(name: str) -> None:
    """Makes the table and this contender's form of it."""
    prepare_raw()
    CONTENDERS[name].prepare()


assert BIG_ROW_BYTES % ROW_BYTES == 0
