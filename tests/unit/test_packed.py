"""Folders packed into archives and back: every byte, or a clear error."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import h3store
from h3store._ffi import lib
from h3store.archive import Reader, Writer
from h3store.errors import (
    ArchiveFormatError,
    ArchiveLockedError,
    ArchiveNotFoundError,
    CheckpointError,
    CorruptArchiveError,
    CorruptBlockError,
    StorageFullError,
    UsageError,
)
from h3store.packed import PackedFolder, pack, unpack
from h3store.packed.header import parse


def odd_tensors() -> dict[str, torch.Tensor]:
    """The same at every call."""
    torch.manual_seed(5)
    return {
        "weight": torch.randn(700, 300).to(torch.bfloat16),
        "fp8": torch.randn(64, 64).to(torch.float8_e4m3fn),
        "fp8.wide": torch.randn(33).to(torch.float8_e5m2),
        "mask": torch.rand(1001) > 0.5,
        "ids": torch.arange(-500, 500),
        "none": torch.zeros(0, 7, dtype=torch.float16),
        "scalar": torch.tensor(3.25),
        "double": torch.randn(17, 3, dtype=torch.float64),
        "wave": torch.randn(40, dtype=torch.complex64),
        "odd bytes": torch.randint(0, 255, (4097,), dtype=torch.uint8),
    }


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def write_folder(folder: Path) -> Path:
    """Two shards that the index names, a third that it does not, and all kinds of other files."""
    folder.mkdir()
    tensors = odd_tensors()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard, metadata={"format": "pt", "shard": shard})
    save_file({"weight": torch.ones(3), "lora": torch.ones(2)}, folder / "adapter.safetensors")
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "empty.txt").write_bytes(b"")
    (folder / "original").mkdir()
    params = torch.randint(0, 255, (300_000,), dtype=torch.uint8)
    (folder / "original" / "params.bin").write_bytes(params.numpy().tobytes())
    (folder / "original" / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (folder / "hollow" / "deep").mkdir(parents=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def test_a_folder_comes_back_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = pack(folder, tmp_path / "m.h3", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == report.raw_bytes == sum(p.stat().st_size for p in folder.rglob("*.*"))
    assert report.tensors == 12 and report.leaning_tensors == 0
    assert unpack(tmp_path / "m.h3", tmp_path / "back") == {"files": 8, "bytes": report.raw_bytes}
    assert digests(tmp_path / "back") == digests(folder)
    assert (tmp_path / "back" / "hollow" / "deep").is_dir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "m.h3", "model"]  # nothing else is left


def test_weights_load_by_their_names(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "m.h3")
    loaded = h3store.load(tmp_path / "m.h3", ddr_bytes="4MiB")
    with PackedFolder(tmp_path / "m.h3") as packed:
        assert packed.tensors("adapter.safetensors") == {"weight": "@files/adapter.safetensors#1",
                                                         "lora": "@files/adapter.safetensors#0"}
    assert set(loaded) == set(odd_tensors())
    for name, tensor in odd_tensors().items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].clone().reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_one_file_stands_for_a_folder(tmp_path: Path) -> None:
    save_file(odd_tensors(), tmp_path / "x.safetensors")
    pack(tmp_path / "x.safetensors", tmp_path / "x.h3")
    unpack(tmp_path / "x.h3", tmp_path / "back")
    assert (tmp_path / "back" / "x.safetensors").read_bytes() == (tmp_path / "x.safetensors").read_bytes()
    assert len(list((tmp_path / "back").iterdir())) == 1


def test_element_types_that_torch_has_no_name_for_are_kept(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
                         "b": {"dtype": "F4", "shape": [2, 4], "data_offsets": [3, 7]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(range(7))
    (tmp_path / "x.safetensors").write_bytes(data)
    pack(tmp_path / "x.safetensors", tmp_path / "x.h3")
    with Reader(tmp_path / "x.h3") as reader:
        assert (reader.record("a").dtype, reader.record("a").shape) == ("uint8", (3,))
        assert (reader.record("b").dtype, reader.record("b").shape) == ("float4_e2m1fn_x2", (2, 2))
    unpack(tmp_path / "x.h3", tmp_path / "back")
    assert (tmp_path / "back" / "x.safetensors").read_bytes() == data


def test_names_that_an_archive_can_not_hold_get_others(tmp_path: Path) -> None:
    tensors = {"@files/config.json": torch.ones(3), "n" * 2000: torch.ones(4), "": torch.ones(5)}
    save_file(tensors, tmp_path / "x.safetensors")
    pack(tmp_path / "x.safetensors", tmp_path / "x.h3")
    unpack(tmp_path / "x.h3", tmp_path / "back")
    assert (tmp_path / "back" / "x.safetensors").read_bytes() == (tmp_path / "x.safetensors").read_bytes()


def test_a_related_checkpoint_costs_its_difference(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other")
    changed = torch.randn(700, 300).to(torch.bfloat16)
    save_file({"weight": changed, "wave": torch.randn(40, dtype=torch.complex64)}, other / "adapter.safetensors")
    whole = pack(folder, tmp_path / "m.h3")
    report = pack(other, tmp_path / "o.h3", base=tmp_path / "m.h3")
    assert report.leaning_tensors > 8  # the smallest are not worth it
    assert report.archive_bytes < changed.nbytes < whole.archive_bytes
    unpack(tmp_path / "o.h3", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(other)


def test_a_base_that_is_gone_or_another_is_named(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "m.h3")
    pack(folder, tmp_path / "o.h3", base=tmp_path / "m.h3")
    (tmp_path / "m.h3").rename(tmp_path / "elsewhere.h3")
    with pytest.raises(ArchiveNotFoundError, match=r"o\.h3 is a difference to .*m\.h3, which is not there"):
        unpack(tmp_path / "o.h3", tmp_path / "back")
    pack(folder, tmp_path / "m.h3")  # the same content, but not the archive that was leaned on
    with pytest.raises(CorruptArchiveError, match=r"archive that was at .*m\.h3; another one lies there"):
        unpack(tmp_path / "o.h3", tmp_path / "back")
    shutil.copy(tmp_path / "elsewhere.h3", tmp_path / "m.h3")
    with Writer(tmp_path / "m.h3", "r+") as writer:  # the same archive, with a tensor replaced
        record = writer.record("weight")
        writer.add("weight", os.urandom(record.nbytes), record.dtype, record.shape, record.spec, record.chunk_bytes)
        writer.commit()
    with pytest.raises(CorruptBlockError, match=r"difference to m\.h3: has that archive changed"):
        unpack(tmp_path / "o.h3", tmp_path / "back")
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".back*"))


def test_chains_end_where_they_could_no_longer_be_read(tmp_path: Path) -> None:
    save_file({"w": torch.randn(300, 300)}, tmp_path / "x.safetensors")
    base = None
    for i in range(10):
        pack(tmp_path / "x.safetensors", tmp_path / f"{i}.h3", base=base)
        base = tmp_path / f"{i}.h3"
        assert torch.equal(h3store.load(base)["w"].clone(), h3store.load(tmp_path / "0.h3")["w"].clone())
    for i in range(10):
        h3store.save({"w": torch.ones(300, 300)}, tmp_path / f"s{i}.h3", base=tmp_path / f"s{i - 1}.h3" if i else None)
        assert h3store.load(tmp_path / f"s{i}.h3")["w"].sum() == 90000


def test_nothing_is_replaced_unasked(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "m.h3")
    before = (tmp_path / "m.h3").read_bytes()
    with pytest.raises(UsageError, match="--force"):
        pack(folder, tmp_path / "m.h3")
    assert (tmp_path / "m.h3").read_bytes() == before
    pack(folder, tmp_path / "m.h3", force=True)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "mine.txt").write_text("keep")
    (tmp_path / "back" / "config.json").write_text("old")
    with pytest.raises(UsageError, match="not empty"):
        unpack(tmp_path / "m.h3", tmp_path / "back")
    unpack(tmp_path / "m.h3", tmp_path / "back", force=True)
    assert digests(tmp_path / "back").items() >= digests(folder).items()
    assert (tmp_path / "back" / "mine.txt").read_text() == "keep"


def test_what_can_not_be_packed_is_said_before_anything_is_made(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.h3"
    with pytest.raises(UsageError, match="no such folder"):
        pack(tmp_path / "no", out)
    with pytest.raises(UsageError, match="lies in the folder"):
        pack(folder, folder / "m.h3")
    with pytest.raises(ArchiveNotFoundError, match=r"no\.h3"):
        pack(folder, out, base=tmp_path / "no.h3")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UsageError, match="neither"):
        pack(tmp_path / "bare", out)
    (folder / "gone").symlink_to("nowhere")
    with pytest.raises(UsageError, match="gone"):
        pack(folder, out)
    (folder / "gone").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(UsageError, match="neither file nor folder"):
        pack(folder, out)
    (folder / "pipe").unlink()
    shard = folder / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"00002\.safetensors is not a whole"):
        pack(folder, out)
    save_file({"else": torch.ones(2)}, shard)
    with pytest.raises(CheckpointError, match="has no tensor"):
        pack(folder, out)
    shard.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        pack(folder, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bare", "model"]


def test_a_file_that_changes_meanwhile_is_noticed(folder: Path, tmp_path: Path) -> None:
    def meddle(done: int, total: int) -> None:
        with (folder / "original" / "params.bin").open("r+b") as file:
            file.write(b"changed")

    with pytest.raises(CheckpointError, match=r"params\.bin changed"):
        pack(folder, tmp_path / "m.h3", progress=meddle)
    assert not (tmp_path / "m.h3").exists() and not list(tmp_path.glob(".m*"))


@pytest.mark.parametrize("kind,number", [("WRITE", 28), ("WRITE", 5), ("ALLOC", 12)])
def test_every_failure_leaves_what_was_there(folder: Path, tmp_path: Path, kind: str, number: int) -> None:
    (tmp_path / "m.h3").write_bytes(b"")
    (tmp_path / "m.h3").unlink()
    pack(folder, tmp_path / "old.h3")
    before = (tmp_path / "old.h3").read_bytes()
    for nth in range(1, 60):
        lib.h3_fault_arm(getattr(lib, f"H3_FAULT_{kind}"), nth, -1, number)
        try:
            pack(folder, tmp_path / "old.h3", force=True)
            fired = lib.h3_fault_fired(getattr(lib, f"H3_FAULT_{kind}"))
        except (h3store.H3Error, MemoryError) as error:
            fired = 1
            assert number != 28 or isinstance(error, StorageFullError), error
            assert (tmp_path / "old.h3").read_bytes() == before
        finally:
            lib.h3_fault_arm(getattr(lib, f"H3_FAULT_{kind}"), 0, 0, 0)
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
        if not fired:
            break
    else:
        pytest.fail("the fault fired for ever")


def test_unpacking_writes_into_its_folder_only_and_over_files_only(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "m.h3")
    outside = tmp_path / "outside"
    outside.mkdir()
    back = tmp_path / "back"
    back.mkdir()
    (back / "original").symlink_to(outside)
    with pytest.raises(UsageError, match=r"back/original is a link"):
        unpack(tmp_path / "m.h3", back, force=True)
    (back / "original").unlink()
    (back / "original").write_text("mine")
    with pytest.raises(UsageError, match=r"back/original is a file, and .* needs a folder there"):
        unpack(tmp_path / "m.h3", back, force=True)
    (back / "original").unlink()
    (back / "config.json").mkdir()
    with pytest.raises(UsageError, match=r"back/config\.json is a folder"):
        unpack(tmp_path / "m.h3", back, force=True)
    assert not list(outside.iterdir()) and [path.name for path in back.iterdir()] == ["config.json"]
    (back / "config.json").rmdir()
    (back / "config.json").symlink_to(outside / "config.json")  # a link to a file is replaced, not followed
    unpack(tmp_path / "m.h3", back, force=True)
    assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert not list(outside.iterdir())


def test_no_archive_is_packed_over_what_its_base_leans_on(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "a.h3")
    pack(folder, tmp_path / "b.h3", base=tmp_path / "a.h3")
    for base in ("a.h3", "b.h3"):
        with pytest.raises(UsageError, match="cannot be saved as a difference to"):
            pack(folder, tmp_path / "a.h3", base=tmp_path / base, force=True)
    unpack(tmp_path / "b.h3", tmp_path / "back")


def test_lists_that_lie_are_refused(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "m.h3")
    lies = [
        {"version": 2}, [], {"version": 1, "files": [{"path": "../out", "bytes": 1}], "folders": []},
        {"version": 1, "files": [{"path": "/etc/x", "bytes": 1}], "folders": []},
        {"version": 1, "files": [{"path": "config.json", "bytes": 1}], "folders": []},
        {"version": 1, "files": [], "folders": ["a/../../b"]}, {"version": 1, "files": 3, "folders": []},
        {"version": 1, "files": [{"path": "config.json", "bytes": "x"}], "folders": []},
    ]  # fmt: skip
    for lie in lies:
        with Writer(tmp_path / "m.h3", "r+") as writer:
            writer.metadata["packed"] = lie
            writer.commit()
        with pytest.raises((ArchiveFormatError, CorruptArchiveError)):
            unpack(tmp_path / "m.h3", tmp_path / "back")
    h3store.save({"a": torch.ones(2)}, tmp_path / "plain.h3")
    with pytest.raises(ArchiveFormatError, match="no packed folder"):
        unpack(tmp_path / "plain.h3", tmp_path / "back")


def test_two_unpackers_exclude_one_another(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "m.h3")

    def again(done: int, total: int) -> None:
        with pytest.raises(ArchiveLockedError):
            unpack(tmp_path / "m.h3", tmp_path / "back")

    unpack(tmp_path / "m.h3", tmp_path / "back", progress=again)
    assert digests(tmp_path / "back") == digests(folder)


def test_what_a_killed_unpacker_left_is_taken_over(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "m.h3")
    (tmp_path / ".back.partial" / "junk").mkdir(parents=True)
    (tmp_path / ".back.partial" / "config.json").write_text("half")
    unpack(tmp_path / "m.h3", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(folder) and not (tmp_path / ".back.partial").exists()


@pytest.mark.parametrize("change,message", [
    ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "has 4 bytes"),
    ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "starts at byte"),
    ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "end at byte"),
    ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "described by"),
    ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "described by"),
    ({"a": 3}, "described by"),
    ([], "no JSON object"),
])  # fmt: skip
def test_headers_that_break_a_rule(change: object, message: str) -> None:
    text = json.dumps(change).encode()
    with pytest.raises(ValueError, match=message):
        parse(len(text).to_bytes(8, "little") + text, 8 + len(text) + 8)
