"""What callers ask of memory: bytes early, bytes held. Works on tensors and slices; plain tensors pass through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from h3store.errors import UsageError
from h3store.tensor import byte_span, range_of

__all__ = ["pin", "prefetch"]


def prefetch(*tensors: torch.Tensor) -> int:
    """Makes tensors or slices of tensors resident, as far as their budgets allow. Blocks on the disk; Ctrl-C works.

    Returns: bytes resident afterwards, counted per call. Ordinary tensors count nothing.
    """
    for tensor in tensors:
        _check_tensor(tensor, "prefetch")
    total = 0
    for tensor in tensors:
        tiered = range_of(tensor)
        if tiered is not None:
            total += tiered.prefetch(*byte_span(tensor))
    return total


@contextmanager
def pin(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Holds a tensor or slice resident inside the with-block, so that system calls may be given its memory, to read
    from and, where it is writable, to write to.

    Raises:
        BudgetError: it does not fit the budget beside what is pinned already.
    """
    _check_tensor(tensor, "pin")
    tiered = range_of(tensor)
    if tiered is None:
        yield tensor
        return
    span = byte_span(tensor)
    tiered.pin(*span)
    try:
        yield tensor
    finally:
        tiered.unpin(*span)


def _check_tensor(value: object, call: str) -> None:
    if not isinstance(value, torch.Tensor):
        is_list = call == "prefetch" and isinstance(value, list | tuple)
        way_out = "give its tensors one by one, as in prefetch(*tensors)" if is_list else "take a tensor from the store"
        raise UsageError(f"{call}() takes tensors and slices of them; got a {type(value).__name__}: {way_out}")
