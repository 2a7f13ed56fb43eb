"""TieredTensor: reads of resident blocks against a plain tensor, and scans of a tensor larger than its budget."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

import h3store

from .common import TENSOR_BYTES, Scratch, named, seeded

ROW = 1024
ROWS = TENSOR_BYTES // (4 * ROW)
GATHERED_ROWS = 2000


def stored(scratch: Scratch) -> str:
    """An archive with one float32 tensor of TENSOR_BYTES; returns its path."""
    path = str(scratch.path / "tensor.h3")
    h3store.save({"t": seeded((ROWS, ROW))}, path)
    return path


class Warm:
    """The same operation on a TieredTensor that is wholly resident and on a plain copy of it."""

    params = ["tiered", "plain"]  # noqa: RUF012  asv reads it as a plain class attribute
    param_names = ["tensor"]  # noqa: RUF012

    def setup(self, kind: str) -> None:
        """Reads the tensor once."""
        self.scratch = Scratch()
        self.store = h3store.open(stored(self.scratch), mode="r", ddr_bytes=2 * TENSOR_BYTES)
        tiered = self.store["t"]
        plain = tiered.as_subclass(torch.Tensor).clone()
        self.both = {"tiered": tiered, "plain": plain}
        self.tensor = self.both[kind]
        self.vector = seeded((ROW,))
        self.index = torch.randint(0, ROWS, (GATHERED_ROWS,), generator=torch.Generator().manual_seed(5))
        self.tensor.sum()

    def teardown(self, kind: str) -> None:
        """Removes the archive."""
        self.store.close()
        self.scratch.close()

    @named("Sum of a resident tensor of 64 MiB")
    def time_warm_sum(self, kind: str) -> None:
        """Every element once, in order."""
        self.tensor.sum()

    @named("Resident matrix of 64 MiB times a vector")
    def time_warm_matmul(self, kind: str) -> None:
        """Matrix times vector."""
        self.tensor @ self.vector

    @named("2,000 random rows of a resident tensor")
    def time_warm_gather(self, kind: str) -> None:
        """GATHERED_ROWS random rows."""
        self.tensor.index_select(0, self.index)


class Small:
    """What an operation costs when its tensor is so small, and resident, that nothing else does."""

    params = (["row", "slice", "view", "shape", "add", "rows"], ["tiered", "plain"])
    param_names = ["operation", "tensor"]  # noqa: RUF012

    def setup(self, name: str, kind: str) -> None:
        """Reads the tensor once."""
        self.warm = Warm()
        self.warm.setup(kind)
        tensor, index = self.warm.tensor, self.warm.index[:10]
        corner = tensor[:4, :4]
        self.run = {
            "row": lambda: tensor[7], "slice": lambda: tensor[3:9], "view": lambda: tensor.view(-1),
            "shape": lambda: tensor.shape, "add": lambda: corner + corner,
            "rows": lambda: tensor.index_select(0, index),
        }[name]

    def teardown(self, name: str, kind: str) -> None:
        """Removes the archive."""
        self.warm.teardown(kind)

    @named("One small operation on a resident tensor")
    def time_warm_small(self, name: str, kind: str) -> None:
        """A row or a slice as a view, a sum of 16 elements, a gather of 10 rows."""
        self.run()


class WarmRatio:
    """Time on the resident TieredTensor over time on the plain one: 1.0 is no cost."""

    params = ["sum", "matmul", "gather"]  # noqa: RUF012
    param_names = ["operation"]  # noqa: RUF012

    @named("Resident TieredTensor over plain tensor, time", "x")
    def track_warm_read_ratio(self, name: str) -> float:
        """Best of many alternating runs of each, so that a slower moment of the machine meets both."""
        bench = Warm()
        bench.setup("tiered")
        try:
            operation = getattr(bench, f"time_warm_{name}")
            best = {"tiered": float("inf"), "plain": float("inf")}
            for _ in range(40):
                for kind in best:
                    bench.tensor = bench.both[kind]
                    best[kind] = min(best[kind], seconds(lambda: operation("")))
            return best["tiered"] / best["plain"]
        finally:
            bench.teardown("tiered")


class Cold:
    """A tensor of 8 times the budget. Cold: opened anew, its file's pages dropped from the page cache."""

    number = 1
    warmup_time = 0
    repeat = 3
    params = [2, 8]  # noqa: RUF012
    param_names = ["times_the_budget"]  # noqa: RUF012

    def setup_cache(self) -> str:
        """One archive for all runs; asv keeps the current folder until they are done."""
        path = os.path.abspath("tensor.h3")
        h3store.save({"t": seeded((ROWS, ROW))}, path)
        return path

    def setup(self, path: str, times: int) -> None:
        """Opens the archive with nothing resident."""
        drop_pages(path)
        self.store = h3store.open(path, mode="r", ddr_bytes=TENSOR_BYTES // times)
        self.tensor = self.store["t"]
        self.index = torch.randint(0, ROWS, (GATHERED_ROWS,), generator=torch.Generator().manual_seed(5))

    def teardown(self, path: str, times: int) -> None:
        """Drops what became resident."""
        self.store.close()

    @named("Sum of 64 MiB under a smaller budget, cold")
    def time_cold_scan(self, path: str, times: int) -> None:
        """Every element once, in order."""
        self.tensor.sum()

    @named("2,000 random rows of 64 MiB under a smaller budget, cold")
    def time_cold_gather(self, path: str, times: int) -> None:
        """GATHERED_ROWS random rows, each block fetched when touched."""
        self.tensor.index_select(0, self.index)

    @named("Bytes read from the file for one byte scanned", "bytes/byte")
    def track_scan_bytes_read(self, path: str, times: int) -> float:
        """Bytes read from the archive for one byte of the tensor."""
        self.tensor.sum()
        return self.store.stats()["bytes_read"] / TENSOR_BYTES


def seconds(run: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def drop_pages(path: str) -> None:
    """Asks the kernel to forget a file's cached pages; needs no privilege."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
