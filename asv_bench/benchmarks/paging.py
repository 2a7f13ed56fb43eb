"""The pager alone: what a fault costs when each one evicts a block, and what memory a process takes while a tensor of
20 budgets is scanned and written by two threads.

    python -m asv_bench.benchmarks.paging faults|peak    one process; prints its figures as JSON
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from .common import ROOT, Scratch, fresh_medians, named, print_result

MiB = 2**20
BLOCK = 65536
FAULT_BYTES, FAULT_BUDGET, PASSES = 128 * MiB, 16 * MiB, 5
PEAK_BUDGET, TIMES_THE_BUDGET = 32 * MiB, 20
FAULT_ZEROS, FAULT_MEMORY, FAULT_DECODE = "fault, zeros", "fault, memory source", "fault, decode"
PEAK_OVER = "peak resident over budget"


def _touch(store: Any) -> float:
    """Median over passes of microseconds a fault: one byte of each block, in random order: nothing is read ahead.

    Processor time of the thread that touches, which does all of the work: other processes do not count.

    Raises:
        RuntimeError: blocks came in otherwise than by faults that evict one each.
    """
    import torch

    data = store["t"].view(torch.uint8).numpy().reshape(-1)
    picked = np.random.default_rng(2).permutation(FAULT_BYTES // BLOCK) * BLOCK
    times = []
    for _ in range(PASSES):
        before, start = store.stats(), time.thread_time()
        data.take(picked)
        seconds, after = time.thread_time() - start, store.stats()
        faults, fills, evictions = (after[key] - before[key] for key in ("faults", "fills", "evictions"))
        by_chance = len(picked) // 100  # touches that look like a scan, for a moment
        if times and not (fills - by_chance <= faults <= fills == evictions > 0.5 * len(picked)):
            raise RuntimeError(f"{faults} faults, {fills} fills, {evictions} evictions for {len(picked)} touches")
        times.append(seconds / max(fills, 1))
    return statistics.median(times[1:]) * 1e6


def _weights() -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return (torch.randn(FAULT_BYTES // 2, generator=generator) * 0.02).to(torch.bfloat16)


def faults() -> dict[str, float]:
    """Microseconds a fault of 64 KiB, one thread, every fault evicts. Archives lie in memory: no disk."""
    import torch

    import h3store

    torch.set_num_threads(1)
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "t.h3"
        for work, compression in ((FAULT_MEMORY, "none"), (FAULT_DECODE, "auto")):
            h3store.save({"t": _weights()}, path, compression=compression)
            times[work] = _touch(h3store.open(path, ddr_bytes=FAULT_BUDGET))
        with h3store.open(path, mode="w", ddr_bytes=FAULT_BUDGET) as store:
            store.create("t", (FAULT_BYTES,), torch.uint8)
            times[FAULT_ZEROS] = _touch(store)
    return times


def _resident(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024


def peak() -> dict[str, float]:
    """MiB of peak resident memory over the budget, two threads scanning and writing 20 times the budget."""
    import torch

    import h3store

    scratch, rows = Scratch(ROOT / "build"), 1024
    with h3store.open(scratch.path / "warm.h3", mode="w", ddr_bytes="4MiB") as store:  # what first use costs
        store.create("t", (4 * MiB,), torch.uint8)[:] = 1
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    store = h3store.open(scratch.path / "t.h3", mode="w", ddr_bytes=PEAK_BUDGET)
    table = store.create("t", (TIMES_THE_BUDGET * PEAK_BUDGET // (2 * rows), rows), torch.bfloat16)
    failed: list[BaseException] = []

    def work(half: Any, seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for part in half.split(256):
                part.copy_(torch.randn(part.shape, generator=generator))
            for part in half.split(256):
                part.sum()
                part[::16] += 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(half, seed)) for seed, half in enumerate(table.chunk(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.commit()
    used = _resident("VmHWM") - before
    written = store.stats()["write_backs"] * BLOCK
    store.close()
    scratch.close()
    if failed or written < TIMES_THE_BUDGET * PEAK_BUDGET:
        raise RuntimeError(f"the work was not done: {failed}, {written} bytes written back")
    return {PEAK_OVER: (used - PEAK_BUDGET) / MiB}


def memmap_peak() -> dict[str, float]:
    """The same work on numpy.memmap: nothing bounds what stays resident."""
    scratch = Scratch(ROOT / "build")
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    table = np.memmap(scratch.path / "t", np.uint16, "w+", shape=(TIMES_THE_BUDGET * PEAK_BUDGET // 2048, 1024))

    def work(half: np.ndarray) -> None:
        for first in range(0, len(half), 256):
            half[first:first + 256] = first % 65521
        for first in range(0, len(half), 256):
            half[first:first + 256].sum()
            half[first:first + 256:16] += 1

    threads = [threading.Thread(target=work, args=(half,)) for half in np.array_split(table, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = _resident("VmHWM") - before
    scratch.close()
    return {PEAK_OVER: (used - PEAK_BUDGET) / MiB}


MEASURES = {"faults": faults, "peak": peak, "memmap-peak": memmap_peak}


class Faults:
    """One fault of 64 KiB in the thread that touches, one eviction each, no disk."""

    timeout = 600

    def setup_cache(self) -> dict[str, Any]:
        """One fresh process."""
        return fresh_medians("paging", ["faults"], processes=1)

    @named("Fault of 64 KiB with eviction: a block of zeros", "us")
    def track_fault_zeros(self, results: dict[str, Any]) -> float:
        """Nothing is read."""
        return results[FAULT_ZEROS]["median"]

    @named("Fault of 64 KiB with eviction: raw bytes in memory, checked", "us")
    def track_fault_memory(self, results: dict[str, Any]) -> float:
        """Read, copied, its check compared."""
        return results[FAULT_MEMORY]["median"]

    @named("Fault of 64 KiB with eviction: decoded bfloat16", "us")
    def track_fault_decode(self, results: dict[str, Any]) -> float:
        """Read, decoded, its check compared."""
        return results[FAULT_DECODE]["median"]


class Peak:
    """Memory of a process beside its budget of 32 MiB while two threads scan and write a tensor of 640 MiB."""

    params = [["h3store", "numpy.memmap"]]  # noqa: RUF012  asv reads it as a plain class attribute
    param_names = ["contender"]  # noqa: RUF012
    timeout = 600

    @named("Peak resident bytes over the budget, 2 threads on 20 budgets", "MiB")
    def track_peak(self, name: str) -> float:
        """Of the process, by VmHWM; what Python and torch took before is left out."""
        work = "peak" if name == "h3store" else "memmap-peak"
        return fresh_medians("paging", [work], processes=1)[PEAK_OVER]["median"]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print_result(MEASURES[sys.argv[1]]())
