"""Weights under a byte budget of their own: packed once into an archive, then read through tiered tensors.

Owns the packed archive's name and content. Only the large matrices are tiered; norms and biases stay in memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from h3store import store as stores
from h3store.archive import Writer
from h3store.errors import ArchiveNotFoundError
from h3store.models.checkpoint import Checkpoint
from h3store.models.config import LlamaConfig
from h3store.models.llama import load_weight, weight_names
from h3store.store import Store, add_tensor
from h3store.tensor import over_range

__all__ = ["open_weights", "packed_path"]

CHUNK_BYTES = 256 * 1024  # as much as a kernel holds at once, and long enough to read and decode at full speed


def packed_path(store_path: Path, name: str) -> Path:
    """Where the packed weights of a decoder lie: beside its store."""
    return store_path.with_name(f"{store_path.stem}.weights-{name[:16]}.h3")


def open_weights(path: Path, checkpoint: Checkpoint, config: LlamaConfig, dtype: torch.dtype | None,
                 ddr_bytes: int | str) -> tuple[Store, dict[str, Tensor]]:
    """Opens the packed weights, packing them first when there is no such file.

    Args:
        path: of the archive.
        checkpoint: where the weights come from.
        config: the model's numbers.
        dtype: as for `load_weights`.
        ddr_bytes: budget that all matrices share.

    Returns:
        The store, for the caller to close, and its read-only tensors by the names of `weight_names`.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
        BudgetError: the budget is below one chunk.
        StorageFullError: no room for the archive.
    """
    try:
        opened = stores.open(path, ddr_bytes=ddr_bytes)
    except ArchiveNotFoundError:
        _pack(path, checkpoint, config, dtype)
        opened = stores.open(path, ddr_bytes=ddr_bytes)
    weights: dict[str, Tensor] = {}
    for name, (_, shape) in weight_names(config).items():
        # the same order every step: a fixed part stays resident and the rest streams by
        tiered = opened.range(name, cyclic=True)
        weights[name] = over_range(tiered, getattr(torch, opened.record(name).dtype), shape)
    return opened, weights


def _pack(path: Path, checkpoint: Checkpoint, config: LlamaConfig, dtype: torch.dtype | None) -> None:
    with Writer(path, "w") as writer:
        for name in weight_names(config):
            add_tensor(writer, name, load_weight(checkpoint, config, name, dtype), chunk_bytes=CHUNK_BYTES)
        writer.commit()
