"""A store under everything at once: writers, commits, evictions, forks, appends, compactions of the file and of memory,
a reader in another process. `python -m tests.fault.soak --seconds 600` prints what it did; a wrong byte ends it with 1.

Every row says which version it is and follows from (row, version), so that any reader can tell a right row from a
wrong, torn or stale one."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import h3store

ROWS, COLUMNS = 3000, 512  # 4 KiB a row of int64 in chunks of 64 KiB: 12 MiB, under 2 MiB of budget
COMPACT_MEMORY = Path("/proc/sys/vm/compact_memory")


def expected(row: int, version: int) -> torch.Tensor:
    """A row as it must be: (COLUMNS,) int64, its number and version first, the rest after a linear congruence."""
    seed = (row * 1_000_003 + version) * 2862933555777941757 % 2**62
    values = torch.arange(COLUMNS, dtype=torch.int64) * 6364136223846793005 + seed  # wraps
    values[0], values[1] = row, version
    return values if version else torch.zeros(COLUMNS, dtype=torch.int64)


def in_child(work: Callable[..., str], *args: object) -> None:
    """Ends a forked child: 0 if all was right."""
    status = 3
    try:
        fault = work(*args)
        status = 1 if fault else 0
        os.write(2, f"{fault}\n".encode() if fault else b"")
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(status)


class Versions:
    """What is committed at least, shared with the other processes."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, ROWS * 4)

    def get(self, row: int) -> int:
        return struct.unpack_from("<I", self.memory, row * 4)[0]

    def set(self, row: int, version: int) -> None:
        struct.pack_into("<I", self.memory, row * 4, version)


def wrong(row: int, held: torch.Tensor, at_least: int, at_most: int | None = None) -> str:
    """Says what is wrong with a row, or nothing."""
    version = int(held[1])
    if version < at_least or (at_most is not None and version > at_most):
        return f"row {row} is of version {version}; {at_least} to {at_most} were due"
    if not torch.equal(held, expected(row, version)):
        bad = int((held != expected(row, version)).nonzero()[0])
        return f"row {row} of version {version} is wrong from element {bad} on"
    return ""


class Soak:
    def __init__(self, folder: Path, seconds: float) -> None:
        self.path = folder / "soak.h3"
        self.end = time.monotonic() + seconds
        self.committed = Versions()
        self.written = [0] * ROWS
        self.stripes = [threading.Lock() for _ in range(2)]
        self.faults: list[str] = []
        self.counts = dict.fromkeys(["writes", "commits", "reads", "forks", "appends", "compactions"], 0)

    def run(self) -> dict[str, object]:
        with h3store.open(self.path, mode="w", ddr_bytes="2MiB") as store:
            store.create("table", (ROWS, COLUMNS), torch.int64)
            store.create("log", (0, 4), torch.int64)
            store.commit()
            reader = os.fork()
            if reader == 0:
                in_child(self.read_elsewhere)
            self.store, self.table = store, store["table"]
            jobs = [
                *(threading.Thread(target=self.guard, args=(self.write, stripe)) for stripe in range(2)),
                threading.Thread(target=self.guard, args=(self.read,)),
                threading.Thread(target=self.guard, args=(self.commit,)),
                threading.Thread(target=self.guard, args=(self.compact_memory,)),
            ]
            for job in jobs:
                job.start()
            self.guard(self.fork)
            for job in jobs:
                job.join()
            _, status = os.waitpid(reader, 0)
            if status:
                self.faults.append(f"the reading process ended with status {status}")
            stats = store.stats()
        loaded = h3store.load(self.path, ddr_bytes="2MiB")
        for row in range(ROWS):
            if fault := wrong(row, loaded["table"][row].clone(), self.written[row], self.written[row]):
                self.faults.append(f"after the end: {fault}")
        seen = {name: stats[name] for name in ("evictions", "write_backs")}
        return {**self.counts, **seen, "faults": self.faults}

    def guard(self, work: object, *args: object) -> None:
        try:
            work(*args)  # type: ignore[operator]
        except BaseException as error:
            self.faults.append(f"{getattr(work, '__name__', work)}: {type(error).__name__}: {error}")

    def going(self) -> bool:
        return time.monotonic() < self.end and not self.faults

    def write(self, stripe: int) -> None:
        rng = random.Random(stripe)
        while self.going():
            with self.stripes[stripe]:
                for _ in range(20):
                    row = rng.randrange(stripe, ROWS, 2)
                    self.written[row] += 1
                    self.table[row] = expected(row, self.written[row])
                    self.counts["writes"] += 1
            time.sleep(0.0005)

    def read(self) -> None:
        rng = random.Random(9)
        while self.going():
            stripe = rng.randrange(2)
            rows = [rng.randrange(stripe, ROWS, 2) for _ in range(8)]
            with self.stripes[stripe]:
                one_by_one = rng.random() < 0.5
                held = torch.stack([self.table[r] for r in rows]) if one_by_one else self.table[torch.tensor(rows)]
                due = [self.written[row] for row in rows]
            for row, values, version in zip(rows, held, due, strict=True):
                if fault := wrong(row, values, version, version):
                    self.faults.append(f"in process: {fault}")
            self.counts["reads"] += 8

    def commit(self) -> None:
        rounds = 0
        while self.going():
            time.sleep(0.2)
            rounds += 1
            with self.stripes[0], self.stripes[1]:
                self.store.append("log", torch.full((3, 4), rounds, dtype=torch.int64))
                self.counts["appends"] += 1
                self.store.commit()
                due = list(self.written)
            for row, version in enumerate(due):
                self.committed.set(row, version)
            self.counts["commits"] += 1
            if rounds % 25 == 0:
                with self.stripes[0], self.stripes[1]:
                    self.store.compact()
                    self.table = self.store["table"]
                self.counts["compactions"] += 1

    def compact_memory(self) -> None:
        while self.going():
            time.sleep(0.5)
            if os.access(COMPACT_MEMORY, os.W_OK):
                COMPACT_MEMORY.write_text("1")

    def fork(self) -> None:
        """Children read what the parent saw, while the parent's threads go on."""
        rng = random.Random(7)
        while self.going():
            time.sleep(0.3)
            rows = [rng.randrange(ROWS) for _ in range(20)]
            with self.stripes[0], self.stripes[1]:
                due = [self.written[row] for row in rows]
                child = os.fork()
            if child == 0:
                in_child(self.check_all, rows, due)
            _, status = os.waitpid(child, 0)
            if status:
                self.faults.append(f"a forked child read a wrong row (status {status})")
            self.counts["forks"] += 1

    def check_all(self, rows: list[int], due: list[int]) -> str:
        found = (wrong(row, self.table[row].clone(), v, v) for row, v in zip(rows, due, strict=True))
        return next(filter(None, found), "")

    def read_elsewhere(self) -> str:
        """Another process: each store it opens holds what was committed before, whole."""
        rng = random.Random(3)
        while time.monotonic() < self.end:
            rows = [rng.randrange(ROWS) for _ in range(40)]
            due = [self.committed.get(row) for row in rows]
            table = h3store.load(self.path, ddr_bytes="1MiB")["table"]
            for row, version in zip(rows, due, strict=True):
                if fault := wrong(row, table[row].clone(), version):
                    return f"reading process: {fault}"
            time.sleep(0.02)
        return ""


def soak(seconds: float, folder: Path | None = None) -> dict[str, object]:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        return Soak(Path(scratch), seconds).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    result = soak(parser.parse_args().seconds)
    print(json.dumps(result, indent=2))
    raise SystemExit(bool(result["faults"]))
