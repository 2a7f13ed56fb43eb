"""Sizes and seeds that benchmarks share. They do not depend on the machine, so that results of two machines compare."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from h3store.units import GiB, MiB, parse_bytes

if TYPE_CHECKING:  # contenders that need no torch are measured without waiting for it
    import torch

ROOT = Path(__file__).resolve().parents[2]
SEED = 20240229
# Large against the caches of a processor, small against a machine's memory.
TENSOR_BYTES = 64 * MiB
# The table that contenders store: bfloat16 rows of 4 KiB. Smaller for a quick look, where ratios mean less.
BENCH_BYTES = parse_bytes(os.environ.get("H3STORE_BENCH_BYTES", str(GiB)), "H3STORE_BENCH_BYTES")
ROW_BYTES = 4096
BIG_ROW_BYTES = 65536
ROWS = BENCH_BYTES // ROW_BYTES
GATHERED_ROWS = max(100, 10_000 * BENCH_BYTES // GiB)
PROCESSES = int(os.environ.get("H3STORE_BENCH_PROCESSES", "3"))


def bench_folder() -> Path:
    """Where the table and its copies in every format lie, kept between runs: about six times BENCH_BYTES."""
    folder = Path(os.environ.get("H3STORE_BENCH_DIR") or ROOT / "build" / "bench") / f"{BENCH_BYTES // MiB}MiB"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def row_numbers(count: int, rows: int, seed: int = SEED) -> np.ndarray:
    """Random row numbers, int64, the same in every run."""
    return np.random.default_rng(seed).integers(0, rows, count)


def drop_caches(paths: Iterable[Path]) -> None:
    """Makes files cold: what is dirty is written out, then the kernel forgets their pages; needs no privilege.

    Raises:
        RuntimeError: over 1 % of a file is still cached, so that a time would not be that of a cold file.
    """
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file() and file.stat().st_size:
                _drop(file)


def _drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(fd).st_size
        if size >= MiB and (share := _cached_share(fd, size)) > 0.01:
            raise RuntimeError(f"{path}: {share:.0%} of it is still in the page cache")
    finally:
        os.close(fd)


def _cached_share(fd: int, size: int) -> float:
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(fd, size, mmap.MAP_PRIVATE) as mapped:  # private and writable only so that ctypes takes its address
        pages = -(-size // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)
        status = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), resident)
        del first
        if status:
            raise OSError(ctypes.get_errno(), "mincore")
        return int((np.frombuffer(resident, np.uint8) & 1).sum()) / pages


def fresh(module: str, *arguments: str, **environment: str) -> Any:
    """Runs a module of this folder in a process of its own; returns the JSON of its last line."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", f"asv_bench.benchmarks.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def fresh_medians(module: str, arguments: list[str], processes: int | None = None, **environment: str
                  ) -> dict[str, Any]:
    """Several fresh processes (None: PROCESSES) that each print {"times": {work: number}, "outputs": {work: text}}.

    Returns:
        {work: {"median": float, "all": [float], "output": text}}.

    Raises:
        RuntimeError: two of them got different outputs.
    """
    runs = [fresh(module, *arguments, **environment) for _ in range(processes or PROCESSES)]
    result: dict[str, Any] = {}
    for work in runs[0]["times"]:
        values = [run["times"][work] for run in runs]
        outputs = {run["outputs"].get(work, "") for run in runs}
        if len(outputs) > 1:
            raise RuntimeError(f"{module} {arguments}: outputs of {work} differ from run to run: {outputs}")
        result[work] = {"median": statistics.median(values), "all": values, "output": outputs.pop()}
    return result


def measure_each(module: str, names: Iterable[str], prepare: Callable[[str], object], say: Callable[[str], None],
                 processes: int | None) -> dict[str, dict[str, Any]]:
    """Every contender of a module, its files made first: {contender: {work: median, all, output}}; says each."""
    results = {}
    for name in names:
        prepare(name)
        results[name] = fresh_medians(module, [name], processes)
        say(f"  {name:28}" + "  ".join(f"{work} {found['median']:.3f}" for work, found in results[name].items()))
    return results


def median_of(results: dict[str, dict[str, Any]], name: str, work: str) -> float:
    """What asv tracks; nan, which its pages leave out, where a contender is not installed or has no such work."""
    return float(results.get(name, {}).get(work, {}).get("median", math.nan))


def print_result(times: dict[str, float], outputs: dict[str, str] | None = None) -> None:
    """What fresh_medians reads."""
    print(json.dumps({"times": times, "outputs": outputs or {}}), flush=True)


def named(name: str, unit: str = "") -> Callable[[Any], Any]:
    """How a benchmark is called in the pages of asv, and the unit of a tracked number."""

    def give(function: Any) -> Any:
        function.pretty_name = name
        if unit:
            function.unit = unit
        return function

    return give


def seeded(shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Normal values, the same in every run."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(shape, generator=generator).to(dtype or torch.float32)


def kv_like(nbytes: int, dtype: str, heads: int = 3, head_dim: int = 64) -> np.ndarray:
    """Bytes of values spread like a K cache: each channel has its own scale, tokens follow one another.

    Returns:
        uint8, C-contiguous, nbytes long.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
    values = torch.empty(nbytes, dtype=torch.uint8).view(getattr(torch, dtype))
    scale = torch.exp(torch.randn(heads, head_dim, generator=generator))
    rows = torch.randn(-(-len(values) // scale.numel()), *scale.shape, generator=generator).mul_(scale)
    values.copy_(rows.view(-1)[:len(values)])
    return values.view(torch.uint8).numpy()


class Scratch:
    """A folder for one benchmark's files."""

    def __init__(self, parent: Path | None = None) -> None:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix="h3store-bench-", dir=parent))

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
