"""Any one bit of an archive flipped: the tensors read as they were saved, or an error says so. Never other bytes."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

import h3store
from h3store.errors import H3Error


def make(path: Path) -> dict[str, torch.Tensor]:
    """An archive that has some of everything: filters, records of changed pages, growth, dead chunks, two commits."""
    generator = torch.Generator().manual_seed(3)
    weights = (torch.randn(40, 256, generator=generator) * 0.02).bfloat16()
    table = torch.randint(0, 50, (24, 512), generator=generator)
    with h3store.open(path, mode="w", ddr_bytes="4MiB") as store:
        store.put("weights", weights)
        store.create("table", table.shape, table.dtype)[:] = table
        store.put("noise", torch.rand(300, generator=generator, dtype=torch.float64))
        store.put("plain", weights[:4], compression="none")
        store.create("zeros", (10_000,), torch.float32)
        store.commit()
        table[5] = -7
        store["table"][5] = -7  # a record of one changed page
        more = torch.arange(512).reshape(1, 512)
        store.append("table", more)
    tensors = {"weights": weights, "table": torch.cat([table, more]), "plain": weights[:4]}
    return {**tensors, "noise": h3store.load(path)["noise"].clone(), "zeros": torch.zeros(10_000)}


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


@pytest.mark.parametrize("flips", [250, pytest.param(5000, marks=pytest.mark.slow)])
def test_every_flip_is_detected_or_harmless(flips: int, tmp_path: Path) -> None:
    path = tmp_path / "a.h3"
    saved = make(path)
    rng = random.Random(flips)
    bits = path.stat().st_size * 8
    detected = 0
    for round_ in range(flips):
        bit = rng.randrange(bits)
        flip(path, bit)
        try:
            loaded = h3store.load(path, ddr_bytes="4MiB")
            assert loaded.keys() == saved.keys()
            for name, tensor in saved.items():
                held = loaded[name]
                assert held.dtype == tensor.dtype, f"bit {bit}: {name}"
                assert torch.equal(held.clone(), tensor), f"bit {bit}: {name} reads wrong"
        except H3Error:
            detected += 1
        finally:
            flip(path, bit)
        if round_ % 100 == 0:
            gc.collect()
    assert detected > flips * 0.5
