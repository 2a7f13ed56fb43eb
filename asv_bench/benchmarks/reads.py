"""Reading rows of a table larger than the budget: h3store and its peers on the same bytes, each in fresh processes.

Cold: the files' pages are dropped before each work (fsync, then POSIX_FADV_DONTNEED) and mincore confirms that they are
gone. Each work opens its contender anew; opening counts. Outputs are compared across contenders.

    python -m asv_bench.benchmarks.reads NAME    one contender, one process; prints its times as JSON
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .common import (
    BENCH_BYTES,
    BIG_ROW_BYTES,
    GATHERED_ROWS,
    ROW_BYTES,
    drop_caches,
    measure_each,
    median_of,
    named,
    print_result,
    row_numbers,
)
from .contenders import CONTENDERS, LIMIT, SLOW, Contender, H3Store, TorchFromFile, installed, prepare

WARM_ROUNDS = 7
# What is asked of each work, in words; cold works in seconds, warm in microseconds a row.
ROWS_4K, ROWS_64K = "cold rows of 4 KiB", "cold rows of 64 KiB"
SEQUENTIAL, WARM = "sequential, cold", "warm rows of 4 KiB"
UNITS = {ROWS_4K: "s", ROWS_64K: "s", SEQUENTIAL: "s", WARM: "us a row"}


def digest(rows: Any) -> str:
    """Of the bytes of a numpy array or a tensor."""
    if not isinstance(rows, np.ndarray):
        import torch

        rows = rows.contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(np.ascontiguousarray(rows).view(np.uint8), digest_size=8).hexdigest()


def cold_gather(kind: type[Contender], row_bytes: int, rows: np.ndarray) -> tuple[float, Any]:
    """Seconds to open and gather, and the rows."""
    drop_caches(kind.files())
    start = time.perf_counter()
    out = kind().gather(rows, row_bytes)
    return time.perf_counter() - start, out


def cold_scan(kind: type[Contender]) -> tuple[float, int | None]:
    """Seconds to open and read all of it in order, and the sum; None if it has no way to."""
    drop_caches(kind.files())
    start = time.perf_counter()
    total = kind().scan()
    return time.perf_counter() - start, total


def warm_gather(kind: type[Contender], rows: np.ndarray, rounds: int = WARM_ROUNDS) -> tuple[float, Any]:
    """Median microseconds a row when the table is in memory or in the page cache; one round: only these rows."""
    if issubclass(kind, H3Store):
        kind = type("WholeBudget", (kind,), {"ddr_bytes": BENCH_BYTES * 5 // 4})
    table = kind()
    if rounds == 1:
        table.gather(rows, ROW_BYTES)
    elif isinstance(table, TorchFromFile):
        table.table.view(-1)[::ROW_BYTES // 2].sum()
    else:
        table.scan()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        out = table.gather(rows, ROW_BYTES)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / len(rows) * 1e6, out


def measure(name: str) -> tuple[dict[str, float], dict[str, str]]:
    """All works of one contender in this process: times, and what came out."""
    kind, times, outputs = CONTENDERS[name], {}, {}
    scale = 20 if name in SLOW else 1
    load_first(kind)
    for work, row_bytes in ((ROWS_4K, ROW_BYTES), (ROWS_64K, BIG_ROW_BYTES)):
        rows = row_numbers(GATHERED_ROWS, BENCH_BYTES // row_bytes)[:GATHERED_ROWS // scale]
        seconds, out = cold_gather(kind, row_bytes, rows)
        times[work] = seconds * scale
        outputs[work] = digest(out) if scale == 1 else ""
        del out
    seconds, total = cold_scan(kind)
    if total is not None:
        times[SEQUENTIAL], outputs[SEQUENTIAL] = seconds, str(total)
    if name != LIMIT:
        rows = row_numbers(GATHERED_ROWS, BENCH_BYTES // ROW_BYTES)[:GATHERED_ROWS // scale]
        times[WARM], out = warm_gather(kind, rows, WARM_ROUNDS if scale == 1 else 1)
        outputs[WARM] = digest(out) if scale == 1 else ""
    return times, outputs


def load_first(kind: type[Contender]) -> None:
    """Imports and first-use costs of libraries are not what is measured: one small gather goes before."""
    kind().gather(np.arange(8), ROW_BYTES)


def compare_outputs(results: dict[str, dict[str, Any]]) -> None:
    """Raises RuntimeError when two contenders disagree on what they read."""
    for work in UNITS:
        outputs = {name: found[work]["output"] for name, found in results.items() if work in found}
        if len(set(outputs.values()) - {""}) > 1:
            raise RuntimeError(f"{work}: contenders read different bytes: {outputs}")


def measure_all(say: Callable[[str], None] = lambda text: None, names: list[str] | None = None,
                processes: int | None = None) -> dict[str, dict[str, Any]]:
    """Every contender that is installed, in fresh processes: {contender: {work: median, all, output}}."""
    found = [name for name in names or CONTENDERS if installed(name)]
    results = measure_each("reads", found, prepare, say, processes)
    compare_outputs(results)
    return results


class Reads:
    """The same table under each contender; budget of h3store a quarter of it."""

    params = [list(CONTENDERS)]  # noqa: RUF012  asv reads it as a plain class attribute
    param_names = ["contender"]  # noqa: RUF012
    timeout = 1200

    def setup_cache(self) -> dict[str, dict[str, Any]]:
        """One fresh process for each: asv repeats over commits, peers.py over processes."""
        return measure_all(processes=1)

    @named(f"{GATHERED_ROWS:,} random rows of 4 KiB, cold", "s")
    def track_cold_rows_4k(self, results: dict[str, dict[str, Any]], name: str) -> float:
        """Opening the file counts."""
        return median_of(results, name, ROWS_4K)

    @named(f"{GATHERED_ROWS:,} random rows of 64 KiB, cold", "s")
    def track_cold_rows_64k(self, results: dict[str, dict[str, Any]], name: str) -> float:
        """The same table, seen as longer rows."""
        return median_of(results, name, ROWS_64K)

    @named("All of the table in order, cold", "MB/s")
    def track_sequential(self, results: dict[str, dict[str, Any]], name: str) -> float:
        """Raw bytes a second; every word is added up."""
        return BENCH_BYTES / median_of(results, name, SEQUENTIAL) / 1e6

    @named("Random rows of 4 KiB, all of the table in memory", "us a row")
    def track_warm_rows(self, results: dict[str, dict[str, Any]], name: str) -> float:
        """One gather of many rows, index_select where there is one."""
        return median_of(results, name, WARM)


if __name__ == "__main__":
    print_result(*measure(sys.argv[1]))
