"""Signals, forks and worker processes: fault signals stay ours without taking them from anybody, a child reads what its
parent saw and disturbs nothing, DataLoader workers just work."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import h3store
from h3store.errors import ReadOnlyError
from h3store.tensor import range_of
from tests.tiered import DELIVERIES, run_python

MiB = 2**20


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    value = torch.arange(1024 * 1024, dtype=torch.float32).reshape(1024, 1024)
    h3store.save({"w": value}, tmp_path / "w.h3")
    return tmp_path / "w.h3", value


# ---- signals ----


def test_handlers_that_c_code_installs(saved: tuple[Path, torch.Tensor]) -> None:
    """A C library that takes SIGBUS for itself loses it to us at the next operation, and keeps its own faults."""
    done = run_python(f"""
    import ctypes, mmap, os, signal, h3store, torch
    t = h3store.load({str(saved[0])!r}, ddr_bytes="1MiB")["w"]
    libc = ctypes.CDLL(None)
    want = torch.arange(1024 * 1024, dtype=torch.float32).reshape(1024, 1024)
    seen = []
    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def theirs(number):
        seen.append(number); os.write(2, b"theirs"); os._exit(17)
    for handler in (0, 1, theirs):  # default, ignore, a function
        libc.signal(signal.SIGBUS, handler)
        assert torch.equal(t, want)
    path = {str(saved[0].with_name("other"))!r}
    with open(path, "wb") as file: file.write(bytes(8192))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 8192)
        file.truncate(100)
    mapped[5000]  # a fault that is not ours
    """)
    assert done.returncode == 17, (done.returncode, done.stderr[-1500:])
    assert done.stderr.endswith("theirs")


@pytest.mark.parametrize("prelude", ["", "import faulthandler; faulthandler.enable()\n"], ids=["plain", "faulthandler"])
def test_a_fault_of_somebody_else_ends_the_process_as_without_us(
    saved: tuple[Path, torch.Tensor], prelude: str
) -> None:
    code = """
    import mmap
    path = PATH
    with open(path, "wb") as file: file.write(bytes(8192))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 8192)
        file.truncate(100)
    mapped[5000]
    """.replace("PATH", repr(str(saved[0].with_name("other"))))
    ours = f"import h3store\nt = h3store.load({str(saved[0])!r}, ddr_bytes='1MiB')['w']\nt.sum()\n"
    without, within = run_python(code, prelude=prelude), run_python(code, prelude=prelude + ours)
    assert within.returncode == without.returncode == -signal.SIGBUS
    assert "h3store:" not in within.stderr
    assert ("Fatal Python error: Bus error" in within.stderr) == ("faulthandler" in prelude)


def test_threads_that_block_signals(saved: tuple[Path, torch.Tensor]) -> None:
    """A thread started with every signal blocked reads: its first operation unblocks the fault signals. One that blocks
    SIGBUS later is ended by the kernel at its next fault."""
    done = run_python(f"""
    import signal, threading, h3store, torch
    t = h3store.load({str(saved[0])!r}, ddr_bytes="1MiB")["w"]
    want = torch.arange(1024 * 1024, dtype=torch.float32).reshape(1024, 1024)
    right = []
    def read(block_again):
        right.append(torch.equal(t, want))
        if block_again:
            signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGBUS, signal.SIGSEGV}})
            t.numpy().sum()
            right.append(False)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threads = [threading.Thread(target=read, args=(again,)) for again in (False, True)]
    for thread in threads:
        thread.start(); thread.join()
        print(right, flush=True)
    """)
    assert done.returncode in (-signal.SIGBUS, -signal.SIGSEGV)
    assert done.stdout == "[True]\n"


@pytest.mark.parametrize("what", ["prefetch", "save", "commit", "torch.save"])
def test_ctrl_c_is_heard_at_once_and_leaves_everything_right(tmp_path: Path, what: str) -> None:
    path = tmp_path / "s.h3"
    value = torch.randn(24 * MiB // 4).repeat(4)  # 96 MiB: a second's work or so
    with h3store.open(path, mode="w", ddr_bytes="128MiB") as store:
        tensor = store.create("t", tuple(value.shape), value.dtype)
        tensor[:] = value
        if what == "prefetch":
            store.commit()
            range_of(tensor).drop()
        work: dict[str, Callable[[], object]] = {
            "prefetch": lambda: h3store.prefetch(tensor),
            "save": lambda: h3store.save({"t": tensor}, tmp_path / "copy.h3"),
            "commit": store.commit,
            "torch.save": lambda: torch.save({"t": tensor}, tmp_path / "copy.pt"),
        }
        asked: list[float] = []

        def interrupt(*_: object) -> None:
            asked.append(time.perf_counter())
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        try:
            with pytest.raises(KeyboardInterrupt):
                while True:
                    work[what]()
                    if what == "prefetch":
                        range_of(tensor).drop()
                    else:
                        tensor[::1000] += 1
                        value[::1000] += 1
            heard_s = time.perf_counter() - asked[0]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert heard_s < 1.5  # 0.1 s on an idle machine
        tensor[::1000] = value[::1000]  # where the interrupt fell between the two
        assert torch.equal(tensor, value)
    assert torch.equal(h3store.load(path, ddr_bytes="16MiB")["t"], value)


# ---- fork ----


def child(work: Callable[[], object]) -> int:
    """Forks, works in the child, and returns its pid; the child's status is 0 if work() returns true."""
    pid = os.fork()
    if pid == 0:
        status = 99
        signal.alarm(60)  # a hang is a failure
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, whatever the tensor
        try:
            status = 0 if work() else 1
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
        finally:
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_child_reads_what_its_parent_saw(tmp_path: Path, delivery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3STORE_DELIVERY", delivery)
    with h3store.open(tmp_path / "f.h3", mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("t", (1024, 512), torch.float32)
        tensor.fill_(3)
        store.commit()
        tensor[:512] = 4  # seen by the parent, not committed
        go_r, go_w = os.pipe()

        def read_after_the_parent_went_on() -> bool:
            os.read(go_r, 1)
            right = bool((tensor[:512] == 4).all() and (tensor[512:] == 3).all())
            for write in (lambda: tensor.fill_(9), store.commit, lambda: store.create("c", (1,), torch.float32)):
                try:
                    write()
                    return False
                except ReadOnlyError:
                    pass
            grandchild = child(lambda: bool((tensor[:512] == 4).all() and (tensor[512:] == 3).all()))
            return right and status_of(grandchild) == 0 and len(pickle.loads(pickle.dumps(tensor))) == 1024

        pid = child(read_after_the_parent_went_on)
        tensor.fill_(5)
        store.commit()
        os.write(go_w, b"x")
        assert (tensor == 5).all()
        assert status_of(pid) == 0
        tensor[0] = 6
        assert (tensor[1:] == 5).all()
        os.close(go_r), os.close(go_w)
    loaded = h3store.load(tmp_path / "f.h3", ddr_bytes="1MiB")["t"]
    assert (loaded[0] == 6).all()
    assert (loaded[1:] == 5).all()


def test_a_childs_budget_is_small_and_its_own(saved: tuple[Path, torch.Tensor]) -> None:
    with h3store.open(saved[0], ddr_bytes="256MiB") as store:
        tensor = store["w"]
        assert torch.equal(tensor, saved[1])
        resident = store.stats()["resident_bytes"]

        def check() -> bool:
            stats = store.stats()
            return stats["ddr_bytes"] == 64 * MiB and stats["resident_bytes"] == 0 and torch.equal(tensor, saved[1])

        assert status_of(child(check)) == 0
        assert store.stats()["resident_bytes"] == resident


@contextmanager
def load_on(tensor: torch.Tensor, scratch: torch.Tensor, wrong: list[str]) -> Iterator[None]:
    """Threads that fault and evict all the while: one checks a read-only tensor, one counts a writable one up."""
    stop = threading.Event()

    def read() -> None:
        row = 0
        while not stop.is_set():
            row = (row + 331) % 1024
            if tensor[row, 7].item() != row * 1024 + 7:
                wrong.append(f"row {row}")

    def write() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1  # row 1 first, row 0 last of a round
            scratch[turn % 1024] += 1
            if scratch[turn % 1024, 5] != (turn + 1023) // 1024:
                wrong.append(f"turn {turn}: {scratch[turn % 1024, 5]}")

    threads = [threading.Thread(target=read), threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_hundred_forks_under_load(saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    tensor = h3store.load(saved[0], ddr_bytes="1MiB")["w"]
    wrong: list[str] = []
    with h3store.open(tmp_path / "scratch.h3", mode="w", ddr_bytes="1MiB") as store:
        scratch = store.create("t", (1024, 1024), torch.float32)

        def check() -> bool:
            counts = scratch[::100, 0].clone()  # rows are counted up one after another: neighbours differ by one
            right = all(tensor[row, 3].item() == row * 1024 + 3 for row in (5, 400, 1000))
            return right and bool(counts.max() - counts.min() <= 1)

        with load_on(tensor, scratch, wrong):
            for turn in range(100):
                assert status_of(child(check)) == 0, f"fork {turn}"
        assert not wrong, wrong[:3]
        assert store.stats()["evictions"] > 0
        final = scratch.clone()
    assert torch.equal(h3store.load(tmp_path / "scratch.h3")["t"], final)
    assert bool((final == final[:, :1]).all())


# ---- workers ----


class Rows(Dataset):
    def __init__(self, tensor: torch.Tensor, crash_at: int = -1) -> None:
        self.tensor, self.crash_at = tensor, crash_at

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == self.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.tensor[i]  # a view: collating copies it


def test_persistent_workers_and_two_loaders_at_once(saved: tuple[Path, torch.Tensor]) -> None:
    path, value = saved
    tensor = h3store.load(path, ddr_bytes="1MiB")["w"]
    forked = {"num_workers": 2, "multiprocessing_context": "fork"}
    first = DataLoader(Rows(tensor), batch_size=100, persistent_workers=True, **forked)
    second = DataLoader(Rows(tensor[::2]), batch_size=50, **forked)
    for _ in range(2):
        for left, right in zip(first, second, strict=False):
            assert torch.equal(left[::2], right)
        assert torch.equal(torch.cat(list(first)), value)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_persistent_workers_of_other_kinds(saved: tuple[Path, torch.Tensor], method: str) -> None:
    path, value = saved
    tensor = h3store.load(path, ddr_bytes="1MiB")["w"]
    loader = DataLoader(
        Rows(tensor), batch_size=100, num_workers=2, persistent_workers=True, multiprocessing_context=method
    )
    for _ in range(2):
        assert torch.equal(torch.cat(list(loader)), value)


def test_pin_memory_is_harmless_without_a_gpu(saved: tuple[Path, torch.Tensor]) -> None:
    path, value = saved
    tensor = h3store.load(path, ddr_bytes="1MiB")["w"]
    loader = DataLoader(Rows(tensor), batch_size=256, num_workers=1, pin_memory=True, multiprocessing_context="fork")
    assert torch.equal(torch.cat([batch.cpu() for batch in loader]), value)


def test_a_crashed_worker_leaves_the_parent_whole(saved: tuple[Path, torch.Tensor]) -> None:
    path, value = saved
    tensor = h3store.load(path, ddr_bytes="1MiB")["w"]
    loader = DataLoader(Rows(tensor, crash_at=300), batch_size=100, num_workers=2, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="worker"):
        list(loader)
    assert torch.equal(tensor, value)
    assert torch.equal(torch.cat(list(DataLoader(Rows(tensor), batch_size=256, num_workers=2))), value)


def test_workers_of_a_writable_store(tmp_path: Path) -> None:
    with h3store.open(tmp_path / "w.h3", mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("t", (512, 1024), torch.float32)
        tensor[:] = torch.arange(512.0)[:, None]
        loader = DataLoader(Rows(tensor), batch_size=64, num_workers=2, multiprocessing_context="fork")
        assert torch.equal(torch.cat(list(loader))[:, 0], torch.arange(512.0))
        tensor += 1
        assert torch.equal(torch.cat(list(loader))[:, 5], torch.arange(512.0) + 1)
    assert torch.equal(h3store.load(tmp_path / "w.h3")["t"][:, 9], torch.arange(512.0) + 1)


def test_queues_carry_tensors(saved: tuple[Path, torch.Tensor]) -> None:
    path, value = saved
    tensor = h3store.load(path, ddr_bytes="1MiB")["w"]
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    for item in (tensor, tensor[3:5, ::2], {"row": tensor[7]}, torch.nn.Parameter(tensor, requires_grad=False)):
        queue.put(item)
    got = [queue.get(timeout=60) for _ in range(4)]
    assert torch.equal(got[0], value)
    assert torch.equal(got[1], value[3:5, ::2])
    assert torch.equal(got[2]["row"], value[7])
    assert isinstance(got[3], torch.nn.Parameter)
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store["w"][0] = -1
        queue.put(store["w"][:2])
        assert (queue.get(timeout=60)[0] == -1).all()
    queue.close()
    queue.join_thread()
