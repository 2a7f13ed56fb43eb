"""Power loss: between two flushes a disk may keep any of the sectors written, in any order. Whatever it keeps, the file
opens at the last commit or at the one in flight, and all of that commit verifies."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from h3store.archive import Contents, Reader, Writer
from h3store.archive.fileio import FileIO
from h3store.codec import default_spec

SECTOR = 512
MIXES = 12


def mixes(before: bytes, after: bytes, rng: random.Random) -> list[bytes]:
    """What a disk may hold on the way from one flushed state to the next: any subset of the changed sectors."""
    size = max(len(before), len(after))
    old, new = before.ljust(size, b"\0"), after.ljust(size, b"\0")
    changed = [at for at in range(0, size, SECTOR) if old[at:at + SECTOR] != new[at:at + SECTOR]]
    found = [before, after]
    for _ in range(MIXES):
        mix, keep = bytearray(old), rng.random()
        for at in changed:
            if rng.random() < keep:
                mix[at:at + SECTOR] = new[at:at + SECTOR]
        found.append(bytes(mix[:rng.choice([len(before), len(after), size])]))
    return found


class Disk:
    """Watches a writer's flushes and checks every state that a power loss before each could leave."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.copy = path, path.with_suffix(".copy")
        self.flushed = path.read_bytes()
        self.states: dict[int, dict[str, bytes]] = {}
        self.checked: list[int] = []
        self.rng = random.Random(3)
        self.last = 0
        real = FileIO.sync

        def sync(io: FileIO, what: str) -> None:
            now = self.path.read_bytes()
            for mix in mixes(self.flushed, now, self.rng):
                self.check(mix)
            real(io, what)
            self.flushed = now

        monkeypatch.setattr(FileIO, "sync", sync)

    def check(self, data: bytes) -> None:
        self.copy.write_bytes(data)
        with Reader(self.copy) as reader:
            assert reader.sequence in (self.last, self.last + 1)
            contents = Contents(reader)
            held = {name: contents.span(record, 0, record.nbytes).tobytes() for name, record in reader.records.items()}
        assert held == self.states[reader.sequence]
        self.checked.append(reader.sequence - self.last)


def test_any_subset_of_unflushed_sectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h3"
    state: dict[str, bytes] = {}
    with Writer(path) as writer:
        disk = Disk(path, monkeypatch)
        disk.last, disk.states[1] = writer.sequence, {}
        for step in range(2, 14):
            raw = np.random.default_rng(step).integers(0, 16, 9_000 + 500 * step, np.uint8)
            name = f"t{step % 3}"
            writer.add(name, raw, "uint8", raw.shape, default_spec("uint8"), 4096)
            state = {**state, name: raw.tobytes()}
            disk.states[step] = state
            disk.last = writer.commit()
    assert set(disk.checked) == {0, 1}
    assert len(disk.checked) == 12 * 2 * (MIXES + 2)
