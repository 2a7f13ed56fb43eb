"""Named tensors under one budget: create, write, append, commit, close; what modes allow, and what errors say."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import h3store
from h3store.errors import (
    ArchiveFormatError,
    ArchiveLockedError,
    ArchiveNotFoundError,
    BudgetError,
    CorruptArchiveError,
    CorruptBlockError,
    ReadOnlyError,
    StoreClosedError,
    TensorNotFoundError,
    UsageError,
)

MiB = 1024 * 1024


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.h3"


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_create_is_zero_filled_and_writes_last(path: Path) -> None:
    value = rows(700, 999)
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("a", (700, 999), torch.float32)
        assert not tensor.any()
        store["a"][:350] = value[:350]
        tensor[350:] = value[350:]
        assert torch.equal(store["a"], value)
        assert store.stats()["evictions"] > 0
    assert torch.equal(h3store.load(path, ddr_bytes="1MiB")["a"], value)


def test_reopened_for_writing_sees_and_changes(path: Path) -> None:
    h3store.save({"a": rows(100, 1000), "b": torch.arange(10)}, path)
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store["a"][7] = 0
        store["b"] += 5
    loaded = h3store.load(path)
    assert (loaded["a"][7] == 0).all()
    assert torch.equal(loaded["a"][8:], rows(100, 1000)[8:])
    assert torch.equal(loaded["b"], torch.arange(10) + 5)


def test_append_along_the_first_dimension(path: Path) -> None:
    expected = rows(3, 257, 5)
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("log", (3, 257, 5), torch.float32)
        tensor[:] = expected
        for seed, count in enumerate((1, 2, 100, 0, 3000), start=1):
            more = rows(count, 257, 5, seed=seed)
            tensor = store.append("log", more)
            expected = torch.cat([expected, more])
            assert tensor.shape == expected.shape
            assert torch.equal(tensor, expected)
            if count == 2:
                store.commit()
    assert torch.equal(h3store.load(path, ddr_bytes="1MiB")["log"], expected)
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store.append("log", rows(2, 257, 5))
    assert len(h3store.load(path)["log"]) == len(expected) + 2


def test_append_from_nothing_and_past_the_reserved_space(path: Path) -> None:
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        first = store.create("n", (0, 1024), torch.float64)
        assert first.shape == (0, 1024)
        tensor = store.append("n", torch.ones(10, 1024, dtype=torch.float64))
        big = torch.full((12_000, 1024), 2.0, dtype=torch.float64)  # more than was reserved
        grown = store.append("n", big)
        assert torch.equal(grown[:10], tensor)
        with pytest.raises(ReadOnlyError):
            tensor[0] = 5  # a handle from before would write where nobody looks
        grown[0] = 7
    loaded = h3store.load(path, ddr_bytes="1MiB")["n"]
    assert loaded.shape == (12_010, 1024)
    assert (loaded[0] == 7).all()
    assert (loaded[10:] == 2).all()


def test_shapes_are_taken_as_torch_takes_them(path: Path) -> None:
    with h3store.open(path, mode="w") as store:
        assert store.create("int", 5, torch.float32).shape == (5,)
        assert store.create("list", [2, 3], torch.float32).shape == (2, 3)
        assert store.create("size", torch.Size([4]), torch.float32).shape == (4,)
        assert f"{store.create('zero', (), torch.float32):.2f}" == "0.00"
        with pytest.raises(UsageError, match="rows to append are a list"):
            store.append("int", [1.0])  # type: ignore[arg-type]  # what the test is about


def test_append_refuses_what_does_not_fit(path: Path) -> None:
    with h3store.open(path, mode="w") as store:
        store.create("a", (4, 5), torch.float32)
        store.create("s", (), torch.float32)
        for bad in (torch.ones(2, 6), torch.ones(5), torch.ones(1, 5, 1)):
            with pytest.raises(UsageError, match=r"'a' has shape \(4, 5\); rows of shape"):
                store.append("a", bad)
        with pytest.raises(UsageError, match=r"'a' is float32; rows are torch.float16"):
            store.append("a", torch.ones(2, 5, dtype=torch.float16))
        with pytest.raises(UsageError, match="along dimension 0"):
            store.append("s", torch.ones(1))


def test_commit_is_all_or_nothing_and_close_commits(path: Path) -> None:
    store = h3store.open(path, mode="w", ddr_bytes="1MiB")
    store.create("a", (1000,), torch.int64)[:] = 1
    first = store.commit()
    assert store.commit() == first  # nothing changed, nothing written
    store["a"][:] = 2
    assert (h3store.load(path)["a"] == 1).all()
    store.close()
    assert (h3store.load(path)["a"] == 2).all()
    with pytest.raises(ZeroDivisionError), h3store.open(path, mode="r+") as store:
        store["a"][:] = 3
        store.create("b", (5,), torch.int64)
        raise ZeroDivisionError
    loaded = h3store.load(path)
    assert (loaded["a"] == 2).all()
    assert "b" not in loaded


def test_mode_w_keeps_the_old_file_until_the_first_commit(path: Path) -> None:
    h3store.save({"old": torch.ones(3)}, path)
    store = h3store.open(path, mode="w")
    store.create("new", (3,), torch.float32)
    assert list(h3store.load(path)) == ["old"]
    store.commit()
    assert list(h3store.load(path)) == ["new"]
    store.close()


def test_a_reader_keeps_its_version(path: Path) -> None:
    value = rows(2000, 300)
    h3store.save({"a": value}, path)
    reader = h3store.load(path, ddr_bytes="1MiB")["a"]
    with h3store.open(path, mode="r+", ddr_bytes="1MiB") as store:
        store["a"][:] = 0
        store.commit()
        assert torch.equal(reader, value)
    assert not h3store.load(path)["a"].any()


def test_tensors_outlive_their_store(path: Path) -> None:
    value = rows(1000, 1000)
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("a", (1000, 1000), torch.float32)
        tensor[:] = value
    assert torch.equal(tensor, value)
    with pytest.raises(ReadOnlyError):
        tensor[0] = 1
    with h3store.open(path, ddr_bytes="1MiB") as store:
        again = store["a"]
    assert torch.equal(again, value)


def test_put_remove_and_names(path: Path) -> None:
    with h3store.open(path, mode="w") as store:
        store.put("x", torch.arange(6).view(2, 3))
        store.put("x", torch.zeros(4))
        store.create("y", (1,), torch.bool)
        assert sorted(store) == ["x", "y"] == sorted(store.keys())
        assert "x" in store
        assert "z" not in store
        assert len(store) == 2
        store.remove("y")
        with pytest.raises(TensorNotFoundError, match="no tensor named 'y'"):
            store["y"]
        with pytest.raises(KeyError):
            store.remove("y")
    assert torch.equal(h3store.load(path)["x"], torch.zeros(4))


def test_each_bad_call_gets_one_clear_error(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveNotFoundError, match=r"s\.h3"):
        h3store.open(path)
    with pytest.raises(ArchiveNotFoundError):
        h3store.open(path, mode="r+")
    with pytest.raises(UsageError, match="mode 'a' is not known"):
        h3store.open(path, mode="a")
    (tmp_path / "text").write_text("hello, I am no archive at all, however long I go on\n" * 200)
    with pytest.raises(ArchiveFormatError, match="text"):
        h3store.open(tmp_path / "text")
    (tmp_path / "empty").write_text("")
    with pytest.raises((ArchiveFormatError, CorruptArchiveError), match="empty"):
        h3store.open(tmp_path / "empty")
    with pytest.raises(ArchiveFormatError, match="folder"):
        h3store.open(tmp_path)
    for budget in ("lots", "-5MiB", -1, "12 parsecs"):
        with pytest.raises(UsageError, match="ddr_bytes"):
            h3store.open(path, mode="w", ddr_bytes=budget)
    with pytest.raises(BudgetError, match="below one page"):
        h3store.open(path, mode="w", ddr_bytes=10)
    with h3store.open(path, mode="w", ddr_bytes="64KiB") as store:
        with pytest.raises(BudgetError, match=r"'a': two blocks of 64\.0 KiB do not fit the ddr budget of 64\.0 KiB"):
            store.create("a", (5,), torch.float32)
        with pytest.raises(UsageError, match="chunk_bytes is 5000"):
            store.create("b", (5,), torch.float32, chunk_bytes=5000)
        with pytest.raises(UsageError, match="shape"):
            store.create("c", (-1,), torch.float32)
        for shape in ((1.5,), "5", None, 2.0):
            with pytest.raises(UsageError, match="shape"):
                store.create("c", shape, torch.float32)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"the limit is 8\.0 TiB"):
            store.create("c", (10**7, 10**9), torch.float32)
        with pytest.raises(BudgetError, match=r"table of .* in memory.*chunk_bytes"):
            store.create("c", (2**41 - 1, 1), torch.float32, chunk_bytes=4096)
        with pytest.raises(UsageError, match="dtype is None"):
            store.create("c", (2,), None)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="cannot be stored"):
            store.create("d", (2,), torch.quint8)
        with pytest.raises(UsageError, match="sparse"):
            store.put("e", torch.eye(3).to_sparse())
        with pytest.raises(ArchiveLockedError, match="another writer"):
            h3store.open(path, mode="r+")
    with pytest.raises(StoreClosedError, match="was closed"):
        store.keys()
    store.close()
    with h3store.open(path) as store, pytest.raises(ReadOnlyError, match='open it with mode="r\\+"'):
        store.create("f", (2,), torch.float32)
    with pytest.raises(UsageError, match="mapping"):
        h3store.save([torch.ones(2)], path)  # type: ignore[arg-type]  # what the test is about
    for bad in ({1: torch.ones(2)}, {"a": [1, 2]}, {"a": torch.ones(2, device="meta")}, {"a\0b": torch.ones(1)}):
        with pytest.raises(UsageError, match="tensor"):
            h3store.save(bad, tmp_path / "never.h3")  # type: ignore[arg-type]
        assert not (tmp_path / "never.h3").exists()
    with pytest.raises(UsageError, match="difference to itself"):
        h3store.save({"a": torch.ones(2)}, path, base=path)


def test_a_failed_create_leaves_no_name_behind(path: Path) -> None:
    with h3store.open(path, mode="w", ddr_bytes="64KiB") as store:
        with pytest.raises(BudgetError):
            store.create("a", (5,), torch.float32)
        assert "a" not in store


def test_difference_to_a_base(tmp_path: Path) -> None:
    base = {"w": rows(300, 1000).to(torch.bfloat16), "same": rows(50, 1000), "other": rows(10)}
    step = {"w": base["w"].clone(), "same": base["same"].clone(), "other": rows(11), "new": rows(5)}
    step["w"][::50] += 1
    h3store.save(base, tmp_path / "base.h3")
    h3store.save(step, tmp_path / "plain.h3")
    h3store.save(step, tmp_path / "step.h3", base=tmp_path / "base.h3")
    assert (tmp_path / "step.h3").stat().st_size < 0.2 * (tmp_path / "plain.h3").stat().st_size
    loaded = h3store.load(tmp_path / "step.h3", ddr_bytes="1MiB")
    for name, value in step.items():
        assert torch.equal(loaded[name], value)
    second = {name: value + 1 for name, value in step.items()}
    second["same"] = step["same"]
    h3store.save(second, tmp_path / "two.h3", base=tmp_path / "step.h3")  # a base that leans on a base
    loaded = h3store.load(tmp_path / "two.h3", ddr_bytes="1MiB")
    for name, value in second.items():
        assert torch.equal(loaded[name], value)
    h3store.save({"w": rows(300, 1000).to(torch.bfloat16)}, tmp_path / "base.h3")
    with pytest.raises(CorruptArchiveError, match=r"step\.h3: tensor .* needs the base archive .*base\.h3"):
        h3store.load(tmp_path / "step.h3", ddr_bytes="1MiB")
    (tmp_path / "base.h3").unlink()
    with pytest.raises(ArchiveNotFoundError, match=r"base\.h3"):
        h3store.load(tmp_path / "step.h3", ddr_bytes="1MiB")


def test_no_archive_becomes_a_difference_to_itself_however_far_around(tmp_path: Path) -> None:
    value = rows(300, 1000)
    for base, name in ((None, "a"), ("a", "b"), ("b", "c")):
        h3store.save({"w": value}, tmp_path / f"{name}.h3", base=base and tmp_path / f"{base}.h3")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for base, why in (("a", "itself"), ("b", r"b\.h3, which is a difference to it"), ("c", r"c\.h3, which is")):
        with pytest.raises(UsageError, match=why):
            h3store.save({"w": value}, tmp_path / "a.h3", base=tmp_path / f"{base}.h3")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    h3store.save({"w": value}, tmp_path / "c.h3", base=tmp_path / "a.h3")  # nothing leans on c


def test_an_error_says_that_the_base_was_written_since(tmp_path: Path) -> None:
    value = rows(300, 1000)
    h3store.save({"w": value}, tmp_path / "base.h3")
    h3store.save({"w": value}, tmp_path / "step.h3", base=tmp_path / "base.h3")
    with h3store.open(tmp_path / "base.h3", mode="r+") as store:
        store["w"][:] = 0
    loaded = h3store.load(tmp_path / "step.h3", ddr_bytes="1MiB")["w"]
    with pytest.raises(CorruptBlockError, match=r"step\.h3.*difference to .*base\.h3, which was written since"):
        loaded.sum()


def test_default_budget_follows_the_machine(path: Path) -> None:
    h3store.save({"a": torch.ones(10)}, path)
    with h3store.open(path) as store:
        assert store.stats()["ddr_bytes"] >= 64 * MiB


def test_a_forked_child_is_not_locked_out_by_a_thread_it_does_not_have(path: Path) -> None:
    h3store.save({"a": rows(64, 1024)}, path)
    store = h3store.open(path, ddr_bytes="1MiB")
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with store._lock:
            held.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        torch.set_num_threads(1)
        os._exit(0 if torch.equal(store["a"], rows(64, 1024)) else 1)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_tied_tensors_are_stored_once_and_share_memory_again(tmp_path: Path) -> None:
    weight = rows(500, 400)
    tied = {"a": weight, "b": weight, "flat": weight.view(-1), "t": weight.T, "t2": weight.T, "other": weight.clone()}
    tied |= {"zero": torch.zeros(100, 100), "view": weight[2:]}
    h3store.save({"a": weight, "t": weight.T, "other": weight, "view": weight[2:]}, tmp_path / "once.h3")
    h3store.save(tied, tmp_path / "tied.h3")
    h3store.save({name: value.clone() for name, value in tied.items()}, tmp_path / "loose.h3")
    sizes = {name: (tmp_path / f"{name}.h3").stat().st_size for name in ("tied", "loose")}
    assert sizes["tied"] < 0.6 * sizes["loose"]
    loaded = h3store.load(tmp_path / "tied.h3", ddr_bytes="1MiB")
    for name, value in tied.items():
        assert torch.equal(loaded[name], value), name
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() == loaded["flat"].data_ptr()
    assert loaded["t"].data_ptr() == loaded["t2"].data_ptr() != loaded["a"].data_ptr()
    with h3store.open(tmp_path / "tied.h3", mode="r+", ddr_bytes="1MiB") as store:
        store["b"][0] = 7  # names are written one by one
        store.remove("a")
        store.append("flat", torch.ones(3))
    loaded = h3store.load(tmp_path / "tied.h3", ddr_bytes="1MiB")
    assert (loaded["b"][0] == 7).all()
    assert torch.equal(loaded["b"][1:], weight[1:])
    assert torch.equal(loaded["flat"][:-3], weight.view(-1))
    assert torch.equal(loaded["other"], weight)


def test_memory_that_is_used_again_is_not_taken_for_a_tie(tmp_path: Path) -> None:
    class Lazy(dict):  # type: ignore[type-arg]
        """Makes each tensor when asked, so that one may lie where the last one lay."""

        def items(self):  # type: ignore[no-untyped-def]
            return ((f"t{i}", torch.full((100_000,), float(i))) for i in range(8))

    h3store.save(Lazy(), tmp_path / "lazy.h3")
    for name, tensor in h3store.load(tmp_path / "lazy.h3").items():
        assert (tensor == float(name[1:])).all()
