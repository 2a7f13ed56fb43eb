"""What callers get wrong: one error of ours that names the object, the value and the way out, and nothing half done."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import h3store
from h3store.errors import ArchiveChangedError, ArchiveError, ReadOnlyError, UsageError
from h3store.units import parse_bytes
from tests.tiered import run_python


@pytest.fixture
def store(tmp_path: Path) -> Iterator[h3store.Store]:
    opened = h3store.open(tmp_path / "s.h3", mode="w", ddr_bytes="8MiB")
    opened.put("t", torch.arange(40.0).reshape(10, 4))
    yield opened
    opened.close(commit=False)


@pytest.mark.parametrize("rows", [10**18, 2**63, 2**70, -1, True, 2.0, "3"])
def test_a_length_that_no_tensor_has(store: h3store.Store, rows: Any) -> None:
    with pytest.raises(UsageError, match=r"shape|rows"):
        store.resize("t", rows)
    assert store["t"].shape == (10, 4) and store.commit()


def test_empty_rows_have_limits_too(store: h3store.Store) -> None:
    store.put("e", torch.zeros(3, 0))
    with pytest.raises(UsageError, match="shape"):
        store.resize("e", 2**63)
    assert store.resize("e", 5).shape == (5, 0) and store.commit()


@pytest.mark.parametrize("rows", [
    torch.empty(2, 4, device="meta"), torch.zeros(2, 4).to_sparse(), torch.zeros(1, 4).expand(10**14, 4)])
def test_rows_that_cannot_be_stored_make_no_tensor_longer(store: h3store.Store, rows: torch.Tensor) -> None:
    with pytest.raises(UsageError):
        store.append("t", rows)
    assert store["t"].shape == (10, 4)


@pytest.mark.parametrize("shape", [(2, 2**70), (2**63,), (10**18,), None, "ab", (2, -3)])
def test_a_shape_that_no_tensor_has(store: h3store.Store, shape: Any) -> None:
    with pytest.raises(UsageError, match="shape"):
        store.create("c", shape, torch.float32)
    assert "c" not in store


@pytest.mark.parametrize("chunk_bytes", [4096.0, "64KiB", True, 5000, 0, -4096, 2**70])
def test_a_chunk_size_that_is_none(store: h3store.Store, chunk_bytes: Any) -> None:
    with pytest.raises(UsageError, match="chunk_bytes"):
        store.create("c", (4,), torch.float32, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2])
def test_a_quantised_dtype(store: h3store.Store, dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match="dequantize"):
        store.create("c", (4,), dtype)


CALLS: list[Callable[[h3store.Store, Any], object]] = [
    lambda store, name: store.create(name, (2,), torch.float32),
    lambda store, name: store.put(name, torch.zeros(2)),
    lambda store, name: store.append(name, torch.zeros(1, 4)),
    lambda store, name: store.resize(name, 3),
    lambda store, name: store.read(name),
    lambda store, name: store[name],
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", [5, None, b"t", ["t"]])
def test_a_name_that_is_no_text(store: h3store.Store, call: Callable[[h3store.Store, Any], object], name: Any) -> None:
    with pytest.raises(UsageError, match="names are text"):
        call(store, name)


@pytest.mark.parametrize(("name", "what"), [("a\0b", "NUL"), ("\ud800", "UTF-8"), ("", "0 bytes"), ("é" * 600, "1200")])
def test_a_name_of_the_wrong_letters(store: h3store.Store, name: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        store.put(name, torch.zeros(2))


PATHS: list[Callable[[Any], object]] = [
    h3store.open,
    h3store.load,
    lambda path: h3store.open(path, mode="w"),
    lambda path: h3store.save({"a": torch.zeros(2)}, path),
]  # fmt: skip


@pytest.mark.parametrize("call", PATHS)
@pytest.mark.parametrize("path", [5, b"x", None, "", "a\0b", ["a"], 2.5])
def test_a_path_that_is_none(call: Callable[[Any], object], path: Any) -> None:
    with pytest.raises(UsageError, match="path"):
        call(path)


@pytest.mark.parametrize("path", [5, b"x", "", "a\0b"])
def test_other_paths(path: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="path"):
        h3store.attach(nn.Linear(200, 200), ddr_bytes="8MiB", path=path)
    with pytest.raises(UsageError, match="base"):
        h3store.save({"a": torch.zeros(2)}, tmp_path / "b.h3", base=path)


def test_a_folder_where_no_file_can_be_made() -> None:
    with pytest.raises(ArchiveError, match="choose another folder"):
        h3store.save({"a": torch.zeros(2)}, "/proc/x.h3")


@pytest.mark.parametrize("size", [2**63, 2**70, "99999999TiB", "9" * 400, -1, 1.5, True, b"64", ""])
def test_a_budget_that_is_none(size: Any) -> None:
    with pytest.raises(UsageError, match="ddr_bytes"):
        parse_bytes(size, "ddr_bytes")


def test_what_is_no_tensor_is_not_held() -> None:
    with pytest.raises(UsageError, match=r"prefetch\(\*tensors\)"):
        h3store.prefetch([torch.zeros(2)])  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(UsageError, match="pin"), h3store.pin(None):  # type: ignore[arg-type]
        pass


# ---- why a tensor is read-only ----


def refused(tensor: torch.Tensor) -> str:
    with pytest.raises(ReadOnlyError) as caught:
        tensor[0] = 1
    return str(caught.value)


def test_a_write_says_why_the_tensor_is_read_only(store: h3store.Store, tmp_path: Path) -> None:
    removed, path = store["t"], tmp_path / "s.h3"
    store.remove("t")
    assert "was removed" in refused(removed)
    store.put("t", torch.zeros(10, 4))
    replaced = store["t"]
    store.put("t", torch.ones(10, 4))
    assert "was replaced" in refused(replaced)
    cut = store["t"]
    store.resize("t", 3)
    assert "longer or shorter; take it anew" in refused(cut)
    compacted = store["t"]
    store.compact()
    assert "before compact(); take it anew from the store" in refused(compacted)
    closed = store["t"]
    store.close()
    assert "its store was closed" in refused(closed)
    assert 'mode="r+"' in refused(h3store.load(path)["t"])


def test_a_forked_child_is_told_that_it_only_reads(tmp_path: Path) -> None:
    run_python(
        f"""
        import os, torch, h3store
        from h3store.errors import ReadOnlyError
        store = h3store.open({str(tmp_path / "f.h3")!r}, mode="w", ddr_bytes="8MiB")
        t = store.create("t", (10,), torch.float32)
        pid = os.fork()
        if pid == 0:
            try:
                t[0] = 1
            except ReadOnlyError as error:
                os._exit(0 if "forked child only reads" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        t[0] = 1
        store.close()
        """
    )


# ---- references ----


def test_a_reference_to_an_archive_that_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "r.h3"
    h3store.save({"t": torch.zeros(1000)}, path)
    data = pickle.dumps(h3store.load(path)["t"])
    h3store.save({"t": torch.ones(1000)}, path)
    with pytest.raises(ArchiveChangedError, match="changed since"):
        pickle.loads(data)


# ---- files that nothing was committed to ----


def test_a_new_store_closed_without_a_commit_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "n.h3"
    h3store.open(path, mode="w").close(commit=False)
    assert os.listdir(tmp_path) == []
    with pytest.raises(RuntimeError, match="on purpose"), h3store.open(path, mode="w") as store:
        store.put("t", torch.zeros(4))
        raise RuntimeError("on purpose")
    assert os.listdir(tmp_path) == []
    opened = h3store.open(path, mode="w")
    opened.put("t", torch.ones(4))
    opened.commit()
    opened.close(commit=False)
    assert torch.equal(h3store.load(path)["t"], torch.ones(4))
    h3store.open(path, mode="w").close(commit=False)
    assert torch.equal(h3store.load(path)["t"], torch.ones(4))


# ---- attach ----


class Masked(nn.Module):
    """A layer with a large buffer, and a small one, that no checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.register_buffer("mask", torch.ones(256, 256), persistent=False)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.mask * self.scale[0]


def test_an_archive_of_another_model_is_refused_also_by_a_small_one(tmp_path: Path) -> None:
    path = tmp_path / "other.h3"
    h3store.save({"other": torch.zeros(4)}, path)
    model = nn.Linear(8, 8)
    before = model.weight
    with pytest.raises(UsageError, match="holds no tensor 'weight'"):
        h3store.attach(model, ddr_bytes="8MiB", path=path)
    assert model.weight is before


def test_buffers_that_no_checkpoint_keeps_come_from_the_model(tmp_path: Path) -> None:
    path, model, x = tmp_path / "m.h3", Masked(), torch.randn(3, 256)
    expected = model(x)
    h3store.save(model.state_dict(), path)
    with h3store.attach(model, ddr_bytes="8MiB", path=path):
        assert type(model.mask) is torch.Tensor and torch.equal(model(x), expected)
    with torch.device("meta"):
        absent = Masked()
    with pytest.raises(UsageError, match=r"mask is a buffer that no checkpoint keeps .*build the model on the CPU"):
        h3store.attach(absent, ddr_bytes="8MiB", path=path)
