"""Files and pickles of TieredTensors: references that prove themselves, and bytes written equal to bytes asked for,
from memory that is not there when the write begins."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import h3store
from h3store import TieredTensor
from h3store.errors import (
    ArchiveNotFoundError,
    CorruptArchiveError,
    CorruptBlockError,
    StorageFullError,
    UsageError,
)
from h3store.store import handoff
from h3store.tensor import range_of
from tests.fault.test_corrupt_tensor import damage
from tests.tiered import run_python

Saved = tuple[Path, torch.Tensor]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    value = torch.randn(512, 1024)
    h3store.save({"w": value, "bias": value[0], "half": value.to(torch.bfloat16)}, tmp_path / "w.h3")
    return tmp_path / "w.h3", value


def load(saved: Saved, name: str = "w") -> TieredTensor:
    return h3store.load(saved[0], ddr_bytes="1MiB")[name]  # half of it fits


def evict(tensor: torch.Tensor) -> None:
    range_of(tensor).drop()


def same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.data_ptr() == right.data_ptr()


# ---- pickle ----


def test_a_pickle_is_a_reference_that_another_process_follows(saved: Saved, tmp_path: Path) -> None:
    tensor = load(saved)
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    parameter.note = "kept"  # type: ignore[attr-defined]  # what users do
    views = {"whole": tensor, "view": tensor[3:50:2, 100:].T, "row": tensor[7], "ints": tensor.view(torch.int32)[5]}
    data = pickle.dumps({**views, "parameter": parameter})
    assert len(pickle.dumps(tensor)) < 500
    assert len(data) < 2000
    (tmp_path / "p.pkl").write_bytes(data)
    torch.save({name: view.clone() for name, view in views.items()}, tmp_path / "values.pt")
    done = run_python(f"""
    import pickle, torch
    got = pickle.load(open({str(tmp_path / "p.pkl")!r}, "rb"))
    want = torch.load({str(tmp_path / "values.pt")!r})
    for name, value in want.items():
        assert type(got[name]).__name__ == "TieredTensor", name
        assert torch.equal(got[name], value) and got[name].dtype == value.dtype, name
    assert isinstance(got["parameter"], torch.nn.Parameter) and not got["parameter"].requires_grad
    assert got["parameter"].note == "kept"
    assert got["view"].untyped_storage().data_ptr() == got["whole"].untyped_storage().data_ptr()
    try: got["whole"][0] = 1
    except RuntimeError as error: assert "read-only" in str(error)
    else: raise SystemExit("written")
    """)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_pickle_followed_here_is_the_same_memory_under_the_same_budget(saved: Saved) -> None:
    tensor = load(saved)
    assert same_memory(pickle.loads(pickle.dumps(tensor)), tensor)
    assert same_memory(pickle.loads(pickle.dumps(tensor[5])), tensor[5])


def test_a_reference_to_an_archive_that_moved_or_changed_says_so(saved: Saved) -> None:
    path, value = saved
    data = pickle.dumps(load(saved))
    path.rename(path.with_name("moved.h3"))
    with pytest.raises(ArchiveNotFoundError, match=r"w\.h3"):
        pickle.loads(data)
    path.with_name("moved.h3").rename(path)
    assert torch.equal(pickle.loads(data), value)
    h3store.save({"w": value + 1}, path)
    assert torch.equal(pickle.loads(data), value)  # the store that the last one opened is still open
    handoff._recent.clear()
    with pytest.raises(CorruptArchiveError, match="tensor 'w' is not the one that was pickled"):
        pickle.loads(data)
    h3store.save({"other": value}, path)
    with pytest.raises(CorruptArchiveError, match="has changed since"):
        pickle.loads(data)


def test_a_commit_of_other_tensors_leaves_references_good(saved: Saved) -> None:
    path, value = saved
    data = pickle.dumps(load(saved))
    with h3store.open(path, mode="r+") as store:
        store["bias"] += 1
    assert torch.equal(pickle.loads(data), value)


def test_what_the_archive_no_longer_holds_is_pickled_by_value(saved: Saved) -> None:
    path, value = saved
    tensor = load(saved)
    h3store.save({"w": value + 1}, path)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), value)
    path.unlink()
    data = pickle.dumps(tensor)
    assert len(data) > value.nbytes
    assert torch.equal(pickle.loads(data), value)


def test_a_writable_tensor_is_a_reference_only_while_it_is_what_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "s.h3"
    value = torch.randn(300, 1024)
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("w", (300, 1024), torch.float32)
        tensor[:] = value
        data = pickle.dumps(tensor)
        assert len(data) > value.nbytes  # not committed: nothing to refer to
        tensor[0] = -1
        assert torch.equal(pickle.loads(data), value)
        store.commit()
        data = pickle.dumps(tensor)
        assert len(data) < 500
        copy_of_it = pickle.loads(data)
        assert not same_memory(copy_of_it, tensor)  # a pickle is a copy: writes must not reach it
        tensor[1] = -2
        assert torch.equal(copy_of_it[1], value[1])
        changed = pickle.dumps(tensor)
        assert len(changed) > value.nbytes
        assert torch.equal(pickle.loads(changed), tensor)
        store.close(commit=False)
    assert len(pickle.dumps(tensor)) > value.nbytes  # it holds what was never committed
    assert (pickle.loads(pickle.dumps(tensor))[1] == -2).all()


def test_a_replaced_tensor_that_was_changed_is_pickled_by_value(saved: Saved) -> None:
    path, value = saved
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        old = store["w"]
        old[0] = 5
        store["w"] = value + 1
        assert (pickle.loads(pickle.dumps(old))[0] == 5).all()


def test_lazy_conjugates_keep_their_value(tmp_path: Path) -> None:
    value = torch.randn(400, 100, dtype=torch.complex64)
    h3store.save({"c": value}, tmp_path / "c.h3")
    tensor = h3store.load(tmp_path / "c.h3", ddr_bytes="1MiB")["c"]
    for lazy, want in ((tensor.conj(), value.conj()), (tensor.conj().imag, value.conj().imag)):
        assert torch.equal(pickle.loads(pickle.dumps(lazy)).resolve_neg(), want)
        buffer = io.BytesIO()
        torch.save(lazy, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True).resolve_neg(), want)


def test_copies(saved: Saved) -> None:
    tensor = load(saved)
    tensor.note = ["kept"]  # type: ignore[attr-defined]  # what users do
    shallow, deep = copy.copy(tensor), copy.deepcopy(tensor)
    assert type(shallow) is TieredTensor
    assert same_memory(shallow, tensor)
    assert shallow.note is tensor.note  # type: ignore[attr-defined]
    assert type(deep) is torch.Tensor
    assert deep.note == ["kept"]  # type: ignore[attr-defined]
    assert deep.note is not tensor.note  # type: ignore[attr-defined]
    parameter = copy.copy(torch.nn.Parameter(tensor))
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    assert same_memory(parameter, tensor)
    tied = copy.deepcopy(torch.nn.ModuleList([torch.nn.Linear(1024, 512, bias=False) for _ in range(2)]))
    tied[0].weight = tied[1].weight = torch.nn.Parameter(tensor, requires_grad=False)
    assert copy.deepcopy(tied)[0].weight is not None
    twin = copy.deepcopy(tied)
    assert twin[0].weight is twin[1].weight


# ---- torch.save ----


def to_path(value: Any, path: Path) -> None:
    torch.save(value, path)


def to_text_path(value: Any, path: Path) -> None:
    torch.save(value, str(path))


def to_file(value: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)


def to_unbuffered_file(value: Any, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        torch.save(value, file)


def to_buffer(value: Any, path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(buffer.getvalue())


def to_old_format(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("write", [to_path, to_text_path, to_file, to_unbuffered_file, to_buffer, to_old_format])
def test_torch_save_writes_values_that_outlive_the_archive(
    saved: Saved, tmp_path: Path, write: Callable[[Any, Path], None]
) -> None:
    tensor = load(saved)
    half = range_of(tensor)
    values = {
        "w": tensor,
        "tied": tensor.T,
        "row": tensor[3],
        "every": tensor[::3, 5],
        "parameter": torch.nn.Parameter(tensor, requires_grad=False),
        "plain": torch.arange(5),
        "none": tensor[:0],
    }
    want = {name: value.detach().clone() for name, value in values.items()}
    evict(tensor)
    tensor[40].sum()  # partly there: what a system call would write short
    write(values, tmp_path / "out.pt")
    assert half.resident_bytes <= 2**20
    saved[0].unlink()
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert isinstance(got["parameter"], torch.nn.Parameter)
    for name, value in want.items():
        assert type(got[name]) in (torch.Tensor, torch.nn.Parameter)
        assert torch.equal(got[name], value), name
    if write is not to_old_format:
        assert got["w"].untyped_storage().data_ptr() == got["tied"].untyped_storage().data_ptr()
        assert (tmp_path / "out.pt").stat().st_size < 1.1 * tensor.nbytes  # tied ones once, a row without its table


def test_an_archive_is_never_written_over_by_what_is_read_from_it(saved: Saved) -> None:
    tensor = load(saved)
    before = saved[0].read_bytes()
    with pytest.raises(UsageError, match=r"w\.h3 is an h3store archive"):
        torch.save({"w": tensor}, saved[0])
    with pytest.raises(UsageError, match=r"w\.h3 is an h3store archive"):
        safetensors.torch.save_file({"w": tensor}, saved[0])
    assert saved[0].read_bytes() == before and torch.equal(tensor, saved[1])


def test_torch_save_of_plain_tensors_is_left_alone(tmp_path: Path, saved: Saved) -> None:
    load(saved)
    torch.save({"a": torch.arange(5)}, tmp_path / "plain.pt")
    with torch.serialization.safe_globals([]):
        assert torch.equal(torch.load(tmp_path / "plain.pt", mmap=True)["a"], torch.arange(5))
    with pytest.raises(RuntimeError, match="Parent directory"):
        torch.save(torch.ones(1), tmp_path / "no" / "such.pt")
    with pytest.raises((pickle.PicklingError, AttributeError)):
        torch.save(lambda: 0, tmp_path / "never.pt")


def test_modules_with_tied_weights(saved: Saved, tmp_path: Path) -> None:
    tensor = load(saved)

    def fresh() -> torch.nn.ModuleDict:
        head = torch.nn.Linear(1024, 512, bias=False)
        return torch.nn.ModuleDict({"embed": torch.nn.Embedding(512, 1024), "head": head})

    model = fresh()
    model["embed"].weight = model["head"].weight = torch.nn.Parameter(tensor, requires_grad=False)
    state = model.state_dict()
    assert all(type(value) is TieredTensor for value in state.values())
    torch.save(state, tmp_path / "m.pt")
    assert (tmp_path / "m.pt").stat().st_size < 1.1 * tensor.nbytes
    for assign in (False, True):
        other = fresh()
        other.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True), assign=assign)
        assert torch.equal(other["head"].weight, tensor)
    other.load_state_dict(state, assign=True)
    assert same_memory(other["embed"].weight, other["head"].weight)
    assert isinstance(other["embed"].weight, TieredTensor)
    safetensors.torch.save_model(model, str(tmp_path / "m.safetensors"))
    other = fresh()
    other["embed"].weight = other["head"].weight
    safetensors.torch.load_model(other, str(tmp_path / "m.safetensors"))
    assert torch.equal(other["embed"].weight, tensor)


def test_a_damaged_block_is_an_error_of_the_save_not_of_the_process(saved: Saved, tmp_path: Path) -> None:
    damage(saved[0], "w", 3)
    tensor = load(saved)
    for write in (to_path, to_file, to_buffer, to_old_format):
        with pytest.raises(CorruptBlockError, match=r"tensor 'w', block 3"):
            write({"w": tensor}, tmp_path / "bad.pt")
    for save in (
        lambda: safetensors.torch.save_file({"w": tensor}, tmp_path / "bad.safetensors"),
        lambda: safetensors.torch.save({"w": tensor}),
        lambda: copy.deepcopy(tensor),
    ):
        with pytest.raises(CorruptBlockError):
            save()
    assert torch.equal(h3store.load(saved[0])["bias"], saved[1][0])


# ---- safetensors ----


def test_safetensors_files_are_those_of_plain_tensors(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.float16,
              torch.int8, torch.uint8, torch.bool, torch.int64, torch.uint16, torch.int32, torch.complex64]  # fmt: skip
    plain = {f"t{i} \u00e9\"": (torch.randn(70, 1023) * 9).to(dtype) for i, dtype in enumerate(dtypes)}
    plain |= {"scalar": torch.tensor(3.5), "empty": torch.ones(0, 4)}
    h3store.save(plain, tmp_path / "t.h3")
    tiered: dict[str, torch.Tensor] = dict(h3store.load(tmp_path / "t.h3", ddr_bytes="1MiB"))
    tiered["mixed"] = plain["mixed"] = torch.arange(7)
    metadata = {"format": "pt"}  # one key: the library writes several in any order
    safetensors.torch.save_file(plain, tmp_path / "plain.safetensors", metadata=metadata)
    safetensors.torch.save_file(tiered, tmp_path / "tiered.safetensors", metadata=metadata)
    assert (tmp_path / "tiered.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    assert safetensors.torch.save(tiered, metadata) == safetensors.torch.save(plain, metadata)
    arrays = {name: value.numpy() for name, value in plain.items() if value.dtype in (torch.float32, torch.int64)}
    lazy = {name: tiered[name].numpy() for name in arrays}
    safetensors.numpy.save_file(arrays, tmp_path / "plain.safetensors")
    safetensors.numpy.save_file(lazy, tmp_path / "tiered.safetensors")
    assert (tmp_path / "tiered.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    assert safetensors.numpy.save(lazy) == safetensors.numpy.save(arrays)
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.torch.save_file({"t": tiered["t0 \u00e9\""].T}, tmp_path / "never.safetensors")


# ---- memory and system calls ----


def test_saving_takes_no_memory_beyond_the_budget(tmp_path: Path) -> None:
    budget, numel = 4 * 2**20, 8 * 2**20  # float32: 8 times the budget
    value = torch.arange(numel, dtype=torch.float32)
    h3store.save({"w": value}, tmp_path / "big.h3")
    done = run_python(f"""
    import re, torch, h3store, safetensors.torch
    def resident(field):
        return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    def save(tensors, out):
        torch.save(tensors, out + ".pt")
        with open(out + ".file", "wb") as file: torch.save(tensors, file)
        safetensors.torch.save_file(tensors, out + ".st")
    tensors = h3store.load({str(tmp_path / "big.h3")!r}, ddr_bytes={budget})
    save({{"w": tensors["w"][:10]}}, {str(tmp_path / "first")!r})
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = resident("VmRSS")
    save(tensors, {str(tmp_path / "out")!r})
    print(resident("VmHWM") - before)
    """)
    assert done.returncode == 0, done.stderr[-2000:]
    peak = int(done.stdout)
    assert peak < budget + 8 * 2**20, f"peak {peak / 2**20:.0f} MiB over the start"
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)["w"], value)
    assert torch.equal(torch.load(tmp_path / "out.file", weights_only=True)["w"], value)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "out.st")["w"], value)


def np_save(array: np.ndarray, path: Path) -> None:
    np.save(path, array)


def to_file_method(array: np.ndarray, path: Path) -> None:
    array.tofile(path)


def buffered_write(array: np.ndarray, path: Path) -> None:
    with path.open("wb") as file:
        file.write(memoryview(array).cast("B"))


def os_write_all(array: np.ndarray, path: Path) -> None:
    """As careful code does: short writes are resumed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    view = memoryview(array).cast("B")
    try:
        while view.nbytes:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


@pytest.mark.parametrize("write", [np_save, to_file_method, buffered_write, os_write_all])
@pytest.mark.parametrize("partly", [False, True])
def test_system_calls_get_an_error_or_every_byte(
    saved: Saved, tmp_path: Path, write: Callable[[np.ndarray, Path], None], partly: bool
) -> None:
    value = saved[1][:100]
    tensor = load(saved)[:100]
    target = tmp_path / "out.npy"
    evict(tensor)
    if partly:
        tensor[:20].sum()
    with pytest.raises(OSError):
        write(tensor.numpy(), target)
    got = target.read_bytes()
    start = got.find(value.numpy().tobytes()[:64])
    tail = got[start:] if start >= 0 else b""
    assert value.numpy().tobytes().startswith(tail)  # what is there is right: never zeros
    with h3store.pin(tensor) as held:
        write(held.numpy(), target)
    assert target.read_bytes().endswith(value.numpy().tobytes())


def test_a_short_write_reports_what_it_wrote(saved: Saved, tmp_path: Path) -> None:
    tensor = load(saved)
    evict(tensor)
    tensor[:16].sum()  # one block of 64 KiB
    fd = os.open(tmp_path / "short", os.O_WRONLY | os.O_CREAT)
    assert os.write(fd, tensor.numpy()) == 65536  # POSIX: the count is true, and the caller's to check
    os.close(fd)
    assert (tmp_path / "short").read_bytes() == saved[1][:16].numpy().tobytes()


def test_a_full_disk_while_saving_is_an_error(saved: Saved) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    tensor = load(saved)
    for save in (
        functools.partial(torch.save, {"w": tensor}, "/dev/full"),
        functools.partial(safetensors.torch.save_file, {"w": tensor}, "/dev/full"),
    ):
        with pytest.raises((OSError, StorageFullError, RuntimeError)):
            save()
    assert torch.equal(tensor, saved[1])
