"""Damaged archives: cut anywhere, flipped anywhere, forged. Each is one error of the tree, or harmless; never other
bytes than were written, and never an older commit unless it is asked for."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import h3store
from h3store import errors
from h3store.archive import Contents, Reader, Writer, describe, rollback, verify
from h3store.archive.fileio import FileIO
from h3store.archive.layout import HEADER_BYTES, SLOT_BYTES, SLOT_OFFSETS, Header, Slot, xxh64
from h3store.codec import Delta, Filter, Spec, default_spec

EXPECTED = (errors.CorruptArchiveError, errors.ArchiveFormatError)


def values(count: int, seed: int) -> np.ndarray:
    floats = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return np.ascontiguousarray(floats.view(np.uint16)[1::2]).view(np.uint8)


@dataclass
class Sample:
    """An archive of three commits; states[sequence] is what each commit holds."""

    data: bytes
    states: dict[int, dict[str, bytes]]
    slots: list[Slot]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    path = tmp_path_factory.mktemp("sample") / "a.h3"
    state: dict[str, bytes] = {}
    states = {1: {}}
    with Writer(path) as writer:
        for step, (name, dtype, spec) in enumerate([
                ("weights", "bfloat16", default_spec("bfloat16")),
                ("rows", "int64", Spec(8, 64, Filter.BYTEPLANE, Delta.ROW)),
                ("text", "uint8", default_spec("uint8"))]):
            raw = {"weights": values(20_000, 1), "rows": np.arange(3_000).view(np.uint8),
                   "text": np.frombuffer(b"what was written is what is read. " * 400, np.uint8)}[name]
            item = {"bfloat16": 2, "int64": 8, "uint8": 1}[dtype]
            writer.add(name, raw, dtype, (len(raw) // item,), spec, 4096)
            state = {**state, name: raw.tobytes()}
            states[writer.commit()] = state
            assert writer.sequence == step + 2
        slots = [Slot.from_page(path.read_bytes()[:HEADER_BYTES], which, writer.uuid, "") for which in (0, 1)]
    return Sample(path.read_bytes(), states, [slot for slot in slots if slot])


def check_outcome(path: Path, data: bytes, sample: Sample) -> str:
    """Opens and reads everything. Whatever the damage: an expected error, or exactly what the last commit holds."""
    path.write_bytes(data)
    try:
        reader = Reader(path)
    except EXPECTED as error:
        assert str(path) in str(error)
        return "refused"
    with reader:
        assert reader.sequence == max(sample.states)
        state = sample.states[reader.sequence]
        assert set(reader.records) == set(state)
        contents = Contents(reader)
        outcome = "whole"
        for record in reader.records.values():
            try:
                raw = contents.span(record, 0, record.nbytes).tobytes()
            except errors.CorruptArchiveError as error:
                assert record.name in str(error) and str(path) in str(error)
                outcome = "detected"
            else:
                assert raw == state[record.name]
        report = verify(path, threads=1)
        assert report.ok == (outcome != "detected")
    return outcome


def test_the_undamaged_file_is_whole(tmp_path: Path, sample: Sample) -> None:
    assert check_outcome(tmp_path / "a.h3", sample.data, sample) == "whole"


def _boundaries(sample: Sample, path: Path) -> list[int]:
    path.write_bytes(sample.data)
    ends = {0, 1, 7, 8, 48, 56, 512, 576, 1024, 1088, HEADER_BYTES, len(sample.data)}
    for slot in sample.slots:
        ends |= {slot.index_offset, slot.index_offset + slot.index_bytes, slot.covered_bytes}
    with Reader(path) as reader:
        for record in reader.records.values():
            assert record.table is not None
            ends |= {record.table.offset, record.table.offset + 24 * record.table.n_chunks}
            for entry in reader.chunks(record):
                ends |= {int(entry["offset"]), int(entry["offset"]) + int(entry["stored_bytes"])}
    return sorted({at for end in ends for at in (end - 1, end, end + 1) if 0 <= at < len(sample.data)})


def test_cut_at_every_structure(tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "a.h3"
    outcomes = {size: check_outcome(path, sample.data[:size], sample) for size in _boundaries(sample, path)}
    assert set(outcomes.values()) == {"refused"}
    assert len(outcomes) > 60


@pytest.mark.parametrize("seed", range(4))
def test_cut_at_random(tmp_path: Path, sample: Sample, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        size = rng.randrange(len(sample.data))
        assert check_outcome(tmp_path / "a.h3", sample.data[:size], sample) == "refused", size


def _flip(data: bytes, at: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[at] ^= 1 << bit
    return bytes(damaged)


def test_every_bit_of_header_and_slots(tmp_path: Path, sample: Sample) -> None:
    """Also of the older slot: what it was before the damage, the newest or not, nobody can tell."""
    path = tmp_path / "a.h3"
    slots = [at for start in SLOT_OFFSETS for at in range(start, start + 64)]
    for at in [*range(56), *slots]:
        for bit in range(0, 8, 1 if at < 56 else 3):
            assert check_outcome(path, _flip(sample.data, at, bit), sample) == "refused", (at, bit)


@pytest.mark.parametrize("seed", range(6))
def test_random_flips_and_overwrites(tmp_path: Path, sample: Sample, seed: int) -> None:
    """Several hundred in all, anywhere after the header: detected, or in bytes that no commit in use refers to."""
    rng = random.Random(seed)
    seen = set()
    for _ in range(60):
        damaged = bytearray(sample.data)
        for _ in range(rng.choice([1, 1, 1, 8])):
            at = rng.randrange(HEADER_BYTES, len(damaged))
            damaged[at] ^= 1 << rng.randrange(8)
        seen.add(check_outcome(tmp_path / "a.h3", bytes(damaged), sample))
    assert "detected" in seen


# ---- giving a damaged commit up --------------------------------------------------------------------------------------
def _in_index(sample: Sample, newest: bool) -> int:
    """A byte inside the index of the newest or the older commit."""
    slot = sorted(sample.slots, key=lambda slot: slot.sequence)[-1 if newest else 0]
    return slot.index_offset + slot.index_bytes // 2


def _damages(sample: Sample) -> dict[str, tuple[bytes, int, str]]:
    """Damage that leaves one commit: the file, the sequence of what is left, and what the refusal says."""
    last = max(sample.states)
    slots = {slot.sequence: slot for slot in sample.slots}
    cut = slots[last - 1].covered_bytes
    return {
        "cut by a byte": (sample.data[:-1], last - 1, f"the file has {len(sample.data) - 1}"),
        "cut to the older commit": (sample.data[:cut], last - 1, f"the file has {cut}"),
        "newest index": (_flip(sample.data, _in_index(sample, True), 3), last - 1,
                         f"index of commit {last} at byte {slots[last].index_offset} fails its check"),
        "newest slot": (_flip(sample.data, slots[last].offset, 0), last - 1,
                        f"commit slot {last % 2} at byte {slots[last].offset} fails its check"),
        "older slot": (_flip(sample.data, slots[last - 1].offset + 63, 7), last,
                       f"commit slot {1 - last % 2} at byte {slots[last - 1].offset} fails its check")}


@pytest.mark.parametrize("damage", ["cut by a byte", "cut to the older commit", "newest index", "newest slot",
                                    "older slot"])
def test_damage_is_refused_until_it_is_given_up(tmp_path: Path, sample: Sample, damage: str) -> None:
    path = tmp_path / "a.h3"
    data, left, reason = _damages(sample)[damage]
    path.write_bytes(data)
    tensors = len(sample.states[left])
    way_out = f"go back to commit {left} ({tensors} tensors), which can be read: h3store verify {path} --rollback"
    for opening in (lambda: Reader(path), lambda: Writer(path, "r+"), lambda: verify(path), lambda: describe(path)):
        with pytest.raises(errors.CorruptArchiveError) as caught:
            opening()
        assert str(path) in str(caught.value) and reason in str(caught.value) and way_out in str(caught.value)
    assert path.read_bytes() == data  # a writer that cannot open changes nothing
    assert rollback(path) == left
    with Reader(path) as reader:
        contents = Contents(reader)
        assert reader.sequence == left
        assert {name: contents.span(reader.record(name), 0, reader.record(name).nbytes).tobytes()
                for name in reader.records} == sample.states[left]
    with Writer(path, "r+") as writer:
        writer.add("more", np.arange(100, dtype=np.uint8), "uint8", (100,), default_spec("uint8"))
        assert writer.commit() == left + 1
    report = verify(path)
    assert report.ok and report.tensors == tensors + 1 and report.tail_bytes == 0


def test_what_cannot_be_given_up(tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "a.h3"
    path.write_bytes(sample.data)
    with pytest.raises(errors.UsageError, match=f"commit {max(sample.states)} is the last one and sound"):
        rollback(path)
    with Writer(path, "r+"), pytest.raises(errors.ArchiveLockedError):
        rollback(path)
    assert path.read_bytes() == sample.data
    lost = [_flip(_flip(sample.data, _in_index(sample, True), 0), _in_index(sample, False), 0),
            _flip(_flip(sample.data, SLOT_OFFSETS[0], 0), SLOT_OFFSETS[1], 0),
            _flip(_flip(sample.data, SLOT_OFFSETS[max(sample.states) % 2], 0), _in_index(sample, False), 0),
            sample.data[:HEADER_BYTES], sample.data[:512] + bytes(HEADER_BYTES - 512) + sample.data[HEADER_BYTES:]]
    for data in lost:
        path.write_bytes(data)
        for opening in (lambda: Reader(path), lambda: rollback(path)):
            with pytest.raises(errors.CorruptArchiveError, match="no other commit of the file can be read"):
                opening()
        assert path.read_bytes() == data
    path.unlink()
    with pytest.raises(errors.ArchiveNotFoundError):
        rollback(path)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_cut_file_of_save_does_not_load(tmp_path: Path, replaced: bool) -> None:
    """Not even as the empty archive that a new file starts from."""
    path = tmp_path / "weights.h3"
    tensors = {f"w{i}": torch.arange(5000, dtype=torch.float32) * i for i in range(3)}
    for _ in range(1 + replaced):
        h3store.save(tensors, path)
    data = path.read_bytes()
    for size in {len(data) - 1, len(data) - 100, len(data) // 2, HEADER_BYTES + 200, HEADER_BYTES, 1000}:
        path.write_bytes(data[:size])
        with pytest.raises(errors.CorruptArchiveError, match=re.escape(str(path))):
            h3store.load(path)
    path.write_bytes(data)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in h3store.load(path).items())


def test_a_slot_that_is_being_written_is_read_again(tmp_path: Path, sample: Sample,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h3"
    path.write_bytes(sample.data)
    real, reads = FileIO.read, []

    def read(io: FileIO, offset: int, size: int, what: str) -> bytes:
        data = real(io, offset, size, what)
        if what == "header":
            reads.append(offset)
            return _flip(data, SLOT_OFFSETS[0] + 5 * len(reads), 1) if len(reads) < 4 else data
        return data

    monkeypatch.setattr(FileIO, "read", read)
    with Reader(path) as reader:
        assert reader.sequence == max(sample.states) and len(reads) == 4


def test_a_damaged_chunk_is_named(tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "a.h3"
    path.write_bytes(sample.data)
    with Reader(path) as reader:
        entry = reader.chunks(reader.record("weights"))[3]
    path.write_bytes(_flip(sample.data, int(entry["offset"]) + 100, 4))
    report = verify(path)
    assert [(bad.tensor, bad.block, bad.offset) for bad in report.bad] == [("weights", 3, int(entry["offset"]))]
    with Reader(path) as reader, pytest.raises(errors.CorruptBlockError, match=r"'weights', block 3 at byte"):
        Contents(reader).chunk(reader.record("weights"), 3)


def test_a_damaged_table_is_reported_and_the_rest_is_checked(tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "a.h3"
    path.write_bytes(sample.data)
    with Reader(path) as reader:
        table = reader.record("rows").table
    assert table is not None
    path.write_bytes(_flip(sample.data, table.offset + 30, 1))
    report = verify(path)
    assert [(bad.tensor, bad.block) for bad in report.bad] == [("rows", -1)] and report.chunks > 0


# ---- forged files: every check holds, the contents break a rule -----------------------------------------------------
def forge(path: Path, index: bytes | dict[str, Any], **slot_fields: int) -> None:
    """A file of one commit with this index, right in all its checks unless slot_fields say otherwise."""
    data = index if isinstance(index, bytes) else json.dumps(index).encode()
    header = Header(bytes(range(16)))
    slot = Slot(1, HEADER_BYTES, len(data), xxh64(data), HEADER_BYTES + len(data))
    page = bytearray(header.to_bytes())
    page[SLOT_OFFSETS[1]:SLOT_OFFSETS[1] + SLOT_BYTES] = replace(slot, **slot_fields).to_bytes(header.uuid)
    path.write_bytes(bytes(page) + data)


def tensor(**fields: Any) -> dict[str, Any]:
    entry = {"dtype": "uint8", "shape": [0], "chunk_bytes": 4096, "spec": [1, 0, 2, 0, 0, 1],
             "table": [0, 0, "ef46db3751d8e999"]}
    entry.update(fields)
    return {"tensors": {"t": entry}, "metadata": {}}


def test_the_forged_file_itself_is_sound(tmp_path: Path) -> None:
    forge(tmp_path / "a.h3", tensor())
    assert verify(tmp_path / "a.h3").ok


@pytest.mark.parametrize("index", [
    b"{}", b"[]", b"null", b"{\"tensors\": {}", b"\xff\xff", b"[" * 100_000, b"{\"a\":" * 50_000,
    b"{\"tensors\": {}, \"metadata\": 1}", b"{\"tensors\": [], \"metadata\": {}}",
    b"{\"tensors\": {}, \"metadata\": {\"x\": NaN}}", b"{\"tensors\": {}, \"tensors\": {}, \"metadata\": {}}",
    b"{\"tensors\": {\"a\": 1}, \"metadata\": {}}",
    b"{\"tensors\": {}, \"metadata\": {\"x\": " + b"[" * 17 + b"]" * 17 + b"}}",
    b"{\"tensors\": {}, \"metadata\": {\"x\": " + b"9" * 5000 + b"}}",
    json.dumps(tensor()).replace('"t"', '"' + "n" * 1025 + '"').encode(),
    json.dumps(tensor()).replace('"t"', '"\\u0000"').encode(),
    json.dumps(tensor()).replace('"t"', '"\\ud800"').encode()], ids=lambda index: repr(index[:40]))
def test_forged_index(tmp_path: Path, index: bytes) -> None:
    forge(tmp_path / "a.h3", index)
    with pytest.raises(errors.CorruptArchiveError):
        Reader(tmp_path / "a.h3")


@pytest.mark.parametrize("fields", [
    {"shape": [-1]}, {"shape": [2**63]}, {"shape": [2**40, 2**40]}, {"shape": [1.5]}, {"shape": ["1"]}, {"shape": 3},
    {"shape": [True]}, {"shape": [1] * 65}, {"shape": [1]}, {"shape": [2**61]}, {"chunk_bytes": 0},
    {"chunk_bytes": 4097}, {"chunk_bytes": 8 << 20}, {"chunk_bytes": "4096"}, {"spec": [1, 0, 2, 0, 0]}, {"spec": None},
    {"spec": [2, 0, 2, 0, 0, 1]}, {"spec": [1, 0, 9, 0, 0, 1]}, {"spec": [1, 0, 2, 1, 0, 1]},
    {"spec": [1, 0, 2, 0, 0, 255]}, {"spec": [1, 2**32, 2, 0, 0, 1]}, {"spec": [1.0, 0, 2, 0, 0, 1]},
    {"table": [0, 1, "00"]}, {"table": [0, 0]}, {"table": [0, 0, "zz"]}, {"table": [0, 0, 5]},
    {"table": [4095, 1, "00"], "shape": [4096]}, {"table": [4096, 1 << 40, "00"], "shape": [4096 << 40]},
    {"table": [2**62, 1, "00"], "shape": [4096]}, {"table": [-1, 1, "00"], "shape": [4096]}, {"dtype": 7},
    {"metadata": []}, {"base": {}}, {"base": {"path": "/etc/passwd", "uuid": "00" * 16, "sequence": 1, "name": "t"}},
    {"base": {"path": "x", "uuid": "00" * 15, "sequence": 1, "name": "t"}},
    {"base": {"path": "", "uuid": "00" * 16, "sequence": 1, "name": "t"}},
    {"base": {"path": "x", "uuid": "00" * 16, "sequence": -1, "name": "t"}},
    {"base": {"path": "x" * 5000, "uuid": "00" * 16, "sequence": 1, "name": "t"}}], ids=repr)
def test_forged_tensor(tmp_path: Path, fields: dict[str, Any]) -> None:
    forge(tmp_path / "a.h3", tensor(**fields))
    with pytest.raises(errors.CorruptArchiveError, match="'t'"):
        Reader(tmp_path / "a.h3")


@pytest.mark.parametrize("fields", [
    {"index_offset": 4095}, {"index_offset": 2**63}, {"index_bytes": 1}, {"index_bytes": 2**28 + 1},
    {"index_bytes": 2**63}, {"covered_bytes": 2**40}, {"covered_bytes": 4097}, {"index_check": 1},
    {"sequence": 3 << 32}],
    ids=repr)
def test_forged_slot(tmp_path: Path, fields: dict[str, int]) -> None:
    forge(tmp_path / "a.h3", tensor(), **fields)
    with pytest.raises(errors.CorruptArchiveError):
        Reader(tmp_path / "a.h3")


def test_newer_formats_are_refused_as_such(tmp_path: Path) -> None:
    path = tmp_path / "a.h3"
    forge(path, tensor(), required=1 << 30)
    with pytest.raises(errors.ArchiveFormatError, match="0x40000000"):
        Reader(path)
    forge(path, tensor(dtype="float1_e1"))
    with pytest.raises(errors.ArchiveFormatError, match="float1_e1"):
        Reader(path)

    def header(change: Callable[[bytearray], None]) -> None:
        forge(path, tensor())
        page = bytearray(path.read_bytes())
        change(page)
        page[48:56] = struct.pack("<Q", xxh64(bytes(page[:48])))
        path.write_bytes(bytes(page))

    header(lambda page: page.__setitem__(8, 2))
    with pytest.raises(errors.ArchiveFormatError, match="version 2"):
        Reader(path)
    header(lambda page: page.__setitem__(16, 1 << 5))
    with pytest.raises(errors.ArchiveFormatError, match="0x20"):
        Reader(path)
    header(lambda page: page.__setitem__(24, 255))  # optional features are ignored
    Reader(path).close()
    header(lambda page: page.__setitem__(10, 9))  # and so is a newer minor version
    Reader(path).close()


@pytest.mark.parametrize("data", [b"PK\x03\x04", b"{}", b"\0" * 5000, b"\x89H3S\n\x1a\n" + bytes(5000)], ids=repr)
def test_other_files_are_no_archives(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.h3").write_bytes(data)
    with pytest.raises(errors.ArchiveFormatError, match="not an h3store archive"):
        Reader(tmp_path / "a.h3")
