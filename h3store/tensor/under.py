"""Which range lies under a tensor. Owns that question, which every operation asks; refuses to import the subclass."""

from __future__ import annotations

from typing import Any

import torch

from h3store.pager import Range, range_holding

__all__ = ["range_under"]


def range_under(tensor: Any) -> Range | None:
    """Returns the range under a tensor, or None if it is ordinary memory, another device's, or no tensor.

    Must run where TieredTensor.__torch_function__ does not: each of its questions would ask it.
    """
    known: Range | None = getattr(tensor, "_h3_range", None)
    if known is not None or not isinstance(tensor, torch.Tensor) or not tensor.is_cpu:
        return known
    try:  # an empty tensor has no address of its own
        return range_holding(tensor.data_ptr() or tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # no storage to speak of: sparse, fake, functional tensors
        return None
