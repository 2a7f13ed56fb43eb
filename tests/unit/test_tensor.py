"""What must survive around a TieredTensor: types, parameters, copies, saving, workers, compile, handlers of others."""

from __future__ import annotations

import copy
import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import h3store
from h3store import TieredTensor
from h3store.errors import ReadOnlyError, UsageError
from h3store.pager import Pager
from tests.tiered import run_python, tiered_copy

MiB = 1024 * 1024


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    value = torch.randn(512, 1024, generator=torch.Generator().manual_seed(3))
    h3store.save({"w": value}, tmp_path / "w.h3")
    return tmp_path / "w.h3", value


@pytest.fixture
def loaded(saved: tuple[Path, torch.Tensor]) -> tuple[TieredTensor, torch.Tensor]:
    path, value = saved
    return h3store.load(path, ddr_bytes="1MiB")["w"], value  # half of it fits


def test_views_keep_the_type_and_results_do_not(loaded: tuple[TieredTensor, torch.Tensor]) -> None:
    tensor, _ = loaded
    for view in (
        tensor[3],
        tensor.T,
        tensor.view(-1),
        tensor.detach(),
        tensor.data,
        *tensor.split(256),
        tensor.unbind()[0],
    ):
        assert type(view) is TieredTensor
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    for result in (tensor + 1, tensor.clone(), tensor.sum(), tensor.to(torch.bfloat16), tensor[torch.tensor([1, 2])]):
        assert type(result) is torch.Tensor


def test_the_base_of_a_view_ends_the_chain(loaded: tuple[TieredTensor, torch.Tensor]) -> None:
    view, depth = loaded[0][3], 0
    while view._is_view():
        view, depth = view._base, depth + 1
        assert depth < 4, "code that walks to the base never arrives"


def test_dlpack_shares_the_memory_and_read_only_stays_so(loaded: tuple[TieredTensor, torch.Tensor]) -> None:
    tensor, value = loaded
    for view, want in ((tensor, value), (tensor[3:9, ::2], value[3:9, ::2]), (tensor[7], value[7])):
        back = torch.from_dlpack(view)
        assert type(back) is TieredTensor
        assert back.data_ptr() == view.data_ptr()
        assert torch.equal(back, want)
        with pytest.raises(ReadOnlyError):
            back.zero_()
        array = np.from_dlpack(view)
        assert not array.flags.writeable
        assert np.array_equal(array, want.numpy())
        assert array.ctypes.data == view.data_ptr()
    with pytest.raises(BufferError, match="read-only"):
        tensor.__dlpack__()  # asks for no version: cannot be told
    copied = torch.from_dlpack(tensor, copy=True)
    assert type(copied) is torch.Tensor
    copied.zero_()
    assert torch.equal(tensor, value)
    writable = tiered_copy(value, Pager(MiB))
    torch.from_dlpack(writable)[0] = 5
    np.from_dlpack(writable)[1] = 6
    assert (writable[0] == 5).all()
    assert (writable[1] == 6).all()


def test_shared_memory_is_refused_and_other_memory_may_be_set(loaded: tuple[TieredTensor, torch.Tensor]) -> None:
    tensor, value = loaded
    with pytest.raises(UsageError, match=r"share_memory_.*clone"):
        tensor.share_memory_()
    writable = tiered_copy(value, Pager(MiB))
    with pytest.raises(UsageError):
        writable.share_memory_()
    with pytest.raises(ReadOnlyError):
        tensor.set_(torch.ones(3))
    other = torch.ones(3)
    writable.set_(other)
    writable.add_(1)
    assert other.tolist() == [2, 2, 2]
    assert torch.equal(tensor, value)


def test_default_device_and_dtype_change_nothing(saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    h3store.save({"none": torch.ones(0, 3), "w": saved[1]}, tmp_path / "z.h3")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            loaded = h3store.load(tmp_path / "z.h3")
    finally:
        torch.set_default_dtype(torch.float32)
    for name, shape in (("none", (0, 3)), ("w", (512, 1024))):
        tensor = loaded[name]
        assert (tensor.device.type, tensor.dtype, tuple(tensor.shape)) == ("cpu", torch.float32, shape)
    assert torch.equal(loaded["w"], saved[1])


def test_printing_a_huge_tensor_touches_its_edges_only(tmp_path: Path) -> None:
    with h3store.open(tmp_path / "h.h3", mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("t", (2**20, 1024), torch.float32)
        text = repr(tensor)
        assert text.startswith("TieredTensor([[0., 0., 0.")
        assert store.stats()["faults"] + store.stats()["prefetches"] <= 16


def test_parameter_autograd_and_module(loaded: tuple[TieredTensor, torch.Tensor]) -> None:
    tensor, value = loaded
    frozen = torch.nn.Parameter(tensor, requires_grad=False)
    assert isinstance(frozen, torch.nn.Parameter)
    layer = torch.nn.Linear(1024, 512, bias=False, device="meta")
    layer.load_state_dict({"weight": tensor}, assign=True)
    x = torch.randn(4, 1024, requires_grad=True)
    layer(x).sum().backward()
    plain = torch.randn(4, 1024).copy_(x.detach()).requires_grad_()
    torch.nn.functional.linear(plain, value).sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_copies_and_saves_hold_the_values(loaded: tuple[TieredTensor, torch.Tensor], tmp_path: Path) -> None:
    tensor, value = loaded
    assert torch.equal(copy.deepcopy(tensor), value)
    assert torch.equal(copy.deepcopy({"a": tensor})["a"], value)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), value)
    buffer = io.BytesIO()
    torch.save({"w": tensor}, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True)["w"], value)
    torch.save(tensor, tmp_path / "t.pt")
    assert torch.equal(torch.load(tmp_path / "t.pt", weights_only=True), value)
    module = torch.nn.Linear(1024, 512, bias=False)
    module.weight = torch.nn.Parameter(tensor, requires_grad=False)
    assert torch.equal(copy.deepcopy(module).weight, value)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compile_fullgraph(loaded: tuple[TieredTensor, torch.Tensor], backend: str) -> None:
    tensor, value = loaded
    compiled = torch.compile(lambda t: (t * 2 + 1).sum(0), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(tensor), (value * 2 + 1).sum(0))


def test_read_only_means_it(loaded: tuple[TieredTensor, torch.Tensor]) -> None:
    tensor, value = loaded
    attempts = {
        "add_": lambda: tensor.add_(1),
        "iadd": lambda: tensor.__iadd__(1),
        "setitem": lambda: tensor.__setitem__(0, 1.0),
        "view": lambda: tensor[3].zero_(),
        "out": lambda: torch.add(tensor, 1, out=tensor),
        "out_tuple": lambda: torch.max(
            torch.randn(1024, 512), 0, out=(tensor[0, :512], torch.empty(512, dtype=torch.int64))
        ),
        "function": lambda: torch.relu_(tensor),
        "inplace_flag": lambda: torch.nn.functional.relu(tensor, inplace=True),
        "init": lambda: torch.nn.init.normal_(tensor),
        "foreach": lambda: torch._foreach_add_([tensor], 1.0),
        "copy": lambda: tensor.copy_(value),
        "data": lambda: tensor.data.mul_(0),
    }
    for name, attempt in attempts.items():
        with pytest.raises(ReadOnlyError, match=r"w\.h3: tensor 'w'"):
            attempt()
        assert torch.equal(tensor, value), name
    with pytest.raises(ReadOnlyError):
        tensor += 1
    assert not tensor.numpy().flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(tensor)[0] = 1
    tensor.requires_grad_(True).requires_grad_(False)


def test_numpy_view_is_the_memory(loaded: tuple[TieredTensor, torch.Tensor]) -> None:
    tensor, value = loaded
    assert np.array_equal(tensor.numpy(), value.numpy())
    assert tensor.numpy().ctypes.data == tensor.data_ptr()
    assert np.array_equal(np.asarray(tensor, dtype=np.float64), value.double().numpy())
    assert torch.equal(torch.utils.dlpack.from_dlpack(tensor.detach()), value)


def test_pinned_memory_goes_through_system_calls(loaded: tuple[TieredTensor, torch.Tensor], tmp_path: Path) -> None:
    tensor, value = loaded
    with h3store.pin(tensor[:100]) as held:
        held.numpy().tofile(tmp_path / "raw")
    assert (tmp_path / "raw").read_bytes() == value[:100].numpy().tobytes()


def test_prefetch_counts_bytes(loaded: tuple[TieredTensor, torch.Tensor]) -> None:
    tensor, _ = loaded
    assert h3store.prefetch(tensor[0:64]) == 64 * 4096
    assert h3store.prefetch(tensor[0:16], tensor[256:272], torch.ones(5)) == 32 * 4096
    assert h3store.prefetch(tensor) <= MiB


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips(dtype: torch.dtype, tmp_path: Path) -> None:
    value = (torch.randn(130, 517) * 50).to(dtype)
    tensors = {"a": value, "t": value.T, "slice": value[::2, 3:50], "one": value[0, 0], "none": value[:0]}
    h3store.save(tensors, tmp_path / "d.h3")
    for name, tensor in h3store.load(tmp_path / "d.h3", ddr_bytes="1MiB").items():
        assert tensor.dtype == dtype
        assert tensor.shape == tensors[name].shape
        left, right = tensor.contiguous().reshape(-1), tensors[name].contiguous().reshape(-1)
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_written_evicted_and_reloaded(dtype: torch.dtype, tmp_path: Path) -> None:
    rows = 2 * MiB // (64 * dtype.itemsize)
    value = torch.randint(0, 256, (rows, 64 * dtype.itemsize), dtype=torch.uint8)
    value = value.bool() if dtype == torch.bool else value.view(dtype)  # every bit pattern, NaNs too
    with h3store.open(tmp_path / "d.h3", mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("t", (rows, 64), dtype)
        tensor[: rows // 2] = value[: rows // 2, :64]
        tensor[rows // 2 :].copy_(value[rows // 2 :, :64])
        assert store.stats()["write_backs"] > 0
        assert torch.equal(tensor.view(torch.uint8), value[:, :64].contiguous().view(torch.uint8))
    again = h3store.load(tmp_path / "d.h3", ddr_bytes="1MiB")["t"]
    assert again.dtype == dtype
    assert torch.equal(again.view(torch.uint8), value[:, :64].contiguous().view(torch.uint8))


def test_writable_views_see_one_anothers_writes(tmp_path: Path) -> None:
    with h3store.open(tmp_path / "v.h3", mode="w", ddr_bytes="1MiB") as store:
        first = store.create("t", (1024, 1024), torch.float32)
        second, column, flat = store["t"], first[:, 7], first.view(-1)
        parameter = torch.nn.Parameter(first)
        first[3, 7] = 1
        assert [second[3, 7].item(), column[3].item(), flat[3 * 1024 + 7].item(), parameter[3, 7].item()] == [1] * 4
        with torch.no_grad():
            parameter[4] = 2
        column += 5
        assert first[4, 6:9].tolist() == [2, 7, 2]
    assert h3store.load(tmp_path / "v.h3")["t"][3:5, 7].tolist() == [6, 7]


def test_more_than_two_to_the_31_elements(tmp_path: Path) -> None:
    with h3store.open(tmp_path / "big.h3", mode="w", ddr_bytes="4MiB") as store:
        tensor = store.create("big", (3, 2**30), torch.uint8)
        assert tensor.numel() > 2**31
        tensor[2, -5:] = 7
        tensor[0, 0] = 1
        assert tensor[2, -6:].tolist() == [0, 7, 7, 7, 7, 7]
    assert (tmp_path / "big.h3").stat().st_size < 3 * MiB  # blocks of zeros take an entry in the table, no more
    again = h3store.load(tmp_path / "big.h3", ddr_bytes="4MiB")["big"]
    assert again[2, -6:].tolist() == [0, 7, 7, 7, 7, 7]
    assert again[0, :2].tolist() == [1, 0]


class Rows(torch.utils.data.Dataset):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.tensor[i].clone()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader_workers_read_right(loaded: tuple[TieredTensor, torch.Tensor], method: str) -> None:
    tensor, value = loaded
    workers = torch.utils.data.DataLoader(Rows(tensor), batch_size=64, num_workers=2, multiprocessing_context=method)
    assert torch.equal(torch.cat(list(workers)), value)
    assert torch.equal(tensor, value)


@pytest.mark.parametrize("delivery", ["signal", "dispatch"])
def test_handlers_installed_by_others_do_not_take_our_faults(saved: tuple[Path, torch.Tensor], delivery: str) -> None:
    code = f"""
    import os, signal, faulthandler
    os.environ["H3STORE_DELIVERY"] = {delivery!r}
    import h3store, torch
    t = h3store.load({str(saved[0])!r}, ddr_bytes="1MiB")["w"]
    want = t.clone()
    faulthandler.enable()
    assert (t == want).all()
    signal.signal(signal.SIGBUS, lambda *a: None)
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    assert (t.numpy() == want.numpy()).all()
    h3store.signals.lib.h3_signals_ours() or exit(3)
    fired = []
    signal.signal(signal.SIGALRM, lambda *a: fired.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    for _ in range(20):
        assert (t == want).all()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert fired
    faulthandler.disable()
    assert (t == want).all()
    faulthandler.enable()
    import ctypes
    ctypes.string_at(0)  # not ours: the other handler still hears of it
    """
    done = run_python(code)
    assert done.returncode != 0
    assert "Segmentation fault" in done.stderr, done.stderr[-1500:]
    assert "string_at" in done.stderr


def test_forked_child_cannot_write_the_parents_file(tmp_path: Path) -> None:
    with h3store.open(tmp_path / "f.h3", mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("t", (64, 1024), torch.float32)
        tensor.fill_(3)
        pid = os.fork()
        if pid == 0:
            status = 1
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, whatever the tensor
            try:
                if (tensor == 3).all():
                    tensor.fill_(4)
            except ReadOnlyError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (h3store.load(tmp_path / "f.h3")["t"] == 3).all()


def test_shared_budget_is_a_bound_over_all_tensors(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(100, 1024) for i in range(30)}
    h3store.save(tensors, tmp_path / "s.h3")
    with h3store.open(tmp_path / "s.h3", ddr_bytes="1MiB") as store:
        held = {name: store[name] for name in store}
        for name, value in tensors.items():
            assert torch.equal(held[name], value)
        assert store.stats()["peak_resident_bytes"] <= MiB


def test_small_operations_on_scratch_memory() -> None:
    tensor = tiered_copy(torch.arange(1000.0), Pager(MiB))
    tensor += 1
    tensor[3] = -1
    torch.mul(tensor, 2, out=tensor)
    assert tensor[:5].tolist() == [2.0, 4.0, 6.0, -2.0, 10.0]
