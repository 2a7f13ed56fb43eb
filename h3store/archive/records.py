"""The directory of an archive: tensor records, and the JSON index that lists them. Owns every rule that an index entry
must keep; refuses to do input or output."""

from __future__ import annotations

import functools
import gc
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from h3store.archive.layout import HEADER_BYTES, MAX_INDEX_BYTES
from h3store.codec import DTYPES, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Spec
from h3store.errors import ArchiveFormatError, CorruptArchiveError, UsageError

__all__ = ["DEFAULT_CHUNK_BYTES", "BaseRef", "TableRef", "TensorRecord", "decode_index", "encode_index"]

DEFAULT_CHUNK_BYTES = 64 * 1024
MAX_NAME_BYTES = 1024
MAX_DIMS = 64
MAX_TENSOR_BYTES = 2**62
MAX_METADATA_DEPTH = 16
MAX_BASE_PATH_BYTES = 4096
ENTRY_BYTES = 24
EMPTY_TABLE_CHECK = 0xEF46DB3751D8E999  # XXH64 of no bytes


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
        table: where the committed table lies; None while chunks are newer than it.
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
            _check_record(self)
        except ValueError as error:
            raise UsageError(f"tensor {self.name[:80]!r}: {error}") from error


def _check_name(name: str) -> None:
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= MAX_NAME_BYTES or "\0" in name:
        raise ValueError(f"its name has {size} bytes; names have 1 to {MAX_NAME_BYTES} bytes and no NUL")
    name.encode()


def _check_base(base: BaseRef) -> None:
    path = base.path
    if not path or len(path.encode()) > MAX_BASE_PATH_BYTES or "\0" in path or path.startswith("/"):
        raise ValueError(f"base path {path!r:.200} is not a relative path of at most {MAX_BASE_PATH_BYTES} bytes")
    if len(base.uuid) != 16:
        raise ValueError(f"base uuid has {len(base.uuid)} bytes, must have 16")
    _check_name(base.name)


@functools.lru_cache(maxsize=1024)
def _check_spec(spec: Spec) -> None:
    spec.validate()


def _check_record(record: TensorRecord) -> None:
    _check_name(record.name)
    info = DTYPES.get(record.dtype)
    if info is None:
        raise ValueError(f"dtype {record.dtype!r} is not known")
    if len(record.shape) > MAX_DIMS or (record.shape and not 0 <= min(record.shape) <= max(record.shape) < 2**63):
        raise ValueError(f"shape {record.shape!r:.200} has over {MAX_DIMS} dimensions or one outside 0 to 2^63 - 1")
    if record.nbytes > MAX_TENSOR_BYTES:
        raise ValueError(f"shape {record.shape!r:.200} has {record.nbytes} bytes; the limit is 2^62")
    size = record.chunk_bytes
    if not MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES or size % MIN_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes is {size}, must be a multiple of {MIN_CHUNK_BYTES} up to {MAX_CHUNK_BYTES}")
    _check_spec(record.spec)
    if (record.spec.elem_bytes, record.spec.exp_bits) != info[1:]:
        raise ValueError(f"its spec {record.spec.to_list()} does not fit dtype {record.dtype}")
    if record.base is not None:
        _check_base(record.base)
    if not isinstance(record.metadata, dict):
        raise ValueError("its metadata is no object")
    if record.metadata:
        _depth(record.metadata, MAX_METADATA_DEPTH)


# ---- index to bytes --------------------------------------------------------------------------------------------------
def _record_json(record: TensorRecord) -> dict[str, Any]:
    assert record.table is not None
    entry: dict[str, Any] = {
        "dtype": record.dtype, "shape": list(record.shape), "chunk_bytes": record.chunk_bytes,
        "spec": record.spec.to_list(),
        "table": [record.table.offset, record.table.n_chunks, f"{record.table.check:016x}"],
    }
    if record.base is not None:
        base = record.base
        entry["base"] = {"path": base.path, "uuid": base.uuid.hex(), "sequence": base.sequence, "name": base.name}
    if record.metadata:
        entry["metadata"] = record.metadata
    return entry


def encode_index(records: Mapping[str, TensorRecord], metadata: Mapping[str, Any]) -> bytes:
    """The index of records whose tables are all written.

    Raises:
        UsageError: metadata that JSON cannot hold, nested too deep, or an index above its limit.
    """
    _check_metadata(metadata)
    tensors = {name: _record_json(record) for name, record in records.items()}
    try:
        data = json.dumps({"tensors": tensors, "metadata": dict(metadata)}, ensure_ascii=False, allow_nan=False,
                          separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"archive metadata does not fit JSON: {error}") from error
    if len(data) > MAX_INDEX_BYTES:
        raise UsageError(f"an index of {len(data)} bytes for {len(records)} tensors; the limit is {MAX_INDEX_BYTES}: "
                         "spread the tensors over several archives")
    return data


def _depth(value: Any, left: int) -> None:
    """Raises ValueError when value nests deeper than left."""
    if isinstance(value, dict | list | tuple):
        if left == 0:
            raise ValueError(f"metadata nests deeper than {MAX_METADATA_DEPTH}")
        for item in value.values() if isinstance(value, dict) else value:
            _depth(item, left - 1)


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    try:
        _depth(dict(metadata), MAX_METADATA_DEPTH)
    except ValueError as error:
        raise UsageError(str(error)) from error


# ---- bytes to index --------------------------------------------------------------------------------------------------
def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _integer(value: Any, what: str, limit: int = 2**63) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{what} is {value!r:.80}, must be an integer from 0 to {limit - 1}")
    return value


def _base(entry: Any) -> BaseRef:
    sequence = _integer(entry["sequence"], "base sequence")
    return BaseRef(entry["path"], bytes.fromhex(entry["uuid"]), sequence, entry["name"])


def _table(entry: Any, covered_bytes: int) -> TableRef:
    offset, n_chunks, check = entry
    table = TableRef(_integer(offset, "table offset"), _integer(n_chunks, "chunks"), int(check, 16))
    if n_chunks and (offset < HEADER_BYTES or offset + n_chunks * ENTRY_BYTES > covered_bytes):
        raise ValueError(f"its table at byte {offset} of {n_chunks} chunks; the commit covers bytes {HEADER_BYTES} to "
                         f"{covered_bytes}")
    return table


@functools.lru_cache(maxsize=1024)
def _spec(numbers: str) -> Spec:
    """The spec of a list of numbers as Python prints it: many tensors share few specs."""
    return Spec.from_list([_integer(number, "spec", 2**32) for number in json.loads(numbers)])


def _record(name: str, entry: Any, covered_bytes: int) -> TensorRecord:
    shape = tuple([_integer(size, "shape") for size in entry["shape"]])
    record = TensorRecord(name, entry["dtype"], shape, _spec(str(entry["spec"])),
                          _integer(entry["chunk_bytes"], "chunk_bytes"), table=_table(entry["table"], covered_bytes))
    if "base" in entry:
        record.base = _base(entry["base"])
    if "metadata" in entry:
        record.metadata = entry["metadata"]
    _check_record(record)
    if record.table is not None and record.table.n_chunks != record.n_chunks:
        raise ValueError(f"{record.table.n_chunks} chunks for a tensor of {record.nbytes} bytes in chunks of "
                         f"{record.chunk_bytes}; {record.n_chunks} expected")
    return record


def _records(tensors: dict[str, Any], covered_bytes: int, where: str) -> dict[str, TensorRecord]:
    records: dict[str, TensorRecord] = {}
    for name, entry in tensors.items():
        try:
            if isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and entry["dtype"] not in DTYPES:
                raise ArchiveFormatError(f"{where}: tensor {name[:80]!r} has dtype {entry['dtype'][:80]!r} that this "
                                         "build does not know; install a newer h3store")
            records[name] = _record(name, entry, covered_bytes)
        except ArchiveFormatError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptArchiveError(f"{where}: tensor {name[:80]!r}: {error}") from error
    return records


def decode_index(data: bytes, covered_bytes: int, where: str) -> tuple[dict[str, TensorRecord], dict[str, Any]]:
    """Reads an index; every rule of the format is checked.

    Args:
        data: the index, its check already verified.
        covered_bytes: length of the file in this commit.
        where: start of error messages: path and place.

    Returns:
        records by name, and the archive's metadata.

    Raises:
        CorruptArchiveError, ArchiveFormatError.
    """
    collecting = gc.isenabled()
    gc.disable()  # 100,000 records are a million objects, none of them garbage: collections would take half the time
    try:
        return _decode_index(data, covered_bytes, where)
    finally:
        if collecting:
            gc.enable()


def _decode_index(data: bytes, covered_bytes: int, where: str) -> tuple[dict[str, TensorRecord], dict[str, Any]]:
    try:
        index = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        tensors, metadata = index["tensors"], index["metadata"]
        _depth(metadata, MAX_METADATA_DEPTH)
        if not isinstance(tensors, dict) or not isinstance(metadata, dict):
            raise ValueError("tensors and metadata must be objects")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptArchiveError(f"{where}: not an index: {type(error).__name__}: {str(error)[:200]}") from error
    return _records(tensors, covered_bytes, where), metadata
