"""One tensor into an archive. Owns dtype names, samples for the choice of a spec, and the call that encodes; refuses to
know stores."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from h3store.archive import BaseRef, TensorRecord, Writer
from h3store.codec import CHUNK_DTYPE, Delta, choose_spec, default_spec, dtype_info, encode_chunk
from h3store.errors import UsageError
from h3store.pager import Range
from h3store.tensor import TieredTensor, in_operation, range_of

__all__ = ["CHUNK_BYTES", "add_tensor", "name_of", "range_samples", "row_bytes_of", "torch_dtype", "zero_table"]

CHUNK_BYTES = 64 * 1024
_SAMPLE_CHUNKS = 4


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"dtype {name!r} is not one that this torch ({torch.__version__}) knows")
    return found


def name_of(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    dtype_info(name)
    return name


def row_bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize if len(shape) > 1 else 0


def zero_table(record: TensorRecord) -> np.ndarray:
    """Returns the chunk table of a tensor of zeros that nothing was written of, (n_chunks,)."""
    table = np.zeros(record.n_chunks, CHUNK_DTYPE)
    for block in {0, record.n_chunks - 1} if record.n_chunks else ():
        entry, _ = encode_chunk(bytes(record.chunk_size(block)), record.spec)
        table[block] = entry
    table[:-1] = table[0] if record.n_chunks else 0
    return table


def range_samples(tiered: Range, count: int = _SAMPLE_CHUNKS) -> list[np.ndarray]:
    """A few chunks spread over the range, copied."""
    view = np.frombuffer(tiered.buffer(), np.uint8)
    picked = sorted({int(i) for i in np.linspace(0, tiered.n_blocks - 1, count)})
    with in_operation([tiered]):
        return [view[i * tiered.block_bytes : (i + 1) * tiered.block_bytes].copy() for i in picked]


def _flat_bytes(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Address of a tensor's bytes in C order, and what keeps them alive."""
    with torch.no_grad():
        held = tensor.detach()
        if held.device.type != "cpu":
            held = held.cpu()
        held = held.resolve_conj().resolve_neg().contiguous()
    return held.data_ptr(), held


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    """A uint8 view of memory that the caller keeps alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _tensor_samples(tensor: torch.Tensor, chunk_bytes: int) -> list[np.ndarray]:
    """A few chunks of a contiguous tensor, copied: all of it is never read here."""
    nbytes = tensor.numel() * tensor.element_size()
    view = _bytes_at(tensor.data_ptr(), nbytes)
    picked = sorted({int(i) for i in np.linspace(0, (nbytes - 1) // chunk_bytes, _SAMPLE_CHUNKS)})
    return [view[i * chunk_bytes : (i + 1) * chunk_bytes].copy() for i in picked]


def add_tensor(
    writer: Writer,
    name: str,
    tensor: torch.Tensor,
    base: tuple[BaseRef, TieredTensor, int] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Encodes one tensor into an archive, its spec chosen by trial; durable after commit."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UsageError(f"tensor {name!r} has layout {tensor.layout}; make it dense and unquantised first")
    dtype, shape = name_of(tensor.dtype), tuple(tensor.shape)
    if base is not None:
        chunk_bytes = base[2]
    if tensor.numel() == 0:
        writer.add(name, b"", dtype, shape, default_spec(dtype, 0), chunk_bytes)
        return
    address, held = _flat_bytes(tensor)
    sources = [tiered for source in (held, base[1] if base else held) if (tiered := range_of(source)) is not None]
    with in_operation(sources):
        samples = _tensor_samples(held, chunk_bytes)
        base_samples = _tensor_samples(base[1], chunk_bytes) if base else None
        spec = choose_spec(samples, dtype, row_bytes_of(shape, tensor.dtype), base_samples)
        leans = base is not None and spec.delta == Delta.BASE
        writer.add(
            name,
            address,
            dtype,
            shape,
            spec,
            chunk_bytes,
            base=base[0] if base and leans else None,
            base_data=base[1].data_ptr() if base and leans else None,
        )
