"""Compaction: the same tensors in less space, whoever reads meanwhile, whatever fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import h3store
from h3store._ffi import lib
from h3store.archive import describe, verify
from h3store.errors import ArchiveLockedError, ReadOnlyError, StorageFullError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.h3"


def fill(store: h3store.store.Store) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    table = (torch.randn(2000, 512, generator=generator) * 0.02).bfloat16()
    store.create("table", table.shape, table.dtype)
    for _ in range(3):
        table = table + 1
        store["table"][:] = table
        store.commit()
    table[7] = 5
    store["table"][7] = 5  # a record of changed pages
    store.put("gone", torch.rand(100_000))
    store.commit()
    del store["gone"]
    store.put("plain", table[:3], compression="none")
    store.create("zeros", (3, 5), torch.int64)
    store.create("empty", (0, 5), torch.int64)
    return {
        "table": table,
        "plain": table[:3],
        "zeros": torch.zeros(3, 5, dtype=torch.int64),
        "empty": torch.zeros(0, 5, dtype=torch.int64),
    }


def check(store: object, tensors: dict[str, torch.Tensor]) -> None:
    assert set(store.keys()) == tensors.keys()  # type: ignore[attr-defined]
    for name, tensor in tensors.items():
        assert torch.equal(store[name].clone(), tensor), name  # type: ignore[index]


def test_same_tensors_in_less_space(path: Path) -> None:
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensors = fill(store)
        store.commit()
        before = path.stat().st_size
        freed = store.compact()
        assert path.stat().st_size == before - freed and freed > before / 2
        check(store, tensors)
        store["table"][9] = tensors["table"][9] = 3
        store.append("empty", torch.ones(2, 5, dtype=torch.int64))
    tensors["empty"] = torch.ones(2, 5, dtype=torch.int64)
    assert verify(path).ok
    assert describe(path).dead_bytes < 20_000
    check(h3store.load(path), tensors)


def test_tensors_and_readers_from_before_keep_what_they_had(path: Path) -> None:
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensors = fill(store)
        store.commit()
        reader, old = h3store.load(path, ddr_bytes="1MiB"), store["table"]
        store.compact()
        assert torch.equal(old.clone(), tensors["table"])
        with pytest.raises(ReadOnlyError):
            old[0] = 1
        store["table"][0] = 9
        store.commit()
        check(reader, tensors)
        with pytest.raises(ArchiveLockedError):
            h3store.open(path, mode="r+")


def test_a_base_may_be_compacted(path: Path, tmp_path: Path) -> None:
    with h3store.open(path, mode="w") as store:
        tensors = fill(store)
    changed = {"table": tensors["table"] + 0.25}
    h3store.save(changed, tmp_path / "delta.h3", base=path)
    with h3store.open(path, mode="r+") as store:
        store.compact()
    assert torch.equal(h3store.load(tmp_path / "delta.h3")["table"].clone(), changed["table"])
    with h3store.open(tmp_path / "delta.h3", mode="r+") as store:
        store.compact()
    assert torch.equal(h3store.load(tmp_path / "delta.h3")["table"].clone(), changed["table"])


@pytest.mark.parametrize("kind", ["READ", "WRITE"])
def test_whatever_fails_the_old_file_stands(kind: str, path: Path) -> None:
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensors = fill(store)
        store.commit()
        number, n, failures = getattr(lib, f"H3_FAULT_{kind}"), 1, 0
        while True:
            lib.h3_fault_arm(number, n, 1, 28 if kind == "WRITE" else 5)
            try:
                store.compact()
            except h3store.H3Error as error:
                failures += 1
                assert kind == "READ" or isinstance(error, StorageFullError)
            fired = lib.h3_fault_fired(number)
            lib.h3_fault_arm(number, 0, 0, 0)
            check(store, tensors)
            check(h3store.load(path), tensors)
            store["table"][3] = tensors["table"][3] = n
            store.commit()
            if not fired:
                break
            n += 1
        assert failures >= 2
    assert not [name for name in os.listdir(path.parent) if "partial" in name]


def test_what_a_killed_compaction_left_is_swept(path: Path) -> None:
    with h3store.open(path, mode="w") as store:
        tensors = fill(store)
    (path.parent / ".a.h3.partial").write_bytes(b"half a file")
    with h3store.open(path, mode="r+") as store:
        check(store, tensors)
    assert os.listdir(path.parent) == ["a.h3"]


def test_resize_grows_with_zeros_and_cuts(path: Path) -> None:
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        store.create("t", (1000, 100), torch.float32)[:] = 7
        before = store["t"]
        assert torch.equal(store.resize("t", 1500)[1000:].clone(), torch.zeros(500, 100))
        short = store.resize("t", 333)
        assert tuple(short.shape) == (333, 100) and bool((short == 7).all())
        assert bool((before == 7).all())
        assert torch.equal(store.resize("t", 400)[333:].clone(), torch.zeros(67, 100))
        with pytest.raises(h3store.errors.UsageError):
            store.resize("t", -1)
    loaded = h3store.load(path)["t"]
    assert tuple(loaded.shape) == (400, 100) and bool((loaded[:333] == 7).all()) and not bool(loaded[333:].any())


def test_a_tensor_that_leans_on_another_archive_is_not_resized(path: Path, tmp_path: Path) -> None:
    values = torch.randn(30_000, 64)
    h3store.save({"x": values}, path)
    changed = values.clone()
    changed[3] = 5
    h3store.save({"x": changed}, tmp_path / "b.h3", base=path)
    with h3store.open(tmp_path / "b.h3", mode="r+", ddr_bytes="64MiB") as store:
        for change in (lambda: store.resize("x", 30_005), lambda: store.append("x", values[:1])):
            with pytest.raises(ReadOnlyError, match="put"):
                change()
        held = store["x"]
        store["x"] = torch.full((5, 64), 7.0)
        assert torch.equal(store.read("x"), torch.full((5, 64), 7.0)) and torch.equal(held.clone(), changed)
        assert tuple(store.resize("x", 6).shape) == (6, 64)


def test_read_after_a_replacement_of_another_shape(path: Path) -> None:
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        store.create("x", (10, 64), torch.float32)
        store.put("x", torch.full((1000, 64), 7.0))
        assert torch.equal(store.read("x"), torch.full((1000, 64), 7.0))
        del store["x"]
        store["x"] = torch.arange(9, dtype=torch.int32)
        assert torch.equal(store.read("x"), torch.arange(9, dtype=torch.int32))
