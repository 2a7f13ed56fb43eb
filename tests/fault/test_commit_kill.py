"""kill -9 of a writer at random moments: the file opens at the last acknowledged commit, or at the one in flight."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from h3store.archive import Contents, Reader, Writer, verify
from h3store.codec import default_spec

KILLS = 50
TENSORS = 8


def value(step: int) -> np.ndarray:
    """What commit `step` writes: the value of every tensor follows from the commit's number alone."""
    return np.random.default_rng(step).integers(0, 16, 100_000 + 1000 * (step % 50), np.uint8)


def write_for_ever(path: Path, acknowledge: Connection) -> None:
    """Replaces one tensor a commit and says each commit's number once it is durable."""
    with Writer(path, "r+") as writer:
        acknowledge.send(writer.sequence)
        while True:
            step = writer.sequence + 1
            raw = value(step)
            writer.add(f"t{step % TENSORS}", raw, "uint8", raw.shape, default_spec("uint8"), 8192, threads=1)
            writer.metadata["step"] = step
            acknowledge.send(writer.commit())


def run_and_kill(context: Any, path: Path, commits: int, fraction: float) -> int:
    """Lets a writer make some commits, kills it a fraction of a commit later; returns the last acknowledged commit."""
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=write_for_ever, args=(path, sending), daemon=True)
    child.start()
    sending.close()
    last, times = 0, []
    try:
        for _ in range(1 + commits):
            assert receiving.poll(60), "the writer does not commit"
            last = receiving.recv()
            times.append(time.monotonic())
        time.sleep(fraction * (times[-1] - times[0]) / commits)
    finally:
        child.kill()
        child.join(60)
    while receiving.poll():
        try:
            last = receiving.recv()
        except EOFError:
            break
    return last


def check(path: Path, acknowledged: int, start: int) -> int:
    with Reader(path) as reader:
        sequence = reader.sequence
        assert sequence in (acknowledged, acknowledged + 1)
        contents = Contents(reader)
        for slot in range(TENSORS):
            first = max(start + 1, sequence - TENSORS + 1)
            if steps := [step for step in range(first, sequence + 1) if step % TENSORS == slot]:
                record = reader.record(f"t{slot}")
                np.testing.assert_array_equal(contents.span(record, 0, record.nbytes), value(steps[-1]))
        if sequence > start:
            assert reader.metadata == {"step": sequence}
    report = verify(path, threads=1)
    assert report.ok, report.bad[:3]
    return sequence


def test_kill_at_random_moments(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.h3", random.Random(11)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "h3store.archive"])
    with Writer(path) as writer:
        writer.add("fixed", np.arange(1000, dtype=np.uint8), "uint8", (1000,), default_spec("uint8"))
        start = writer.commit()
    sequence, tails = start, 0
    for _ in range(KILLS):
        acknowledged = run_and_kill(context, path, rng.randint(1, 4), rng.uniform(0, 1.2))
        assert acknowledged > sequence
        tails += os.path.getsize(path) > Reader(path).file_bytes
        sequence = check(path, acknowledged, start)
    assert tails > 0  # some kills fell inside a commit and left bytes behind that belong to none


def test_kill_before_the_first_commit_of_a_replacement(tmp_path: Path) -> None:
    path = tmp_path / "a.h3"
    with Writer(path) as writer:
        writer.add("old", np.arange(1000, dtype=np.uint8), "uint8", (1000,), default_spec("uint8"))
        writer.commit()
    code = ("import sys, os, numpy as np; from h3store.archive import Writer; from h3store.codec import default_spec\n"
            "w = Writer(sys.argv[1], 'w'); w.add('new', np.ones(1 << 20, np.uint8), 'uint8', (1 << 20,), "
            "default_spec('uint8')); os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".a.h3.partial", "a.h3"]
    with Reader(path) as reader:
        assert set(reader.records) == {"old"}
    with Writer(path, "w") as writer:  # takes the leftover over
        writer.add("new", np.ones(10, np.uint8), "uint8", (10,), default_spec("uint8"))
        writer.commit()
    assert os.listdir(tmp_path) == ["a.h3"] and verify(path).ok
