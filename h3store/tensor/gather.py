"""Rows by number: index_select, embedding, advanced indexing, gather, take. Owns how each form names its rows, and
their way to the result: copied from memory where all are resident, else each block is read once, at queue depth,
whatever the budget. Refuses everything it is not sure of: the plain operation then runs, and faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from h3store._ffi import ffi, lib
from h3store.pager import Range
from h3store.tensor.under import range_under
from h3store.units import MiB

__all__ = ["FORMS"]

_INDEX_TYPES = (torch.int64, torch.int32)
_HUGE_BYTES = 4 * MiB  # results from here on hold a whole huge page or more, wherever they begin
_COPIED_BYTES = 256  # shorter resident rows are as fast in torch's own kernels


class _Rows:
    """Rows of a tensor by number: where row 0 begins, how far apart rows are, and what is made of them."""

    def __init__(
        self, tensor: torch.Tensor, index: torch.Tensor, shape: Sequence[int], *, at_dim: int = 0, wrap: bool = False
    ) -> None:
        """Rows that follow dimension at_dim of a tensor that is contiguous there; index counts along all before it."""
        self.tensor = tensor
        self.index = index.to(torch.int64).reshape(-1).contiguous()
        self.shape = shape
        item = tensor.element_size()
        self.row_bytes = item * math.prod(tensor.shape[at_dim + 1 :])
        # Further in, rows lie one after the other; the stride of a dimension of size 1 may be anything.
        self.stride = tensor.stride(0) * item if at_dim == 0 and tensor.dim() else self.row_bytes
        self.count = math.prod(tensor.shape[: at_dim + 1])
        self.wrap = wrap


def _is_index(index: Any) -> bool:
    return (
        isinstance(index, torch.Tensor)
        and index.dtype in _INDEX_TYPES
        and index.device.type == "cpu"
        and index.layout == torch.strided
    )


def _rows_contiguous(tensor: torch.Tensor, at_dim: int = 0) -> bool:
    """Whether what follows dimension at_dim is one run of memory, and what precedes it is evenly spaced."""
    run = 1
    for dim in range(tensor.dim() - 1, -1, -1):
        if dim == at_dim and at_dim == 0:
            return tensor.stride(0) >= run or tensor.shape[0] == 1
        if tensor.shape[dim] != 1 and tensor.stride(dim) != run:
            return False
        run *= tensor.shape[dim]
    return True


def _set_of(rows: _Rows, tiered: Range) -> Any:
    """The rows as native code is told of them."""
    base = rows.tensor.data_ptr() - tiered.address
    return ffi.new("h3_row_set *", (base, rows.stride, rows.row_bytes, rows.count, rows.wrap))


def _state(rows: _Rows, tiered: Range, row_set: Any) -> int:
    return int(lib.h3_rows_state(tiered.native, row_set, _pointer(rows), rows.index.numel()))


def _pointer(rows: _Rows) -> Any:
    return ffi.cast("int64_t *", rows.index.data_ptr())


def _offsets(rows: _Rows, base: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending byte offsets of rows, and their places."""
    index = torch.where(rows.index < 0, rows.index + rows.count, rows.index) if rows.wrap else rows.index
    offsets, positions = torch.sort(index * rows.stride + base)
    return offsets, positions


def _fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result, in huge pages where they are to be had: see native/gather.c."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    if out.nbytes >= _HUGE_BYTES:
        lib.h3_huge_pages(out.data_ptr(), out.nbytes)
    return out


def _read(rows: _Rows | None) -> torch.Tensor | None:
    """The rows, or None where the plain operation does as well, or it is the one to raise."""
    if rows is None or rows.index.numel() == 0 or rows.row_bytes == 0:
        return None
    tensor = rows.tensor
    tiered = range_under(tensor)
    if tiered is None or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.requires_grad and torch.is_grad_enabled():  # autograd wants the plain operation
        _fetch(rows)
        return None
    row_set = _set_of(rows, tiered)
    if rows.row_bytes < _COPIED_BYTES and _state(rows, tiered, row_set) != lib.H3_ROWS_ABSENT:
        return None
    out = _fresh(rows.shape, tensor.dtype)
    target = ffi.cast("void *", out.data_ptr())
    state = lib.h3_rows_copy(
        tiered.native, row_set, _pointer(rows), rows.index.numel(), target, torch.get_num_threads()
    )
    if state == lib.H3_ROWS_ABSENT:
        offsets, positions = _offsets(rows, row_set.base)
        tiered.read_rows(offsets.numpy(), positions.numpy(), rows.row_bytes, out.data_ptr())
    return out if state >= 0 else None


def _fetch(rows: _Rows | None) -> None:
    """Rows that the plain operation is about to touch come in together."""
    if rows is None or rows.index.numel() == 0 or rows.row_bytes == 0:
        return
    tiered = range_under(rows.tensor)
    if tiered is not None:
        row_set = _set_of(rows, tiered)
        if _state(rows, tiered, row_set) == lib.H3_ROWS_ABSENT:
            offsets, _ = _offsets(rows, row_set.base)
            tiered.fetch_rows(offsets.numpy(), rows.row_bytes)


def _clone(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A whole tensor or slice goes to its copy without passing through the budget."""
    tensor = args[0] if len(args) == 1 else None
    if not isinstance(tensor, torch.Tensor) or kwargs.get("memory_format") not in (None, torch.preserve_format):
        return None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.requires_grad and torch.is_grad_enabled():
        return None
    tiered = range_under(tensor)
    if tiered is None or tensor.nbytes < 2 * tiered.block_bytes:
        return None
    start, end = tensor.data_ptr() - tiered.address, tensor.data_ptr() - tiered.address + tensor.nbytes
    if end > tiered.nbytes or tiered.resident_bytes >= tiered.nbytes:
        return None
    out = _fresh(tensor.shape, tensor.dtype)
    whole = np.arange(start, end - tiered.block_bytes + 1, tiered.block_bytes, dtype=np.int64)
    tiered.read_rows(whole, np.arange(len(whole)), tiered.block_bytes, out.data_ptr())
    rest = tensor.nbytes % tiered.block_bytes
    if rest:
        last = np.array([end - rest], np.int64)
        tiered.read_rows(last, np.zeros(1, np.int64), rest, out.data_ptr() + tensor.nbytes - rest)
    return out


# ---- the forms: each gives the rows it names, or None ----


def _bound(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """Arguments in order, missing ones None; None when the call has others, such as out."""
    if len(args) > len(names) or not set(kwargs) <= set(names[len(args) :]):
        return None
    return [*args, *(kwargs.get(name) for name in names[len(args) :])]


def _select(tensor: Any, dim: Any, index: Any) -> _Rows | None:
    if not _is_index(index) or index.dim() > 1 or not isinstance(dim, int) or not tensor.dim():
        return None
    dim = dim + tensor.dim() if dim < 0 else dim
    if not 0 <= dim < tensor.dim() or not _rows_contiguous(tensor, dim):
        return None
    return _along(tensor, dim, index.reshape(-1), wrap=False)


def _along(tensor: torch.Tensor, dim: int, index: torch.Tensor, *, wrap: bool) -> _Rows | None:
    """tensor[:, ..., index] with dim full slices first."""
    shape = (*tensor.shape[:dim], *index.shape, *tensor.shape[dim + 1 :])
    if dim == 0:
        return _Rows(tensor, index, shape, wrap=wrap)
    size = tensor.shape[dim]
    index = index.to(torch.int64).reshape(-1)
    if not index.numel() or int(index.min()) < (-size if wrap else 0) or int(index.max()) >= size:
        return None
    leading = torch.arange(math.prod(tensor.shape[:dim]), device="cpu") * size
    flat = leading[:, None] + torch.where(index < 0, index + size, index)
    return _Rows(tensor, flat, shape, at_dim=dim)


def _index_select(args: Sequence[Any], kwargs: dict[str, Any]) -> _Rows | None:
    bound = _bound(("input", "dim", "index"), args, kwargs)
    return _select(*bound) if bound and isinstance(bound[0], torch.Tensor) else None


def _embed(weight: Any, index: Any) -> _Rows | None:
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not _is_index(index):
        return None
    return _Rows(weight, index, (*index.shape, weight.shape[1])) if _rows_contiguous(weight) else None


def _embedding(args: Sequence[Any], kwargs: dict[str, Any]) -> _Rows | None:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    bound = _bound(names, args, kwargs)
    if bound is None or bound[3] is not None or not isinstance(bound[1], torch.Tensor):  # max_norm writes
        return None
    rows = _embed(bound[1], bound[0])
    padding = bound[2]
    return rows if padding is None or (rows and -rows.count <= padding < rows.count) else None


def _aten_embedding(args: Sequence[Any], kwargs: dict[str, Any]) -> _Rows | None:
    bound = _bound(("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"), args, kwargs)
    return _embed(bound[0], bound[1]) if bound else None


def _as_index(item: Any) -> torch.Tensor | None:
    """An index tensor, or a mask, from what may stand in square brackets; None for slices, numbers and the like."""
    if isinstance(item, np.ndarray) or (isinstance(item, list) and all(isinstance(one, int) for one in item)):
        try:
            item = torch.as_tensor(item)
        except (TypeError, ValueError, RuntimeError):
            return None
    if _is_index(item) or (isinstance(item, torch.Tensor) and item.dtype == torch.bool and item.device.type == "cpu"):
        return item if item.dim() else None
    return None


def _getitem(args: Sequence[Any], kwargs: dict[str, Any]) -> _Rows | None:
    if len(args) != 2 or kwargs or not isinstance(args[0], torch.Tensor):
        return None
    tensor, key = args
    return _bracketed(tensor, key if isinstance(key, tuple) else (key,))


def _bracketed(tensor: torch.Tensor, keys: tuple[Any, ...]) -> _Rows | None:
    skipped = 0
    while skipped < len(keys) and isinstance(keys[skipped], slice) and keys[skipped] == slice(None):
        skipped += 1
    found = [_as_index(key) for key in keys[skipped:]]
    indices = [index for index in found if index is not None]
    if not indices or len(indices) != len(found):
        return None
    if len(indices) == 1 and indices[0].dtype != torch.bool:
        ok = skipped < tensor.dim() and _rows_contiguous(tensor, skipped)
        return _along(tensor, skipped, indices[0], wrap=True) if ok else None
    return None if skipped else _leading(tensor, indices)


def _leading(tensor: torch.Tensor, indices: list[torch.Tensor]) -> _Rows | None:
    """tensor[i, j, ...] or tensor[mask]: the first dimensions taken together."""
    if len(indices) == 1:
        mask = indices[0]
        depth = mask.dim()
        if tuple(mask.shape) != tuple(tensor.shape[:depth]):
            return None
        flat = mask.reshape(-1).nonzero().reshape(-1)
        shape = (flat.numel(), *tensor.shape[depth:])
    else:
        depth = len(indices)
        if depth > tensor.dim() or any(index.dtype == torch.bool for index in indices):
            return None
        try:
            parts = torch.broadcast_tensors(*indices)
        except RuntimeError:
            return None
        flat = torch.zeros(parts[0].shape, dtype=torch.int64, device="cpu")
        for size, part in zip(tensor.shape[:depth], parts, strict=True):
            if not part.numel() or int(part.min()) < -size or int(part.max()) >= size:
                return None
            flat = flat * size + torch.where(part < 0, part + size, part)
        shape = (*flat.shape, *tensor.shape[depth:])
    return _Rows(tensor, flat, shape, at_dim=depth - 1) if tensor.is_contiguous() else None


def _take(args: Sequence[Any], kwargs: dict[str, Any]) -> _Rows | None:
    bound = _bound(("input", "index"), args, kwargs)
    if not bound or not isinstance(bound[0], torch.Tensor) or not _is_index(bound[1]):
        return None
    tensor, index = bound
    if not tensor.is_contiguous() or not tensor.dim():
        return None
    return _Rows(tensor, index, index.shape, at_dim=tensor.dim() - 1, wrap=True)


def _gather(args: Sequence[Any], kwargs: dict[str, Any]) -> _Rows | None:
    bound = _bound(("input", "dim", "index", "sparse_grad"), args, kwargs)
    if not bound or not isinstance(bound[0], torch.Tensor) or not _is_index(bound[2]) or not isinstance(bound[1], int):
        return None
    tensor, dim, index = bound[:3]
    dim = dim + tensor.dim() if dim < 0 else dim
    if not tensor.is_contiguous() or index.dim() != tensor.dim() or not 0 <= dim < tensor.dim() or not index.numel():
        return None
    others = [d for d in range(tensor.dim()) if d != dim]
    if any(index.shape[d] > tensor.shape[d] for d in others):
        return None
    if int(index.min()) < 0 or int(index.max()) >= tensor.shape[dim]:
        return None
    flat = index.to(torch.int64) * tensor.stride(dim)
    for d in others:
        steps = torch.arange(index.shape[d], device="cpu") * tensor.stride(d)
        flat = flat + steps.reshape([-1 if e == d else 1 for e in range(tensor.dim())])
    return _Rows(tensor, flat, index.shape, at_dim=tensor.dim() - 1)


def _setitem(args: Sequence[Any], kwargs: dict[str, Any]) -> _Rows | None:
    return _getitem(args[:2], kwargs)


def _index_put(args: Sequence[Any], kwargs: dict[str, Any]) -> _Rows | None:
    if len(args) < 2 or not isinstance(args[0], torch.Tensor) or not isinstance(args[1], (tuple, list)):
        return None
    return _bracketed(args[0], tuple(args[1]))


def _at_index(args: Sequence[Any], kwargs: dict[str, Any]) -> _Rows | None:
    return _select(*args[:3]) if len(args) >= 3 and isinstance(args[0], torch.Tensor) else None


_NAMED: dict[Callable[..., Any], Callable[[Sequence[Any], dict[str, Any]], _Rows | None]] = {
    torch.Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    torch.nn.functional.embedding: _embedding,
    torch.embedding: _aten_embedding,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.take: _take,
    torch.take: _take,
    torch.Tensor.gather: _gather,
    torch.gather: _gather,
}


_CHANGED: dict[Callable[..., Any], Callable[[Sequence[Any], dict[str, Any]], _Rows | None]] = {
    torch.Tensor.__setitem__: _setitem,
    torch.Tensor.index_put_: _index_put,
    torch.Tensor.index_copy_: _at_index,
    torch.Tensor.index_add_: _at_index,
    torch.Tensor.index_fill_: _at_index,
}


def _form(
    use: Callable[[_Rows | None], torch.Tensor | None], named: Callable[[Sequence[Any], dict[str, Any]], _Rows | None]
) -> Callable[[Sequence[Any], dict[str, Any]], torch.Tensor | None]:
    return lambda args, kwargs: use(named(args, kwargs))


# Operation -> function of its (args, kwargs) that returns the result, or None for the plain operation to do it.
FORMS: dict[Callable[..., Any], Callable[[Sequence[Any], dict[str, Any]], torch.Tensor | None]] = {
    **{func: _form(_read, named) for func, named in _NAMED.items()},
    **{func: _form(_fetch, named) for func, named in _CHANGED.items()},
    torch.Tensor.clone: _clone,
    torch.clone: _clone,
}
