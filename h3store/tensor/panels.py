"""Matrix products with an operand beyond its budget, a panel of rows at a time. Owns where an operand may be cut and
how long a panel is; refuses every cut that would change the order of a sum.

A kernel revisits the blocks of its operands, and where they do not fit it reads each tens of times. A panel of rows
whose length is the summed dimension gives whole elements of the result, each the same dot product as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from h3store.errors import BudgetError
from h3store.pager import Range
from h3store.tensor.under import range_under

__all__ = ["PANELS"]

_PART = 4  # of the budget is one panel: the rest holds the next one on its way, and what others use
# Panels are multiples of this, and none is shorter: with fewer rows BLAS takes another kernel, and sums otherwise.
_ROWS = 64
# float64 may differ in the last place: BLAS cuts its sums by the shape of the whole result.
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _too_big(tensor: Any) -> Range | None:
    """The range under a matrix, or batch of them, with contiguous rows and more bytes than its budget."""
    tiered = range_under(tensor)
    if tiered is None or tensor.dim() < 2 or not tensor.is_contiguous():
        return None
    if tensor.numel() * tensor.element_size() <= tiered.pager.ddr_bytes or tensor.dtype not in _DTYPES:
        return None
    return tiered if _panel_rows(tensor, tiered) else None


def _panel_rows(tensor: Tensor, tiered: Range) -> int:
    step = tiered.pager.ddr_bytes // _PART // (int(tensor.stride(0)) * tensor.element_size())
    return step // _ROWS * _ROWS


def _panels(tensor: Tensor, tiered: Range) -> Iterator[tuple[int, int]]:
    """Bounds along dimension 0, each panel read at queue depth and held while it is used."""
    length, row_bytes = tensor.shape[0], int(tensor.stride(0)) * tensor.element_size()
    step, stop = _panel_rows(tensor, tiered), 0
    while stop < length:
        start, stop = stop, stop + step
        if length - stop < _ROWS:
            stop = length
        offset = int(tensor.storage_offset()) * tensor.element_size() + start * row_bytes
        with _held(tiered, offset, (stop - start) * row_bytes):
            yield start, stop


@contextmanager
def _held(tiered: Range, offset: int, nbytes: int) -> Iterator[None]:
    """Without room for the hold the panel is faulted in, which is slower and as right."""
    tiered.prefetch(offset, nbytes)
    try:
        tiered.pin(offset, nbytes)
    except BudgetError:
        yield
        return
    try:
        yield
    finally:
        tiered.unpin(offset, nbytes)


def _differentiable(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _by_output(weight: Any, rows: Any, bias: Any, product: Callable[[Tensor, Any], Tensor]) -> Tensor | None:
    """Columns of a result that are rows of a weight (out_features, in_features)."""
    tiered = _too_big(weight)
    if tiered is None or weight.dim() != 2 or not isinstance(rows, Tensor) or _too_big(rows) is not None:
        return None
    if rows.dim() < 1 or rows.shape[-1] != weight.shape[1] or rows.dtype != weight.dtype:
        return None
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        return None
    if _differentiable(weight, rows, bias) or torch.is_autocast_enabled("cpu"):
        return None
    out = torch.empty(*rows.shape[:-1], weight.shape[0], dtype=rows.dtype)
    for start, stop in _panels(weight, tiered):
        out[..., start:stop] = product(weight[start:stop], None if bias is None else bias[start:stop])
    return out


def _by_rows(left: Any, right: Any) -> Tensor | None:
    """Rows of a result that are rows of the left operand (m, k), or matrices of a batch (b, m, k)."""
    tiered = _too_big(left)
    if tiered is None or not isinstance(right, Tensor) or _too_big(right) is not None or right.dtype != left.dtype:
        return None
    if _differentiable(left, right) or torch.is_autocast_enabled("cpu"):
        return None
    if left.dim() == 2 and right.dim() in (1, 2) and left.shape[1] == right.shape[0]:
        out = torch.empty(left.shape[0], *right.shape[1:], dtype=left.dtype)
    elif left.dim() == 3 and right.dim() == 3 and left.shape[0] == right.shape[0] and left.shape[2] == right.shape[1]:
        out = torch.empty(*left.shape[:2], right.shape[2], dtype=left.dtype)
    else:
        return None
    for start, stop in _panels(left, tiered):
        part = right[start:stop] if left.dim() == 3 else right
        torch.matmul(left[start:stop], part, out=out[start:stop])
    return out


def _linear(args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    if not given.keys() <= {"input", "weight", "bias"}:
        return None
    rows: Any = given.get("input")
    return _by_output(given.get("weight"), rows, given.get("bias"),
                      lambda weight, bias: functional.linear(rows, weight, bias))


def _product(args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    if kwargs or len(args) != 2:
        return None
    left, right = args
    done = _by_rows(left, right)
    if done is not None or not isinstance(right, Tensor) or right.dim() != 2 or not isinstance(left, Tensor):
        return done
    return _by_output(right.t(), left, None, lambda weight, bias: torch.matmul(left, weight.t()))


def _addmm(args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    if kwargs or len(args) != 3:
        return None
    bias, left, right = args
    if not isinstance(right, Tensor) or right.dim() != 2 or not isinstance(left, Tensor) or left.dim() != 2:
        return None
    if not isinstance(bias, Tensor) or bias.dim() != 1:
        return None
    return _by_output(right.t(), left, bias, lambda weight, part: torch.addmm(part, left, weight.t()))


# Operation -> function of its (args, kwargs) that returns the result, or None for the plain operation to do it.
PANELS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    functional.linear: _linear,
    torch.addmm: _addmm, Tensor.addmm: _addmm,
} | dict.fromkeys((torch.mm, Tensor.mm, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm,
                   torch.mv, Tensor.mv), _product)  # fmt: skip
