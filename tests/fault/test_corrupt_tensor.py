"""A damaged archive under live tensors: one clear error, the other tensors unharmed, never a wrong byte."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import h3store
from h3store.archive import Reader
from h3store.errors import ArchiveNotFoundError, CorruptArchiveError, CorruptBlockError
from tests.tiered import DELIVERIES, run_python


@pytest.fixture
def archive(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "good": torch.randn(50_000, generator=generator),
        "bad": torch.randn(100_000, generator=generator).to(torch.bfloat16),
    }
    path = tmp_path / "a.h3"
    h3store.save(tensors, path)
    return path, tensors


def damage(path: Path, name: str, block: int) -> None:
    """Flips one bit in the middle of a stored chunk."""
    with Reader(path) as reader:
        entry = reader.chunks(reader.record(name))[block]
    with path.open("r+b") as file:
        file.seek(int(entry["offset"]) + int(entry["stored_bytes"]) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_damaged_block_raises_and_the_rest_still_reads(
    archive: tuple[Path, dict[str, torch.Tensor]], delivery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H3STORE_DELIVERY", delivery)
    path, tensors = archive
    damage(path, "bad", 2)
    loaded = h3store.load(path, ddr_bytes="1MiB")
    per_block = 64 * 1024 // 2
    for _ in range(3):  # every time, not only the first
        with pytest.raises(CorruptBlockError, match=r"a\.h3: tensor 'bad', block 2 \(bytes from 131072\)"):
            loaded["bad"].float().sum()
    assert torch.equal(loaded["good"], tensors["good"])
    assert torch.equal(loaded["bad"][: 2 * per_block], tensors["bad"][: 2 * per_block])
    assert torch.equal(loaded["bad"][3 * per_block :], tensors["bad"][3 * per_block :])
    with pytest.raises(CorruptBlockError):
        h3store.prefetch(loaded["bad"])
    with pytest.raises(CorruptBlockError), h3store.pin(loaded["bad"]):
        pass
    with pytest.raises(CorruptBlockError):
        h3store.save({"copy": loaded["bad"]}, path.with_name("copy.h3"))
    assert not path.with_name("copy.h3").exists() or not h3store.load(path.with_name("copy.h3"))


def test_raw_access_to_a_damaged_block_ends_the_process_with_one_line(
    archive: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, _ = archive
    damage(path, "bad", 2)
    done = run_python(
        f"import h3store, torch\nh3store.load({str(path)!r})['bad'].view(torch.int16).numpy().sum()"
    )
    assert done.returncode == -signal.SIGBUS
    assert "a.h3: tensor 'bad', block 2: " in done.stderr
    assert done.stderr.count("\n") == 1


def test_file_cut_while_open(archive: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = archive
    loaded = h3store.load(path, ddr_bytes="1MiB")
    os.truncate(path, 20_000)
    with pytest.raises(CorruptArchiveError, match=r"tensor 'bad', block \d+"):
        loaded["bad"].float().sum()
    with pytest.raises(CorruptArchiveError):
        h3store.load(path)
    with pytest.raises(ArchiveNotFoundError, match=r"b\.h3"):
        h3store.load(path.with_name("b.h3"))


def test_damage_anywhere_is_detected_or_harmless(archive: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = archive
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    noticed = 0
    for position in rng.integers(0, len(whole), 150):
        broken = bytearray(whole)
        broken[position] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(bytes(broken))
        try:
            loaded = h3store.load(path, ddr_bytes="1MiB")
            assert all(torch.equal(loaded[name], tensors[name]) for name in tensors), position
        except h3store.H3Error:
            noticed += 1
    assert noticed > 120
