"""docs/benchmarks.md and its plot, from the JSON of a run of asv_bench.benchmarks.peers.

    python -m asv_bench.report build/bench/peers.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
COMMAND = "make bench-peers"


def shown(value: float | None) -> str:
    """Three digits or so."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _peer(row: dict[str, Any]) -> str:
    parts = []
    if row["best_peer"]:
        parts.append(f"{row['best_peer']} {shown(row['figures'][row['best_peer']])}")
    if row["published"]:
        parts.append(f"published, not measured here: {row['published']}")
    return "; ".join(parts)


def _limit(row: dict[str, Any]) -> str:
    return f"{shown(row['limit'])} ({row['limit_name']})" if row["limit"] is not None else ""


def _main_table(report: dict[str, Any]) -> list[str]:
    lines = ["| work | must | h3store | best peer | times better | physical limit |", "|---|---|---|---|---|---|"]
    for row in report["rows"]:
        must = row["must"] and row["must"] + ("" if row["met"] else " (**missed**)")
        better = f"{row['times_better']:.2f}" if row["times_better"] else ""
        lines.append(f"| {row['work']} | {must} | {shown(row['ours'])} {row['unit']} | {_peer(row)} | {better} | "
                     f"{_limit(row)} |")
    return lines


def _worse(report: dict[str, Any]) -> list[str]:
    lines = []
    for row in report["rows"]:
        sign = 1 if row["lower_is_better"] else -1
        ahead = [f"{name} {shown(value)}" for name, value in sorted(row["figures"].items(), key=lambda x: sign * x[1])
                 if name in row["peers"] and sign * value < sign * row["ours"]]
        if ahead:
            lines.append(f"- {row['work']}: {shown(row['ours'])} {row['unit']}, behind {', '.join(ahead)}.")
    return lines or ["- Nothing of what was measured in this run."]


def _all_figures(report: dict[str, Any]) -> list[str]:
    lines = ["| work | unit | every contender, best first |", "|---|---|---|"]
    for row in report["rows"]:
        order = sorted(row["figures"].items(), key=lambda item: item[1], reverse=not row["lower_is_better"])
        lines.append(f"| {row['work']} | {row['unit']} | " + " · ".join(f"{n} {shown(v)}" for n, v in order) + " |")
    return lines


def page(report: dict[str, Any]) -> str:
    """The text of docs/benchmarks.md."""
    machine, versions = report["machine"], report["versions"]
    size = report["bytes"] / 2**20
    head = f"""# Benchmarks

Every figure comes from one run of `{COMMAND}`: medians of {report['processes']} fresh processes,
commit {report['commit']}, {report['date']}, {machine['processor']}, {machine['memory']} of memory,
Linux {machine['kernel']}, Python {machine['python']}. {', '.join(f'{k} {v}' for k, v in versions.items())}.
It took {report['seconds']} s.

The table that is read and written has {size:,.0f} MiB of bfloat16 in rows of 4 KiB; the budget of h3store is a quarter
of it. Cold: the files are written out, their pages dropped by POSIX_FADV_DONTNEED, and mincore finds none of them;
opening counts. What each contender read, or read back after writing, is compared with what the others did. zarr reads
a twentieth of the rows, blosc2 writes a tenth; their times are scaled. Codecs work on trained weights (SmolLM2-135M as
bfloat16) in chunks of 64 KiB, one thread; codecs and faults are in processor time. This page and its plot are made
from the run's JSON by `python -m asv_bench.report`.

![Each work with its contenders](benchmarks.svg)
"""
    return "\n".join([head, *_main_table(report), "", "## Where a peer is ahead", "", *_worse(report), "",
                      "## All figures", "", *_all_figures(report), ""])


def plot(report: dict[str, Any], path: Path) -> None:
    """One small chart a work, h3store in colour."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "h3store"
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a fifth of the bytes, and it can be searched
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if len(row["figures"]) > 1]
    columns = 2
    figure, axes = pyplot.subplots(-(-len(rows) // columns), columns, figsize=(11, 2.3 * -(-len(rows) // columns)))
    for axis in axes.flat[len(rows):]:
        axis.set_axis_off()
    for axis, row in zip(axes.flat, rows, strict=False):
        order = sorted(row["figures"].items(), key=lambda item: item[1], reverse=row["lower_is_better"])
        names, values = [name for name, _ in order], [value for _, value in order]
        colours = ["#c8502d" if name.startswith("h3store") else "#8a9bb0" for name in names]
        bars = axis.barh(names, values, color=colours, height=0.7)
        axis.bar_label(bars, [shown(value) for value in values], fontsize=7, padding=2)
        if row["limit"] is not None:
            axis.axvline(row["limit"], color="black", linestyle=":", linewidth=1)
        if min(values) > 0 and max(values) > 20 * min(values):
            axis.set_xscale("log")
        axis.margins(x=0.15)
        better = "less is better" if row["lower_is_better"] else "more is better"
        axis.set_title(f"{row['work']} ({row['unit']}, {better})", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def write(report: dict[str, Any], folder: Path = DOCS) -> list[Path]:
    """Writes page and plot; returns their paths."""
    folder.mkdir(exist_ok=True)
    text, picture = folder / "benchmarks.md", folder / "benchmarks.svg"
    text.write_text(page(report))
    plot(report, picture)
    return [text, picture]


if __name__ == "__main__":
    print(*write(json.loads(Path(sys.argv[1]).read_text())))
