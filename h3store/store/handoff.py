"""TieredTensors sent to other processes by multiprocessing (DataLoader workers started by spawn or forkserver). Owns
the reference that is sent instead of the bytes, and the stores that the receiving process opens for it. Refuses plain
pickle and torch.save: what they write must outlive the archive."""

from __future__ import annotations

import functools
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from h3store.errors import CorruptArchiveError
from h3store.store.named import Store, origin_of
from h3store.tensor import TieredTensor, range_of
from h3store.units import MiB

__all__ = ["register"]

_WORKER_BYTES = 64 * MiB


@functools.cache
def _store(path: str, ddr_bytes: int) -> Store:
    """The receiving process's one store per archive: its tensors share a budget."""
    return Store(path, "r", ddr_bytes)


def _attach(
    path: str, name: str, identity: tuple[bytes, int], ddr_bytes: int, geometry: tuple[Any, ...]
) -> torch.Tensor:
    """Returns the same view of the same tensor in this process."""
    store = _store(path, ddr_bytes)
    if origin_of(store, name) != identity:
        raise CorruptArchiveError(
            f"{path}: tensor {name!r} has changed since it was sent to this process; send it again"
        )
    size, stride, offset, is_parameter, requires_grad = geometry
    tensor = store[name].as_strided(size, stride, offset)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _rebuild(data: bytearray, dtype: torch.dtype, size: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(size).requires_grad_(requires_grad)


def _reduce(tensor: TieredTensor) -> Any:
    tiered = range_of(tensor)
    if tiered is None or tiered.writable or tiered.origin is None:
        plain = tensor.detach().clone().as_subclass(torch.Tensor).contiguous()
        data = bytearray(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return _rebuild, (data, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
    path, name, identity = tiered.origin
    geometry = (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        getattr(tensor, "_is_param", False),
        tensor.requires_grad,
    )
    return _attach, (path, name, identity, min(tiered.pager.ddr_bytes, _WORKER_BYTES), geometry)


def register() -> None:
    """Makes multiprocessing send TieredTensors by reference."""
    ForkingPickler.register(TieredTensor, _reduce)
