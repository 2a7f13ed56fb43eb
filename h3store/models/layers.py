"""The pieces of a decoder layer over the native kernels: float32 rows in, float32 rows out.

Owns the passage of weights and workspaces into native code. Weights may lie in tiered tensors; the kernels hold a
bounded piece of them at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3store._ffi import check, ffi, lib

__all__ = ["Embedding", "Linear", "Norm", "Rows", "silu_mul", "use_torch_threads"]

_TYPES = {torch.float32: lib.H3_F32, torch.bfloat16: lib.H3_BF16, torch.float16: lib.H3_F16}


def use_torch_threads() -> None:
    """Makes the kernels run on as many threads as torch's own operators do."""
    check(lib.h3_set_threads(min(torch.get_num_threads(), lib.H3_MAX_THREADS)), "number of threads")


class Rows:
    """A float32 workspace of up to `capacity` rows.

    Args:
        capacity: rows.
        width: columns.
        tensor: memory to use, (capacity, width), float32, contiguous; None makes some.
    """

    def __init__(self, capacity: int, width: int, tensor: Tensor | None = None) -> None:
        self.tensor = torch.empty(capacity, width) if tensor is None else tensor
        if tuple(self.tensor.shape) != (capacity, width) or not self.tensor.is_contiguous():
            raise ValueError(f"rows: {tuple(self.tensor.shape)}; needs contiguous {(capacity, width)}")
        self.capacity, self.width = capacity, width
        self.address = ffi.cast("float *", self.tensor.data_ptr())


class Linear:
    """y = x W^T + b with W stored in float32, bfloat16 or float16; activations and sums are float32.

    Args:
        weight: (out_features, in_features), contiguous, on CPU; plain or tiered.
        bias: (out_features,), float32, or None.
        name: what messages call it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, name: str = "linear layer") -> None:
        self.weight, self.bias, self.name = weight, bias, name
        self.out_features, self.in_features = weight.shape
        self._type = _TYPES[weight.dtype]
        self._weight = ffi.cast("void *", weight.data_ptr())
        self._bias = ffi.NULL if bias is None else ffi.cast("float *", bias.data_ptr())

    def __call__(self, x: Rows, y: Rows, rows: int, *, accumulate: bool = False,
                 exact_rows: bool = False) -> None:
        """y[:rows] = (or +=) layer of x[:rows].

        Args:
            x: width in_features.
            y: width out_features.
            rows: how many.
            accumulate: add to y.
            exact_rows: each row gets the same bits however many rows there are.
        """
        if x.width != self.in_features or y.width != self.out_features or rows > min(x.capacity, y.capacity):
            raise ValueError(f"weights {self.name}, {self.out_features} x {self.in_features}: {rows} rows of "
                             f"{x.tensor.shape} into {y.tensor.shape}")
        status = lib.h3_linear(x.address, rows, self._weight, self._type, self._bias, self.out_features,
                               self.in_features, accumulate, exact_rows, y.address)
        if status:
            check(status, f"weights {self.name}")


class Embedding:
    """Rows of a table by id.

    Args:
        weight: (vocab_size, hidden_size), contiguous, on CPU; plain or tiered.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._type = _TYPES[weight.dtype]
        self._weight = ffi.cast("void *", weight.data_ptr())

    def __call__(self, ids: Tensor, y: Rows) -> None:
        """y[:len(ids)] = rows of the table; ids (rows,), int64, contiguous, in range."""
        vocab, width = self.weight.shape
        if len(ids) > y.capacity or y.width != width:
            raise ValueError(f"embedding {vocab} x {width}: {len(ids)} ids into {y.tensor.shape}")
        ids_address = ffi.cast("int64_t *", ids.data_ptr())
        check(lib.h3_embed(ids_address, len(ids), self._weight, self._type, vocab, width, y.address),
              "token embeddings")


class Norm:
    """Root-mean-square norm with a float32 weight (hidden_size,)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight.to(torch.float32, copy=True), eps
        self._weight = ffi.cast("float *", self.weight.data_ptr())

    def __call__(self, x: Rows, y: Rows, rows: int) -> None:
        """y[:rows] = norm of x[:rows]; y may be x."""
        if not x.width == y.width == len(self.weight) or rows > min(x.capacity, y.capacity):
            raise ValueError(f"norm of {len(self.weight)}: {rows} rows of {x.tensor.shape} into {y.tensor.shape}")
        status = lib.h3_rmsnorm(x.address, rows, x.width, self._weight, self.eps, y.address)
        if status:
            check(status, "root-mean-square norm")


def silu_mul(gate_up: Rows, y: Rows, rows: int) -> None:
    """y[:rows] = silu(gate) * up, where gate_up holds gate and up side by side."""
    if gate_up.width != 2 * y.width or rows > min(gate_up.capacity, y.capacity):
        raise ValueError(f"silu: {rows} rows of {gate_up.tensor.shape} into {y.tensor.shape}")
    status = lib.h3_silu_mul(gate_up.address, rows, y.width, y.address)
    if status:
        check(status, "silu")
