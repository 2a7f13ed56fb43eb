"""The whole comparison in one command: every work of this folder with its peers, in fresh processes, on the same data.

    python -m asv_bench.benchmarks.peers [--docs] [--processes 3] [--json build/bench/peers.json] [--only reads,codec]

Prints as it goes, then the table; writes JSON; with --docs also docs/benchmarks.md and its plot. H3STORE_BENCH_BYTES
(1GiB) makes it smaller, H3STORE_BENCH_DIR (build/bench) says where its files lie, H3STORE_CACHE where the demo's
model is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import codec, offload, reads, writes
from . import paging as pager
from .common import BENCH_BYTES, PROCESSES, ROOT, fresh_medians
from .contenders import LIMIT, OURS, PEERS

PACKAGES = ("torch", "numpy", "blosc2", "tensorstore", "zarr", "zipnn", "zstandard", "safetensors", "accelerate")


@dataclass
class Row:
    """One work: what must be reached, and what each contender did.

    Attributes:
        figures: contender -> median, in unit; the first is ours.
        must: the bound in words; met: whether ours is within it.
        limit: what physics allows here, in unit, measured in the same run; None where nothing was measured.
        published: figures of peers that cannot be installed here, as words.
    """

    work: str
    unit: str
    lower_is_better: bool
    figures: dict[str, float]
    must: str
    met: bool
    limit: float | None = None
    limit_name: str = ""
    published: str = ""
    peers: list[str] = field(default_factory=list)

    @property
    def ours(self) -> float:
        """The first figure."""
        return next(iter(self.figures.values()))

    @property
    def best_peer(self) -> str | None:
        """Name of the best one; None when nobody else does this."""
        found = {name: self.figures[name] for name in self.peers if name in self.figures}
        if not found:
            return None
        return (min if self.lower_is_better else max)(found, key=found.__getitem__)

    @property
    def times_better(self) -> float | None:
        """How many times better than the best peer ours is; below 1: worse."""
        if self.best_peer is None:
            return None
        theirs = self.figures[self.best_peer]
        return theirs / self.ours if self.lower_is_better else self.ours / theirs

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self) | {"ours": self.ours, "best_peer": self.best_peer, "times_better": self.times_better}


def _of(results: dict[str, dict[str, Any]], work: str, change: Callable[[float], float] = lambda x: x
        ) -> dict[str, float]:
    return {name: change(found[work]["median"]) for name, found in results.items() if work in found}


def read_rows(results: dict[str, dict[str, Any]]) -> list[Row]:
    """Rows of the table from reads.measure_all."""
    made, peers = [], [name for name in PEERS if name in results]

    def row(title: str, unit: str, figures: dict[str, float], ours: str, lower: bool, bound: float, must: str,
            against: str | None = None, **more: Any) -> None:
        limit = figures.pop(LIMIT, None)
        figures = {ours: figures[ours]} | {k: v for k, v in figures.items() if k != ours}
        new = Row(title, unit, lower, figures, must, False, limit, peers=peers, **more)
        theirs = figures[against or new.best_peer or ours]
        new.met = new.ours <= bound * theirs if lower else new.ours >= bound * theirs
        made.append(new)

    disk = "the disk, 32 reads at once, uncompressed"
    ours, random, stream = OURS
    row(f"{reads.GATHERED_ROWS:,} random rows of 4 KiB, cold", "s", _of(results, reads.ROWS_4K), ours, True, 0.45,
        "<= 0.45 x the best peer", limit_name=disk)
    row('the same, saved with access="random"', "s", _of(results, reads.ROWS_4K), random, True, 0.33,
        "<= 0.33 x the best peer", limit_name=disk)
    row(f"{reads.GATHERED_ROWS:,} random rows of 64 KiB, cold", "s", _of(results, reads.ROWS_64K), ours, True, 0.6,
        "<= 0.6 x the best peer", limit_name=disk)
    row("all in order, cold", "MB/s", _of(results, reads.SEQUENTIAL, lambda s: BENCH_BYTES / s / 1e6), ours, False, 1.3,
        ">= 1.3 x numpy.memmap", "numpy.memmap", limit_name=f"{disk}; times the ratio for compressed files")
    row('the same, saved with access="stream"', "MB/s", _of(results, reads.SEQUENTIAL, lambda s: BENCH_BYTES / s / 1e6),
        stream, False, 1.3, ">= 1.3 x numpy.memmap", "numpy.memmap",
        limit_name=f"{disk}; times the ratio for compressed files")
    row("rows of 4 KiB, all in memory", "us a row", _of(results, reads.WARM), ours, True, float("inf"),
        "<= 1.5 us a row", published="UMap 1.2 us")
    made[-1].met = made[-1].ours <= 1.5
    return made


def write_rows(results: dict[str, dict[str, Any]]) -> list[Row]:
    """Rows of the table from writes.measure_all."""
    own = {work: found["median"] for work, found in results["h3store"].items()}
    per_row = _of(results, writes.WRITES)
    return [
        Row(f"{writes.WRITTEN_ROWS:,} random row writes of 4 KiB, one commit", "us a row", True, per_row,
            "<= 300 us a row, atomic", per_row["h3store"] <= 300, published="UMap 170 us (not crash-safe)",
            peers=[name for name in per_row if name != "h3store"]),
        Row("file growth over bytes written, before compaction", "x", True, {"h3store": own[writes.AMPLIFICATION]},
            "<= 3", own[writes.AMPLIFICATION] <= 3),
        Row("commit of one row", "ms", True, {"h3store": own[writes.COMMIT]}, "<= 2 x one fdatasync",
            own[writes.COMMIT_RATIO] <= 2, own[writes.SYNC], "one fdatasync of 4 KiB, in turn"),
    ]


def codec_rows(results: dict[str, dict[str, Any]]) -> list[Row]:
    """Rows of the table from codec.measure_all."""
    figures = {"h3store" if name == "EXPNIBBLE" else name: found for name, found in results.items()}
    figures = {name: found for name, found in figures.items() if name not in ("BYTEPLANE", "ZSTD", "RAW")}
    made = []
    for work, what, unit, least in (("ratio of trained bfloat16 weights, chunks of 64 KiB", "ratio", "x", 1.48),
                                    ("encode, one core", "encode", "GB/s", 0.8),
                                    ("decode, one core", "decode", "GB/s", 2.0)):
        values = _of(figures, what)
        values = {"h3store": values["h3store"]} | values
        made.append(Row(work, unit, False, values, f">= {least:g}", values["h3store"] >= least,
                        peers=[name for name in values if name != "h3store"]))
    return made


def pager_rows(processes: int) -> list[Row]:
    """Faults and peak memory, measured here."""
    faults = {k: v["median"] for k, v in fresh_medians("paging", ["faults"], processes).items()}
    peak = fresh_medians("paging", ["peak"], processes)[pager.PEAK_OVER]["median"]
    theirs = fresh_medians("paging", ["memmap-peak"], 1)[pager.PEAK_OVER]["median"]
    handler = "a handler thread 90 to 100 us"
    return [
        Row("fault of 64 KiB with eviction, raw source in memory", "us", True, {"h3store": faults[pager.FAULT_MEMORY]},
            "<= 25 us", faults[pager.FAULT_MEMORY] <= 25, published=handler),
        Row("fault of 64 KiB with eviction, zeros", "us", True, {"h3store": faults[pager.FAULT_ZEROS]}, "", True),
        Row("fault of 64 KiB with eviction, with decode", "us", True, {"h3store": faults[pager.FAULT_DECODE]},
            "<= 60 us", faults[pager.FAULT_DECODE] <= 60, published=handler),
        Row("peak resident over a budget of 32 MiB, 2 threads on 20 budgets", "MiB", True,
            {"h3store": peak, "numpy.memmap": theirs}, "<= 32 MiB", peak <= 32, peers=["numpy.memmap"],
            published="UMap holds a budget of 256 MiB at 242"),
    ]


def forward_rows(results: dict[str, dict[str, Any]]) -> list[Row]:
    """Rows of the table from offload.measure_all."""
    made = []
    for work, title, must in ((offload.FORWARD, "forward of a model twice the budget, files cold", ">= 3 x faster"),
                              (offload.PASSIVE, "the same, both with OMP_WAIT_POLICY=passive", ">= 3 x faster"),
                              (offload.WARM_FORWARD, "the same, files in the page cache", "")):
        figures = _of(results, work)
        row = Row(title, "s", True, figures, must, True, peers=["accelerate"])
        row.met = not must or (row.times_better or 0) >= 3
        made.append(row)
    return made


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text()
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")]
    memory = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) / 2**20
    return {"processor": f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}",
            "memory": f"{memory:.0f} GiB", "kernel": platform.release(), "python": platform.python_version()}


def commit() -> str:
    """The commit measured, and whether files differ from it."""
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (
        ", with changes" if git("status", "--porcelain", "--untracked-files=no", ":!docs") else "")


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


AREAS: dict[str, Callable[[int], list[Row]]] = {
    "reads": lambda processes: read_rows(reads.measure_all(say, processes=processes)),
    "codec": lambda processes: codec_rows(codec.measure_all(processes)),
    "writes": lambda processes: write_rows(writes.measure_all(say, processes=processes)),
    "pager": pager_rows,
    "offload": lambda processes: forward_rows(offload.measure_all(say, processes=processes)),
}


def say(text: str) -> None:
    """Progress."""
    print(text, flush=True)


def shown(value: float | None) -> str:
    """Three digits or so."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def print_table(rows: list[Row]) -> None:
    """What the run found, a line a work."""
    say(f"{'':4}{'work':62}{'must':26}{'ours':>16}  best peer")
    for row in rows:
        peer = f"{row.best_peer} {shown(row.figures[row.best_peer])}, ours {row.times_better:.2f} x better" \
            if row.best_peer else row.published
        say(f"{'ok' if row.met else 'MISS':4} {row.work:61}{row.must:26}{shown(row.ours):>9} {row.unit:8} {peer}")


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=PROCESSES, help="fresh processes for each figure (default 3)")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench" / "peers.json")
    parser.add_argument("--only", default=",".join(AREAS), help="areas, comma-separated")
    parser.add_argument("--docs", action="store_true", help="write docs/benchmarks.md and its plot")
    options = parser.parse_args()
    started, rows = time.time(), []
    for area in options.only.split(","):
        say(f"{area} ({time.time() - started:.0f} s so far)")
        rows += AREAS[area](options.processes)
    report = {"machine": machine(), "commit": commit(), "date": time.strftime("%Y-%m-%d"), "versions": versions(),
              "bytes": BENCH_BYTES, "processes": options.processes, "seconds": round(time.time() - started),
              "rows": [row.as_dict() for row in rows]}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print_table(rows)
    say(f"{report['seconds']} s; {options.json}; commit {report['commit']}")
    if options.docs:
        from asv_bench.report import write

        say(f"wrote {', '.join(str(path) for path in write(report, ROOT / 'docs'))}")


if __name__ == "__main__":
    main()
