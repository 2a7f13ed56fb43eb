"""Tensor records: what an archive's directory says of one tensor. Owns the rules of FORMAT.md for each field; refuses
to know how records are written down."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from h3store.codec import DTYPES, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Spec
from h3store.errors import UsageError

__all__ = ["ACCESS_CHUNK_BYTES", "DEFAULT_CHUNK_BYTES", "BaseRef", "TableRef", "TensorRecord", "check_base",
           "check_depth", "check_layout", "check_name"]

# Raw bytes of a chunk by how a tensor will be read. Random: a row of 4 KiB costs a quarter of the disk's bytes that the
# default does. Stream: fewer, longer reads and decodes; two such blocks still fit the smallest budget, 1 MiB.
ACCESS_CHUNK_BYTES = {"default": 64 * 1024, "random": 16 * 1024, "stream": 512 * 1024}
DEFAULT_CHUNK_BYTES = ACCESS_CHUNK_BYTES["default"]
MAX_NAME_BYTES = 1024
# A packed folder: the key of its list in an archive's metadata, and the names of what is no weight in it.
PACKED_KEY = "packed"
CARRIED_PREFIX = "@files/"
MAX_DIMS = 64
MAX_TENSOR_BYTES = 2**62
MAX_METADATA_DEPTH = 16
MAX_BASE_PATH_BYTES = 4096
ENTRY_BYTES = 24
CHANGE_BYTES = 32
MAX_CHANGES = 16


class TableRef(NamedTuple):
    """Where a tensor's chunk table lies, and its XXH64."""

    offset: int
    n_chunks: int
    check: int


@dataclass(frozen=True, slots=True)
class BaseRef:
    """A tensor of another archive that Delta.BASE chunks lean on.

    Attributes:
        path: of the other archive, relative to the folder of this one.
        uuid: of the other archive, 16 bytes.
        sequence: its commit when this tensor was written.
        name: the tensor in it.
    """

    path: str
    uuid: bytes
    sequence: int
    name: str


@dataclass(slots=True)
class TensorRecord:
    """One named tensor.

    Attributes:
        name: 1 to 1024 bytes of UTF-8.
        dtype: torch name, such as "bfloat16".
        shape: elements per dimension.
        spec: how its chunks are encoded.
        chunk_bytes: raw bytes of a chunk, a multiple of 4096 up to 4 MiB.
        chunks: table, dtype CHUNK_DTYPE, shape (n_chunks,); None until Reader.chunks reads it.
        base: what Delta.BASE chunks lean on.
        metadata: the writer's own, JSON types only.
        table: where the table lies in the file, as far as it is still right; None: it has to be written.
        changes: where lists of entries lie that are newer than the table, the newest last.
        changed: the blocks of each list, rising; empty until the table is read.
        pending: blocks whose entries are in neither; None: none are.
        unflushed: blocks whose entries are newer than the last commit.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: Spec
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    chunks: np.ndarray | None = None
    base: BaseRef | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    table: TableRef | None = None
    changes: tuple[TableRef, ...] = ()
    changed: list[np.ndarray] = field(default_factory=list)
    pending: np.ndarray | None = None
    unflushed: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Raw bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].item_bytes

    @property
    def n_chunks(self) -> int:
        """Chunks of the tensor: the last may be shorter than chunk_bytes."""
        return -(-self.nbytes // self.chunk_bytes)

    def chunk_size(self, block: int) -> int:
        """Raw bytes of one chunk."""
        return min(self.chunk_bytes, self.nbytes - block * self.chunk_bytes)

    def validate(self) -> None:
        """Raises UsageError when a field breaks its rule."""
        try:
            check_name(self.name)
            check_layout(self.dtype, self.shape, self.chunk_bytes, self.spec)
            if self.base is not None:
                check_base(self.base)
            check_depth(self.metadata)
        except ValueError as error:
            raise UsageError(f"tensor {self.name[:80]!r}: {error}") from error


def check_name(name: str) -> None:
    """Raises ValueError when a tensor may not be called so."""
    if name.isascii() and 0 < len(name) <= MAX_NAME_BYTES and "\0" not in name:
        return
    if "\0" in name:
        raise ValueError("its name holds a NUL character; leave that out")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"its name holds {name[error.start]!r}, which is no character of UTF-8") from error
    if not 1 <= size <= MAX_NAME_BYTES:
        raise ValueError(f"its name has {size} bytes; names have 1 to {MAX_NAME_BYTES}")


def check_base(base: BaseRef) -> None:
    """Raises ValueError when a reference to a base breaks a rule."""
    path = base.path
    if not path or len(path.encode()) > MAX_BASE_PATH_BYTES or "\0" in path or path.startswith("/"):
        raise ValueError(f"base path {path!r:.200} is not a relative path of at most {MAX_BASE_PATH_BYTES} bytes")
    if len(base.uuid) != 16:
        raise ValueError(f"base uuid has {len(base.uuid)} bytes, must have 16")
    check_name(base.name)


def check_layout(dtype: str, shape: tuple[int, ...], chunk_bytes: int, spec: Spec) -> None:
    """Raises ValueError when element type, shape, chunk size and spec break a rule or do not fit one another."""
    info = DTYPES.get(dtype)
    if info is None:
        raise ValueError(f"dtype {dtype!r} is not known")
    if len(shape) > MAX_DIMS or (shape and not 0 <= min(shape) <= max(shape) < 2**63):
        raise ValueError(f"shape {shape!r:.200} has over {MAX_DIMS} dimensions or one outside 0 to 2^63 - 1")
    nbytes = math.prod(shape) * info.item_bytes
    if nbytes > MAX_TENSOR_BYTES:
        raise ValueError(f"shape {shape!r:.200} has {nbytes} bytes; the limit is 2^62")
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % MIN_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, must be a multiple of {MIN_CHUNK_BYTES} up to "
                         f"{MAX_CHUNK_BYTES}")
    spec.validate()
    if (spec.elem_bytes, spec.exp_bits) != info[1:]:
        raise ValueError(f"its spec {spec.to_list()} does not fit dtype {dtype}")


def check_depth(value: Any, left: int = MAX_METADATA_DEPTH) -> None:
    """Raises ValueError when metadata nests too deep."""
    if isinstance(value, dict | list | tuple):
        if left == 0:
            raise ValueError(f"metadata nests deeper than {MAX_METADATA_DEPTH}")
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, left - 1)
