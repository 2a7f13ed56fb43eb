"""One tensor into an archive. Owns dtype names, samples for the choice of a spec, and the call that encodes; refuses to
know stores."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence

import numpy as np
import torch

from h3store.archive import ACCESS_CHUNK_BYTES, DEFAULT_CHUNK_BYTES, BaseRef, TensorRecord, Writer
from h3store.codec import CHUNK_DTYPE, Delta, Spec, choose_spec, default_spec, dtype_info, encode_chunk, raw_spec
from h3store.errors import BudgetError, UsageError
from h3store.pager import Range
from h3store.tensor import TieredTensor, in_operation, range_of
from h3store.units import available_memory, format_bytes

__all__ = [
    "CHUNK_BYTES",
    "add_tensor",
    "check_is_name",
    "check_size",
    "check_storable",
    "checked_shape",
    "chunk_bytes_for",
    "is_compressed",
    "name_of",
    "range_samples",
    "row_bytes_of",
    "torch_dtype",
    "zero_table",
]

CHUNK_BYTES = DEFAULT_CHUNK_BYTES
_SAMPLE_CHUNKS = 4
_QUANTISED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
MAX_BYTES = 2**43  # of one tensor: with room to grow it must fit the address space
_TABLE_BYTES = 24 + 32  # of one chunk: its entry here, its block in the pager


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"dtype {name!r} is not one that this torch ({torch.__version__}) knows")
    return found


def name_of(dtype: torch.dtype) -> str:
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype is {dtype!r}; give a torch dtype, such as torch.float32")
    name = str(dtype).removeprefix("torch.")
    if name in _QUANTISED:
        raise UsageError(f"dtype {dtype} cannot be stored: its tensors are more than their bytes; store int_repr() "
                         "beside scales and zero points, or dequantize() them")
    dtype_info(name)
    return name


def chunk_bytes_for(access: str | None, chunk_bytes: int | None = None, usual: int = CHUNK_BYTES) -> int:
    """Returns the chunk size that a caller asked for in either way; neither: the usual one.

    Raises:
        UsageError: an unknown access, or both given.
    """
    if chunk_bytes is not None and (not isinstance(chunk_bytes, int) or isinstance(chunk_bytes, bool)):
        raise UsageError(f"chunk_bytes={chunk_bytes!r:.100} is not a number of bytes, such as 65536")
    if access is None:
        return usual if chunk_bytes is None else chunk_bytes
    if chunk_bytes is not None:
        raise UsageError(f"access={access!r} and chunk_bytes={chunk_bytes}: either sets the size of chunks; give one")
    if not isinstance(access, str) or access not in ACCESS_CHUNK_BYTES:
        raise UsageError(f'access={access!r:.100} is not known; use "default", "random" or "stream"')
    return ACCESS_CHUNK_BYTES[access]


def is_compressed(compression: str | None, usual: bool = True) -> bool:
    """Whether chunks may be compressed.

    Raises:
        UsageError: an unknown word.
    """
    if compression is None:
        return usual
    if not isinstance(compression, str) or compression not in ("auto", "none"):
        raise UsageError(f'compression={compression!r:.100} is not known; use "auto" or "none"')
    return compression == "auto"


def row_bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape[1:]) * dtype.itemsize if len(shape) > 1 else 0


def checked_shape(name: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """Returns a shape as torch.zeros takes it, as a tuple of ints; nothing is rounded."""
    try:
        return tuple(operator.index(size) for size in ((shape,) if isinstance(shape, int) else shape))
    except TypeError as error:
        raise UsageError(f"tensor {name!r}: shape {shape!r:.100} is not an int or a sequence of ints") from error


def check_size(record: TensorRecord) -> None:
    """Refuses a tensor whose address space or chunk table this machine cannot hold."""
    record.validate()
    if record.nbytes > MAX_BYTES:
        raise UsageError(
            f"tensor {record.name!r} of shape {record.shape} has {format_bytes(record.nbytes)}; the limit is "
            f"{format_bytes(MAX_BYTES)}: split it"
        )
    table, limit = record.n_chunks * _TABLE_BYTES, available_memory() // 2
    if table > limit:
        raise BudgetError(
            f"tensor {record.name!r} of {format_bytes(record.nbytes)} in chunks of {format_bytes(record.chunk_bytes)} "
            f"needs a table of {format_bytes(table)} in memory, over half of the {format_bytes(2 * limit)} available; "
            "give larger chunk_bytes (up to 4 MiB)"
        )


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


def check_is_name(name: object) -> None:
    """Refuses what is no text, before a look-up takes it for a name that is not there."""
    if not isinstance(name, str):
        raise UsageError(f"tensor name {name!r:.100} is a {type(name).__name__}; names are text")


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Refuses what has no bytes of its own in C order."""
    check_is_name(name)
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name!r} is a {type(tensor).__name__}, not a tensor; convert it, say by torch.as_tensor")
    if tensor.is_meta:
        raise UsageError(f"tensor {name!r} is on the meta device and has no values; materialise it first")
    if tensor.layout != torch.strided:
        raise UsageError(f"tensor {name!r} has layout {tensor.layout}; make it dense first: to_dense()")
    if tensor.is_quantized:
        raise UsageError(f"tensor {name!r} is quantised ({tensor.dtype}); store int_repr() "
                         "beside its scales and zero points, or dequantize() it")


def _tried(held: torch.Tensor, base: torch.Tensor | None, dtype: str, row_bytes: int, chunk_bytes: int) -> Spec:
    base_samples = _tensor_samples(base, chunk_bytes) if base is not None else None
    return choose_spec(_tensor_samples(held, chunk_bytes), dtype, row_bytes, base_samples)


def add_tensor(
    writer: Writer,
    name: str,
    tensor: torch.Tensor,
    base: tuple[BaseRef, TieredTensor, int] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    compress: bool = True,
) -> None:
    """Encodes one tensor into an archive, its spec chosen by trial unless told not to compress; durable after commit.

    Args:
        base: what differences are stored to; its chunk size is taken.
    """
    check_storable(name, tensor)
    dtype, shape = name_of(tensor.dtype), tuple(tensor.shape)
    if base is not None:
        chunk_bytes = base[2]
    if tensor.numel() == 0:
        writer.add(name, b"", dtype, shape, default_spec(dtype) if compress else raw_spec(dtype), chunk_bytes)
        return
    address, held = _flat_bytes(tensor)
    sources = [tiered for source in (held, base[1] if base else held) if (tiered := range_of(source)) is not None]
    with in_operation(sources):
        row_bytes = row_bytes_of(shape, tensor.dtype)
        spec = raw_spec(dtype, row_bytes)
        if compress:
            spec = _tried(held, base[1] if base else None, dtype, row_bytes, chunk_bytes)
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
