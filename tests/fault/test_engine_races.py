"""Faults that an adversary found in the storage engine, each as it was found."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import h3store
from h3store.archive import Reader
from h3store.errors import BudgetError, CorruptBlockError, H3Error, ReadOnlyError, StorageFullError
from h3store.kv import KVLayout, KVStore
from tests.tiered import DELIVERIES, run_python


@pytest.fixture(params=DELIVERIES)
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("H3STORE_DELIVERY", request.param)
    yield tmp_path / "a.h3"


def in_child(work: Callable[[], object]) -> int:
    """Exit code of a forked child: 0 if work returned true, 2 if it raised."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        torch.set_num_threads(1)
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_cannot_commit_over_its_parent(path: Path) -> None:
    store = h3store.open(path, mode="w", ddr_bytes="1MiB")
    store["x"] = torch.arange(1000.0)
    store.commit()

    def write_as_child() -> bool:
        for attempt in (lambda: store.put("c", torch.ones(9)), store.commit, lambda: store["x"].add_(1)):
            with pytest.raises(ReadOnlyError):
                attempt()
        store.close()
        return True

    store["y"] = torch.ones(100)
    assert in_child(write_as_child) == 0
    store.close()
    assert sorted(h3store.load(path)) == ["x", "y"]


def test_a_forked_child_leaves_a_new_file_to_its_parent(path: Path) -> None:
    h3store.save({"old": torch.ones(3)}, path)
    store = h3store.open(path, mode="w")
    store["new"] = torch.ones(4)
    assert in_child(lambda: store.close() is None) == 0
    store.close()
    assert list(h3store.load(path)) == ["new"]


def test_append_while_others_read_the_tail(path: Path) -> None:
    store = h3store.open(path, mode="w", ddr_bytes="1MiB")
    holder = {"t": store.create("x", (100, 100), torch.float32)}
    holder["t"].fill_(1)
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if not (holder["t"][-1].clone() == 1).all():
                wrong.append(1)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        longer = store.append("x", torch.zeros(7, 100))
        longer[-7:] = 1
        holder["t"] = longer
    stop.set()
    for thread in threads:
        thread.join()
    assert (longer == 1).all()
    assert len(longer) == 100 + 300 * 7


def test_reference_cycles_are_freed_in_any_order(path: Path) -> None:
    class Holder:
        pass

    for _ in range(10):
        store = h3store.open(path, mode="w", ddr_bytes="1MiB")
        tensor = store.create("x", (100_000,), torch.float32)
        tensor.fill_(1)
        holder = Holder()
        holder.me, holder.store, holder.tensor = holder, store, tensor  # type: ignore[attr-defined]
        del holder, store, tensor
        gc.collect()


def damaged(path: Path) -> int:
    """An archive whose tensor "x" has one damaged block; returns the block's first element."""
    h3store.save({"x": torch.randn(200_000).abs() + 1, "y": torch.ones(200_000)}, path)
    with Reader(path) as reader:
        entry = reader.chunks(reader.record("x"))[5]
    with path.open("r+b") as file:
        file.seek(int(entry["offset"]) + 100)
        file.write(bytes(64))
    return 5 * 16384


def test_every_operation_that_met_a_damaged_block_raises(path: Path) -> None:
    bad = damaged(path)
    x = h3store.load(path, ddr_bytes="1MiB")["x"]
    barrier, silent, raised = threading.Barrier(4), [], []

    def read() -> None:
        for _ in range(100):
            barrier.wait()
            try:
                if (x[bad : bad + 16384].clone() == 0).any():
                    silent.append(1)
            except CorruptBlockError:
                raised.append(1)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not silent
    assert raised
    assert torch.isfinite(x[:bad]).all()


def test_a_raw_reader_never_sees_zeros_because_another_thread_is_in_an_operation(path: Path) -> None:
    bad = damaged(path)
    done = run_python(f"""
    import threading, torch, h3store
    loaded = h3store.load({str(path)!r}, ddr_bytes="1MiB")
    x, y = loaded["x"], loaded["y"]
    def work():
        while True: y.sum()
    threading.Thread(target=work, daemon=True).start()
    (x[:10] + 1).sum()
    print(int((x.numpy()[{bad}:{bad} + 16384] == 0).sum()), flush=True)
    """)
    assert done.returncode < 0
    assert done.stdout == ""


def test_a_failed_put_keeps_what_was_there(path: Path) -> None:
    from h3store._ffi import lib

    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        store["x"] = torch.zeros(1000)
        store.commit()
        store["x"].fill_(5)
        lib.h3_fault_arm(lib.H3_FAULT_WRITE, 3, -1, 28)
        try:
            with pytest.raises(StorageFullError):
                store["x"] = torch.randn(1_000_000)
        finally:
            lib.h3_fault_arm(lib.H3_FAULT_WRITE, 0, 0, 0)
    assert (h3store.load(path)["x"] == 5).all()


def test_assigning_a_view_of_itself(path: Path) -> None:
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        store["x"] = torch.arange(100.0)
        old = store["x"]
        store["x"] = store["x"][:10]
        store["y"] = torch.arange(6.0).reshape(2, 3)
        store["y"] = store["y"].t()
        with pytest.raises(ReadOnlyError):
            old += 1  # nobody would see it
    loaded = h3store.load(path)
    assert torch.equal(loaded["x"], torch.arange(10.0))
    assert torch.equal(loaded["y"], torch.arange(6.0).reshape(2, 3).t())


def test_pins_leave_room_for_accesses_across_blocks(path: Path) -> None:
    block = 256 * 1024
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        a = store.create("a", (block,), torch.float32, chunk_bytes=block)
        b = store.create("b", (2 * block,), torch.float32, chunk_bytes=block)
        b.fill_(2)
        with h3store.pin(a[: block // 4]), h3store.pin(a[block // 4 : block // 2]):
            assert (b[1:-1].clone() == 2).all()
            with pytest.raises(BudgetError), h3store.pin(a[block // 2 : 3 * block // 4]):
                pass


def test_memory_that_is_locked_from_birth(path: Path) -> None:
    h3store.save({"x": torch.full((500_000,), 3.0)}, path)
    done = run_python(f"""
    import ctypes, torch, h3store
    assert ctypes.CDLL(None).mlockall(2) == 0
    assert (h3store.load({str(path)!r}, ddr_bytes="1MiB")["x"] == 3).all()
    """)
    assert done.returncode == 0 or "mlockall" in done.stderr, done.stderr


def test_freezing_and_casting_a_loaded_model(path: Path) -> None:
    h3store.save({"weight": torch.randn(8, 4), "bias": torch.zeros(8)}, path)
    model = torch.nn.Linear(4, 8)
    model.load_state_dict(h3store.load(path), assign=True)
    for parameter in model.parameters():
        parameter.requires_grad = False
    model.zero_grad()
    assert model.to(torch.float64)(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64


def test_kv_entries_that_do_not_fit_are_left_alone(path: Path) -> None:
    tokens = list(range(64))
    layout = KVLayout(2, 1, 16, torch.float32, block_tokens=16)
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        kept = KVStore(store, layout, "model")
        sequence = kept.sequence(tokens)
        sequence.reserve(64)
        with pytest.raises(H3Error):
            sequence.advance(-1)
        sequence.advance(64)
        assert kept.publish(sequence, tokens) == 64
        sequence.close()
    for other in (KVLayout(4, 1, 16, torch.float32, 16), KVLayout(2, 1, 16, torch.float32, 32),
                  KVLayout(2, 1, 16, torch.bfloat16, 16)):  # fmt: skip
        with h3store.open(path, ddr_bytes="1MiB") as store:
            assert KVStore(store, other, "model").sequence([*tokens, 1]).restored == 0
    with h3store.open(path, ddr_bytes="1MiB") as store:
        assert KVStore(store, layout, "model").sequence([*tokens, 1]).restored == 64
        name = next(name for name in store if name.endswith("/tokens"))
        offset = int(store.archive.chunks(store.record(name))[0]["offset"])
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 8)
    with h3store.open(path, ddr_bytes="1MiB") as store, pytest.warns(UserWarning, match="computed again"):
        assert KVStore(store, layout, "model").sequence([*tokens, 1]).restored == 0
