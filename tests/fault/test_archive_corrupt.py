"""Damaged archives: cut anywhere, flipped anywhere, forged. Each is one error of the tree, an older commit, or
harmless; never other bytes than were written."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h3store import errors
from h3store.archive import Contents, Reader, Writer, describe, verify
from h3store.archive.layout import HEADER_BYTES, SLOT_OFFSETS, Header, Slot, xxh64
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
        slots = [Slot.from_page(path.read_bytes()[:HEADER_BYTES], which, writer.uuid, "", 1 << 40) for which in (0, 1)]
    return Sample(path.read_bytes(), states, [slot for slot in slots if slot])


def check_outcome(path: Path, data: bytes, sample: Sample) -> str:
    """Opens and reads everything. Whatever the damage: an expected error, or exactly what some commit holds."""
    path.write_bytes(data)
    try:
        reader = Reader(path)
    except EXPECTED as error:
        assert str(path) in str(error)
        return "refused"
    with reader:
        state = sample.states[reader.sequence]
        assert set(reader.records) <= set(state)
        contents = Contents(reader)
        outcome = "whole" if reader.sequence == max(sample.states) else "older"
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
    assert set(outcomes.values()) == {"refused"}  # an older commit in its place would be a silent loss
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
    """No flip in the fields that are used is read as the whole file: it is refused, or the other slot is used."""
    path = tmp_path / "a.h3"
    newest = SLOT_OFFSETS[max(sample.states) % 2]
    for at in [*range(56), *range(newest, newest + 64)]:
        for bit in range(0, 8, 1 if at < 56 else 3):
            outcome = check_outcome(path, _flip(sample.data, at, bit), sample)
            assert outcome == ("refused" if at < 56 else "older"), (at, bit)
    older = SLOT_OFFSETS[1 - max(sample.states) % 2]
    for at in range(older, older + 64, 5):
        assert check_outcome(path, _flip(sample.data, at, 2), sample) == "whole"


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


def test_a_damaged_index_is_refused(tmp_path: Path, sample: Sample) -> None:
    newest = max(sample.slots, key=lambda slot: slot.sequence)
    data = _flip(sample.data, newest.index_offset + newest.index_bytes // 2, 0)
    path = tmp_path / "a.h3"
    path.write_bytes(data)
    with pytest.raises(errors.CorruptArchiveError, match=f"index of commit {newest.sequence} .* fails its check"):
        Reader(path)
    for opening in (lambda: Writer(path, "r+"), lambda: verify(path), lambda: describe(path)):
        with pytest.raises(errors.CorruptArchiveError):
            opening()
    assert path.read_bytes() == data  # a writer that cannot open changes nothing


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
    page[SLOT_OFFSETS[1]:SLOT_OFFSETS[1] + 64] = replace(slot, **slot_fields).to_bytes(header.uuid)
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
    forge(path, tensor(), required=2)
    with pytest.raises(errors.ArchiveFormatError, match="0x2"):
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


def test_two_torn_slots_are_refused(tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "a.h3"
    path.write_bytes(_flip(_flip(sample.data, SLOT_OFFSETS[0] + 3, 1), SLOT_OFFSETS[1] + 3, 1))
    with pytest.raises(errors.CorruptArchiveError, match="no commit can be read") as caught:
        Reader(path)
    assert str(caught.value).count("fails its check") == 2
