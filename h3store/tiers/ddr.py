"""The ddr tier: ranges of host memory over tensors of the nvme tier. Owns the step from an archive's record to a
range."""

from __future__ import annotations

from typing import Any

import numpy as np

from h3store.archive import TensorRecord
from h3store.codec import Spec
from h3store.pager import Pager, Range, RangeConfig

__all__ = ["native_spec", "open_range"]


def native_spec(spec: Spec) -> dict[str, int]:
    """Returns the fields of h3_spec by name."""
    names = ("elem_bytes", "row_bytes", "filter", "delta", "exp_bits", "level")
    return dict(zip(names, spec.to_list(), strict=True))


def open_range(
    pager: Pager,
    record: TensorRecord,
    chunks: np.ndarray | None,
    *,
    file: Any,
    owner: Any,
    writable: bool = False,
    cyclic: bool = False,
    capacity_bytes: int = 0,
    base: Range | None = None,
    label: str,
) -> Range:
    """Returns a range over a tensor's chunks.

    Args:
        chunks: the chunk table, (n_chunks,); None: every chunk is new and zero.
        file, owner: native file of the chunks, and the object that keeps it open.
        cyclic: the tensor is read over and over in the same order: keep a fixed part instead of the newest.
        base: range of the tensor that delta chunks lean on.

    Raises:
        BudgetError: two chunks do not fit the pager's budget.
    """
    config = RangeConfig(
        record.nbytes,
        record.chunk_bytes,
        native_spec(record.spec),
        writable,
        cyclic,
        capacity_bytes,
        file,
        owner,
        chunks,
        base,
        label,
    )
    return Range(pager, config)
