"""Sizes and seeds that benchmarks share. They do not depend on the machine, so that results of two machines compare."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from h3store.units import MiB

SEED = 20240229
# Large against the caches of a processor, small against a machine's memory.
TENSOR_BYTES = 64 * MiB


def seeded(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values, the same in every run."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(shape, generator=generator).to(dtype)


def kv_like(nbytes: int, dtype: str, heads: int = 3, head_dim: int = 64) -> np.ndarray:
    """Bytes of values spread like a K cache: each channel has its own scale, tokens follow one another.

    Returns:
        uint8, C-contiguous, nbytes long.
    """
    generator = torch.Generator().manual_seed(SEED)
    values = torch.empty(nbytes, dtype=torch.uint8).view(getattr(torch, dtype))
    scale = torch.exp(torch.randn(heads, head_dim, generator=generator))
    rows = torch.randn(-(-len(values) // scale.numel()), *scale.shape, generator=generator).mul_(scale)
    values.copy_(rows.view(-1)[:len(values)])
    return values.view(torch.uint8).numpy()


class Scratch:
    """A folder for one benchmark's files."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="h3store-bench-"))

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
