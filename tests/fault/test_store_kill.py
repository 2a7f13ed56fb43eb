"""kill -9 of a process that commits and compacts in a loop, at random moments: the store opens at the last commit that
was acknowledged, or at the one under way, whole."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import h3store
from h3store.archive import verify


def write_for_ever(path: Path, pipe: int) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        tensors = [store[f"t{i}"] for i in range(4)]
        value = int(tensors[0][0])
        os.write(pipe, b"ready\n")
        while True:
            value += 1
            for tensor in tensors:
                tensor[:] = value  # together more than fits: most of it leaves memory before the commit
            store.append("log", torch.full((100,), value))
            store.commit()
            if value % 3 == 0:
                store.compact()
                tensors = [store[f"t{i}"] for i in range(4)]
            os.write(pipe, b"%d\n" % value)


def start_writer(path: Path) -> tuple[int, int]:
    """Returns the process's number and the end of the pipe that its acknowledgements come from."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            write_for_ever(path, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    return pid, read_end


@pytest.mark.parametrize("kills", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_during_commits_and_compactions(kills: int, tmp_path: Path) -> None:
    path = tmp_path / "k.h3"
    with h3store.open(path, mode="w") as store:
        for i in range(4):
            store.create(f"t{i}", (150_000,), torch.int32)
        store.create("log", (0,), torch.int64)
    rng = random.Random(5)
    acknowledged = 0
    for _ in range(kills):
        pid, pipe = start_writer(path)
        with os.fdopen(pipe) as lines:
            assert lines.readline() == "ready\n"
            for _ in range(rng.randrange(3)):
                acknowledged = int(lines.readline())
            time.sleep(rng.random() * 0.03)  # somewhere inside a round: writes, evictions, commit
            os.kill(pid, signal.SIGKILL)
            acknowledged = max([acknowledged, *map(int, lines.read().split())])
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        loaded = h3store.load(path, ddr_bytes="4MiB")
        found = int(loaded["t0"][0])
        assert found in (acknowledged, acknowledged + 1)
        assert all((loaded[f"t{i}"] == found).all() for i in range(4))
        assert torch.equal(loaded["log"], torch.arange(1, found + 1).repeat_interleave(100))
        acknowledged = found
    assert acknowledged >= kills / 2
    assert sorted(os.listdir(tmp_path)) == ["k.h3"] or path.with_name(".k.h3.partial").exists()
    assert verify(path).ok
