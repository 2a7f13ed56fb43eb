"""Power loss: between two flushes a disk may keep any of the sectors written, in any order. Whatever it keeps, the file
opens at the last commit or at the one in flight, and all of that commit verifies. Damage that came later is no power
loss, and is refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import h3store
from h3store.archive import Contents, Reader, Writer, verify, writer
from h3store.archive.fileio import FileIO
from h3store.archive.layout import HEADER_BYTES, SLOT_OFFSETS
from h3store.codec import Filter, default_spec
from h3store.errors import CorruptArchiveError, H3Error

SECTOR = 512
MIXES = 12


def mixes(before: bytes, after: bytes, rng: random.Random) -> list[bytes]:
    """What a disk may hold on the way from one flushed state to the next: any subset of the changed sectors."""
    size = max(len(before), len(after))
    old, new = before.ljust(size, b"\0"), after.ljust(size, b"\0")
    changed = [at for at in range(0, size, SECTOR) if old[at:at + SECTOR] != new[at:at + SECTOR]]
    found = [before, after]
    # Each single sector missing or alone says more than chance does: the slot is one of them.
    for at in [rng.choice(changed) for _ in range(4)] + [at for at in changed if at < HEADER_BYTES]:
        end = at + SECTOR
        found += [new[:at] + old[at:end] + new[end:], old[:at] + new[at:end] + old[end:]]
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
        self.flushes = 0
        self.rng = random.Random(3)
        self.last = 0
        real = FileIO.sync

        def sync(io: FileIO, what: str) -> None:
            now = self.path.read_bytes()
            if self.last and now != self.flushed:
                self.flushes += 1
                for mix in mixes(self.flushed, now, self.rng):
                    self.check(mix)
            real(io, what)
            self.flushed = now

        monkeypatch.setattr(FileIO, "sync", sync)

    def check(self, data: bytes) -> None:
        self.copy.write_bytes(data)
        with Reader(self.copy) as reader:
            assert reader.sequence in (self.last, self.last + 1)
            held = held_by(reader)
        assert held == self.states[reader.sequence]
        self.checked.append(reader.sequence - self.last)


def held_by(reader: Reader) -> dict[str, bytes]:
    contents = Contents(reader)
    return {name: contents.span(record, 0, record.nbytes).tobytes() for name, record in reader.records.items()}


@pytest.mark.parametrize("waits", [1, 2])
def test_any_subset_of_unflushed_sectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: int) -> None:
    """Quick commits wait for the disk once, large ones twice."""
    monkeypatch.setattr(writer, "_QUICK_BYTES", 1 << 20 if waits == 1 else 0)
    path = tmp_path / "a.h3"
    state: dict[str, bytes] = {}
    with Writer(path) as archive:
        disk = Disk(path, monkeypatch)
        disk.last, disk.states[1] = archive.sequence, {}
        for step in range(2, 14):
            raw = np.random.default_rng(step).integers(0, 16, 9_000 + 500 * step, np.uint8)
            name = f"t{step % 3}"
            archive.add(name, raw, "uint8", raw.shape, default_spec("uint8"), 4096)
            state = {**state, name: raw.tobytes()}
            disk.states[step] = state
            disk.last = archive.commit()
    assert set(disk.checked) == {0, 1}
    assert disk.flushes == 12 * waits


def test_rows_written_into_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch records, changes of tables and appended rows, over evictions, in several runs of the writer."""
    path = tmp_path / "a.h3"
    rng = random.Random(4)
    expected = {"t": torch.randn(300, 1024).bfloat16(), "log": torch.zeros(0, dtype=torch.int64)}
    h3store.save(expected, path)
    disk = Disk(path, monkeypatch)
    seen: set[int] = set()

    def note(sequence: int) -> None:
        disk.states[sequence] = {name: value.view(torch.uint8).numpy().tobytes() for name, value in expected.items()}

    with Reader(path) as reader:
        disk.last = reader.sequence
    note(disk.last)
    for _ in range(3):
        with h3store.open(path, mode="r+", ddr_bytes="512KiB") as store:
            for step in range(3):
                for _ in range(2):
                    row = rng.randrange(300)
                    store["t"][row] = expected["t"][row] = rng.random()
                if step == 1:
                    store.range("t").drop()
                rows = torch.arange(disk.last, disk.last + 3)
                store.append("log", rows)
                expected["log"] = torch.cat([expected["log"], rows])
                note(disk.last + 1)
                disk.last = store.commit()
                with Reader(path) as reader:
                    seen |= set(reader.chunks(reader.record("t"))["filter"].tolist())
    assert set(disk.checked) == {0, 1} and disk.flushes == 9 + 2  # an opening writer flushes the seal
    assert seen == {Filter.EXPNIBBLE, Filter.PATCH}


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[Path, bytes]:
    """An archive whose last commit was quick and returned."""
    path = tmp_path / "a.h3"
    h3store.save({"t": torch.randn(300, 1024).bfloat16()}, path)
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store["t"][7] = 1
        store.commit()
        store["t"][9] = 2
    return path, path.read_bytes()


def last_slot(path: Path) -> int:
    with Reader(path) as reader:
        return reader.slot.offset


def test_damage_to_a_commit_that_returned_is_refused(sealed: tuple[Path, bytes]) -> None:
    path, whole = sealed
    with Reader(path) as reader:
        slot, table = reader.slot, reader.record("t").table
    assert slot.sealed and table is not None
    for at in [slot.index_offset, slot.index_offset + 9, slot.offset + 3, slot.offset + 66, slot.offset + 82]:
        data = bytearray(whole)
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptArchiveError):
            Reader(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptArchiveError, match="the file has"):
        Reader(path)
    data = bytearray(whole)
    data[table.offset + 5] ^= 1
    path.write_bytes(data)
    assert not verify(path).ok


def test_an_unsealed_commit_counts_when_all_of_it_is_there(sealed: tuple[Path, bytes]) -> None:
    path, whole = sealed
    slot = last_slot(path)
    with Reader(path) as reader:
        sequence, start, stop = reader.sequence, reader.slot.start, reader.file_bytes
        newest = held_by(reader)
    unsealed = bytearray(whole)
    unsealed[slot + 80:slot + 88] = bytes(8)
    path.write_bytes(unsealed)
    with Reader(path) as reader:
        assert reader.sequence == sequence and held_by(reader) == newest
    rng = random.Random(2)
    for at in [*range(start, stop, 97), stop - 1, *(rng.randrange(start, stop) for _ in range(50))]:
        data = bytearray(unsealed)
        data[at] ^= 16
        path.write_bytes(data)
        with Reader(path) as reader:
            assert reader.sequence in (sequence - 1, sequence)  # some bytes say nothing
            assert reader.sequence == sequence - 1 or held_by(reader) == newest
    for size in range(start, stop, 101):
        path.write_bytes(unsealed[:size])
        with Reader(path) as reader:
            assert reader.sequence == sequence - 1 and reader.unfinished is not None


def test_a_writer_goes_on_after_a_commit_that_was_cut_short(sealed: tuple[Path, bytes]) -> None:
    path, whole = sealed
    slot = last_slot(path)
    data = bytearray(whole)
    data[slot + 80:slot + 88] = bytes(8)
    path.write_bytes(data[:-1])
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        assert (store["t"][7] == 1).all() and not (store["t"][9] == 2).any()
        assert path.read_bytes()[slot:slot + 88] == bytes(88)
        store["t"][11] = 3
    found = h3store.load(path)["t"]
    assert (found[11] == 3).all() and not (found[9] == 2).any() and verify(path).ok


def test_a_commit_cut_short_over_a_damaged_one_is_damage(sealed: tuple[Path, bytes]) -> None:
    path, whole = sealed
    slot = last_slot(path)
    other = next(at for at in SLOT_OFFSETS if at != slot)
    older = int.from_bytes(whole[other + 8:other + 16], "little")
    data = bytearray(whole)
    data[slot + 80:slot + 88] = bytes(8)
    data[older] ^= 1
    path.write_bytes(data[:-1])
    with pytest.raises(H3Error, match="no other commit"):
        Reader(path)
