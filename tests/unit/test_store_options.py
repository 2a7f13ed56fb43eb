"""What a writer declares of a tensor: access sets the size of chunks, compression="none" keeps them raw for good."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import h3store
from h3store.archive import TensorInfo, describe
from h3store.errors import UsageError

KiB = 1024
COUNT = 300_000  # elements: 600 KB of bfloat16, two chunks even of 512 KiB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.h3"


def weights(seed: int = 0) -> torch.Tensor:
    return (torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)) * 0.02).to(torch.bfloat16)


def told(path: Path) -> dict[str, TensorInfo]:
    return {tensor.name: tensor for tensor in describe(path).tensors}


ACCESS = pytest.mark.parametrize(
    ("access", "chunk_bytes"),
    [(None, 64 * KiB), ("default", 64 * KiB), ("random", 16 * KiB), ("stream", 512 * KiB)],
)


@ACCESS
def test_access_sets_the_size_of_chunks(path: Path, access: str | None, chunk_bytes: int) -> None:
    value = weights()
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        store.create("created", (COUNT,), torch.bfloat16, access=access)[:] = value
        store.put("put", value, access=access)
    h3store.save({"saved": value}, saved := path.with_name("saved.h3"), access=access)
    for info in (told(path) | told(saved)).values():
        assert info.chunk_bytes == chunk_bytes
        assert info.access == (access or "default")
        assert info.compression == "auto" and info.ratio > 1.4
    for loaded in (h3store.load(path, ddr_bytes="1MiB") | h3store.load(saved, ddr_bytes="1MiB")).values():
        assert torch.equal(loaded, value)


def test_no_compression_is_kept_by_every_later_write(path: Path) -> None:
    """Whatever a trial would say: of weights, of zeros, at eviction, at commit, after reopening, at append."""
    with h3store.open(path, mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("raw", (COUNT,), torch.bfloat16, compression="none")
        store.commit()
        tensor[:] = weights()
    for seed in (1, 2):
        with h3store.open(path, mode="r+", ddr_bytes="256KiB" if seed == 1 else "1MiB") as store:
            store["raw"][:COUNT] = weights(seed)
            store.append("raw", weights(seed)[:1000])
        info = told(path)["raw"]
        assert info.compression == "none" and set(info.filters) == {"RAW"}
        assert info.stored_bytes == info.raw_bytes == 2 * (COUNT + 1000 * seed)
    assert torch.equal(h3store.load(path)["raw"][:COUNT], weights(2))


def test_saved_raw_is_the_bytes_themselves(path: Path) -> None:
    value = weights()
    h3store.save({"a": value, "none": torch.zeros(0, 3), "ones": torch.ones(70_000)}, path, compression="none")
    assert value.view(torch.uint8).numpy().tobytes() in path.read_bytes()
    assert {info.compression for info in told(path).values()} == {"none"}
    assert told(path)["ones"].filters == {"RAW": 5}
    loaded = h3store.load(path)
    assert torch.equal(loaded["a"], value) and torch.equal(loaded["ones"], torch.ones(70_000))


def test_what_a_trial_left_raw_is_not_a_wish(path: Path) -> None:
    noise = torch.randint(0, 256, (200_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    h3store.save({"noise": noise}, path)
    assert told(path)["noise"].filters == {"RAW": 4} and told(path)["noise"].compression == "auto"


def test_a_replaced_tensor_keeps_what_was_declared(path: Path) -> None:
    with h3store.open(path, mode="w") as store:
        store.create("a", (COUNT,), torch.bfloat16, access="random", compression="none")
        store["a"] = weights()
        store.put("b", weights(), access="stream")
        store.put("b", weights(1), compression="none")
        store.put("c", weights(), access="random", compression="none")
        store.put("c", weights(), access="default", compression="auto")
    found = {name: (info.access, info.compression, set(info.filters)) for name, info in told(path).items()}
    assert found == {"a": ("random", "none", {"RAW"}), "b": ("stream", "none", {"RAW"}),
                     "c": ("default", "auto", {"EXPNIBBLE"})}  # fmt: skip


@pytest.mark.parametrize("bad", [
    {"access": "sequential"}, {"access": 16384}, {"access": ["random"]}, {"access": ""},
    {"compression": "zstd"}, {"compression": False}, {"compression": {}}, {"compression": ""},
])  # fmt: skip
def test_a_bad_value_is_one_clear_error(path: Path, bad: dict[str, object]) -> None:
    (word,) = bad
    said = rf"{word}=.*use \"(default\", \"random\" or \"stream|auto\" or \"none)\""
    with pytest.raises(UsageError, match=said):
        h3store.save({"a": weights()}, path, **bad)  # type: ignore[arg-type]  # what the test is about
    assert not path.exists()
    with h3store.open(path, mode="w") as store:
        with pytest.raises(UsageError, match=said):
            store.create("a", (4,), torch.float32, **bad)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=said):
            store.put("a", weights(), **bad)  # type: ignore[arg-type]
        assert not store.keys()


def test_options_that_exclude_one_another(path: Path) -> None:
    with h3store.open(path, mode="w") as store, pytest.raises(UsageError, match="give one"):
        store.create("a", (4,), torch.float32, access="random", chunk_bytes=4096)
    h3store.save({"a": weights()}, path)
    for option in ({"access": "random"}, {"compression": "none"}):
        with pytest.raises(UsageError, match="base= stores differences"):
            h3store.save({"a": weights()}, path.with_name("d.h3"), base=path, **option)  # type: ignore[arg-type]
