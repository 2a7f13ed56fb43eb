"""Writing rows in place: many random rows of 4 KiB and one commit, and the price of a commit of one row.

Each process works on a copy of the table; what it wrote is read back and compared across contenders. blosc2 gets a
tenth of the rows, for it takes ten milliseconds a row.

    python -m asv_bench.benchmarks.writes NAME    one contender, one process; prints its times as JSON
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .common import (
    BENCH_BYTES,
    ROW_BYTES,
    ROWS,
    SEED,
    bench_folder,
    fresh_medians,
    measure_each,
    median_of,
    named,
    print_result,
    row_numbers,
)
from .contenders import HEADER_BYTES, Blosc2, H3Store, installed, prepare, raw_path
from .reads import digest

WRITTEN_ROWS = max(100, 2000 * BENCH_BYTES // 2**30)
ONE_ROW_COMMITS = 15
WRITES, AMPLIFICATION, COMMIT, SYNC = "row writes, one commit", "write amplification", "one-row commit", "fdatasync"
COMMIT_RATIO = "one-row commit over fdatasync"


def new_rows(count: int) -> np.ndarray:
    """(count, ROW_BYTES / 2) of uint16: bits of bfloat16 weights, the same in every run."""
    values = np.random.default_rng(SEED + 1).standard_normal((count, ROW_BYTES // 2), np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def compared(rows: np.ndarray) -> np.ndarray:
    """The rows that all contenders wrote alike."""
    return rows[rows != rows[0]]


def copy_of(path: Path) -> Path:
    """A private copy, on the same disk and written out."""
    target = bench_folder() / f"written-{path.name}"
    shutil.copyfile(path, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    return target


def h3store_writes() -> tuple[dict[str, float], dict[str, str]]:
    """Rows one by one, then commit; then commits of one row, each beside one fdatasync of as many bytes."""
    import torch

    import h3store

    path = copy_of(H3Store.path())
    rows, values = row_numbers(WRITTEN_ROWS, ROWS), torch.from_numpy(new_rows(WRITTEN_ROWS)).view(torch.bfloat16)
    store = h3store.open(path, mode="r+", ddr_bytes=H3Store.ddr_bytes)
    table, before = store["table"], path.stat().st_size
    start = time.perf_counter()
    for row, value in zip(rows.tolist(), values, strict=True):
        table[row] = value
    store.commit()
    seconds = time.perf_counter() - start
    grown = path.stat().st_size - before
    commits, syncs = one_row_commits(store, table, values)
    store.close()
    read = h3store.load(path, ddr_bytes=H3Store.ddr_bytes)["table"].index_select(0, torch.from_numpy(compared(rows)))
    path.unlink()
    times = {WRITES: seconds / WRITTEN_ROWS * 1e6, AMPLIFICATION: grown / (WRITTEN_ROWS * ROW_BYTES),
             COMMIT: statistics.median(commits) * 1e3, SYNC: statistics.median(syncs) * 1e3,
             COMMIT_RATIO: statistics.median(commits) / statistics.median(syncs)}
    return times, {WRITES: digest(read)}


def one_row_commits(store: Any, table: Any, values: Any) -> tuple[list[float], list[float]]:
    """Seconds of commits of one row and of bare fdatasyncs, in turn; writes the row that compared() leaves out."""
    commits, syncs = [], []
    first = int(row_numbers(WRITTEN_ROWS, ROWS)[0])
    with (scratch := bench_folder() / "sync").open("wb", buffering=0) as file:
        for i in range(ONE_ROW_COMMITS):
            start = time.perf_counter()
            table[first] = values[1 + i % 8]
            store.commit()
            commits.append(time.perf_counter() - start)
            file.write(os.urandom(ROW_BYTES))
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            syncs.append(time.perf_counter() - start)
    scratch.unlink()
    return commits, syncs


def memmap_writes() -> tuple[dict[str, float], dict[str, str]]:
    """numpy.memmap, one flush: not atomic, a crash leaves any mixture of rows."""
    path = copy_of(raw_path())
    table = np.memmap(path, np.uint16, "r+", HEADER_BYTES, (ROWS, ROW_BYTES // 2))
    rows, values = row_numbers(WRITTEN_ROWS, ROWS), new_rows(WRITTEN_ROWS)
    start = time.perf_counter()
    for row, value in zip(rows.tolist(), values, strict=True):
        table[row] = value
    table.flush()
    seconds = time.perf_counter() - start
    output = digest(table[compared(rows)])
    del table
    path.unlink()
    return {WRITES: seconds / WRITTEN_ROWS * 1e6}, {WRITES: output}


def blosc2_writes() -> tuple[dict[str, float], dict[str, str]]:
    """blosc2 in place: each row is on its way to the file when the assignment returns; nothing is synced."""
    import blosc2

    path = copy_of(Blosc2.files()[0])
    table, count = blosc2.open(str(path), mode="a"), WRITTEN_ROWS // 10
    rows, values = row_numbers(WRITTEN_ROWS, ROWS)[:count], new_rows(count)
    start = time.perf_counter()
    for row, value in zip(rows.tolist(), values, strict=True):
        table[row] = value
    seconds = time.perf_counter() - start
    path.unlink()
    return {WRITES: seconds / count * 1e6}, {}


WRITERS = {"h3store": h3store_writes, "numpy.memmap": memmap_writes, "blosc2": blosc2_writes}


def measure_all(say: Callable[[str], None] = lambda text: None, processes: int | None = None
                ) -> dict[str, dict[str, Any]]:
    """{contender: {work: median, all, output}}; raises RuntimeError when two of them read back different rows."""
    results = measure_each("writes", [name for name in WRITERS if installed(name)], prepare, say, processes)
    if len({found[WRITES]["output"] for found in results.values()} - {""}) > 1:
        raise RuntimeError(f"contenders read back different rows: {results}")
    return results


class Writes:
    """Random rows of 4 KiB written in place into the stored table."""

    params = [list(WRITERS)]  # noqa: RUF012  asv reads it as a plain class attribute
    param_names = ["contender"]  # noqa: RUF012
    timeout = 1200

    def setup_cache(self) -> dict[str, dict[str, Any]]:
        """One fresh process for each."""
        return measure_all(processes=1)

    @named(f"{WRITTEN_ROWS:,} random row writes and one commit", "us a row")
    def track_row_writes(self, results: dict[str, dict[str, Any]], name: str) -> float:
        """h3store: atomic and durable; numpy.memmap: one msync; blosc2: not synced."""
        return median_of(results, name, WRITES)


class Commits:
    """What one commit costs."""

    timeout = 1200

    def setup_cache(self) -> dict[str, Any]:
        """One fresh process."""
        prepare("h3store")
        return fresh_medians("writes", ["h3store"], processes=1)

    @named("Commit of one changed row", "ms")
    def track_one_row_commit(self, results: dict[str, Any]) -> float:
        """One wait for the disk, and what was changed compared and saved, however much is resident."""
        return results[COMMIT]["median"]

    @named("Commit of one changed row, in fdatasyncs of 4 KiB", "fdatasyncs")
    def track_one_row_commit_ratio(self, results: dict[str, Any]) -> float:
        """Measured in turn."""
        return results[COMMIT_RATIO]["median"]

    @named("File growth over bytes written, random rows of 4 KiB", "bytes/byte")
    def track_write_amplification(self, results: dict[str, Any]) -> float:
        """Before any compaction; index and tables included."""
        return results[AMPLIFICATION]["median"]


if __name__ == "__main__":
    print_result(*WRITERS[sys.argv[1]]())
