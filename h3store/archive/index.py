"""The index of a commit: the JSON directory of its tensors. Owns its text form, both ways; refuses to do input or
output."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from h3store.archive.layout import HEADER_BYTES, MAX_INDEX_BYTES
from h3store.archive.records import (
    CHANGE_BYTES,
    ENTRY_BYTES,
    MAX_CHANGES,
    BaseRef,
    TableRef,
    TensorRecord,
    check_base,
    check_depth,
    check_layout,
    check_name,
)
from h3store.codec import DTYPES, Spec
from h3store.errors import ArchiveFormatError, CorruptArchiveError, UsageError

__all__ = ["decode_index", "encode_index"]


# ---- index to bytes --------------------------------------------------------------------------------------------------
def _record_json(record: TensorRecord) -> dict[str, Any]:
    assert record.table is not None
    entry: dict[str, Any] = {
        "dtype": record.dtype, "shape": list(record.shape), "chunk_bytes": record.chunk_bytes,
        "spec": record.spec.to_list(),
        "table": [record.table.offset, record.table.n_chunks, f"{record.table.check:016x}"],
    }
    if record.changes:
        entry["changes"] = [[place.offset, place.n_chunks, f"{place.check:016x}"] for place in record.changes]
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
    tensors = {name: _record_json(record) for name, record in records.items()}
    try:
        check_depth(dict(metadata))
        data = json.dumps({"tensors": tensors, "metadata": dict(metadata)}, ensure_ascii=False, allow_nan=False,
                          separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"archive metadata does not fit JSON: {error}") from error
    if len(data) > MAX_INDEX_BYTES:
        raise UsageError(f"an index of {len(data)} bytes for {len(records)} tensors; the limit is {MAX_INDEX_BYTES}: "
                         "spread the tensors over several archives")
    return data


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


def _table(entry: Any, n_chunks: int, covered_bytes: int, *, partial: bool) -> TableRef:
    offset, entries, check = entry
    if type(entries) is not int or not (0 <= entries <= n_chunks if partial else entries == n_chunks):
        raise ValueError(f"a table of {entries!r:.80} chunks; its shape makes {n_chunks}")
    table = TableRef(_integer(offset, "table offset"), entries, int(check, 16))
    if entries and (offset < HEADER_BYTES or offset + entries * ENTRY_BYTES > covered_bytes):
        raise ValueError(f"its table at byte {offset} of {entries} chunks; the commit covers bytes {HEADER_BYTES} to "
                         f"{covered_bytes}")
    return table


def _changes(entry: Any, n_chunks: int, covered_bytes: int) -> tuple[TableRef, ...]:
    if not 1 <= len(entry) <= MAX_CHANGES:
        raise ValueError(f"{len(entry)} lists of changes; the limit is {MAX_CHANGES}")
    return tuple(_change_list(place, n_chunks, covered_bytes) for place in entry)


def _change_list(place: Any, n_chunks: int, covered_bytes: int) -> TableRef:
    offset, count, check = place
    changes = TableRef(_integer(offset, "changes offset"), _integer(count, "changes"), int(check, 16))
    if not 1 <= count <= n_chunks or offset < HEADER_BYTES or offset + count * CHANGE_BYTES > covered_bytes:
        raise ValueError(f"{count} changes at byte {offset} of {n_chunks} chunks; the commit covers bytes "
                         f"{HEADER_BYTES} to {covered_bytes}")
    return changes


class _Layout(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    spec: Spec
    chunk_bytes: int
    n_chunks: int


def _layout(entry: Any) -> _Layout:
    dtype, chunk_bytes = entry["dtype"], _integer(entry["chunk_bytes"], "chunk_bytes")
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ArchiveFormatError(f"dtype {dtype[:80]!r} is not known to this build; install a newer h3store")
    shape = tuple(_integer(size, "shape") for size in entry["shape"])
    spec = Spec.from_list([_integer(number, "spec", 2**32) for number in entry["spec"]])
    check_layout(dtype, shape, chunk_bytes, spec)
    return _Layout(dtype, shape, spec, chunk_bytes, -(-math.prod(shape) * DTYPES[dtype].item_bytes // chunk_bytes))


def _record(name: str, entry: Any, covered_bytes: int, layouts: dict[str, _Layout]) -> TensorRecord:
    check_name(name)
    # Tensors share few layouts. The key is text: as values, 1, 1.0 and true would be one.
    key = f"{entry['dtype']!r}{entry['shape']}{entry['chunk_bytes']!r}{entry['spec']}"
    layout = layouts.get(key)
    if layout is None:
        layout = layouts[key] = _layout(entry)
    dtype, shape, spec, chunk_bytes, n_chunks = layout
    record = TensorRecord(name, dtype, shape, spec, chunk_bytes)
    record.table = _table(entry["table"], n_chunks, covered_bytes, partial="changes" in entry)
    if "changes" in entry:
        record.changes = _changes(entry["changes"], n_chunks, covered_bytes)
    if "base" in entry:
        record.base = _base(entry["base"])
        check_base(record.base)
    if "metadata" in entry:
        record.metadata = entry["metadata"]
        check_depth(record.metadata)
        if not isinstance(record.metadata, dict):
            raise ValueError("its metadata is no object")
    return record


def _records(tensors: dict[str, Any], covered_bytes: int, where: str) -> dict[str, TensorRecord]:
    records: dict[str, TensorRecord] = {}
    layouts: dict[str, _Layout] = {}
    for name, entry in tensors.items():
        try:
            records[name] = _record(name, entry, covered_bytes, layouts)
        except ArchiveFormatError as error:
            raise ArchiveFormatError(f"{where}: tensor {name[:80]!r}: {error}") from error
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
        check_depth(metadata)
        if not isinstance(tensors, dict) or not isinstance(metadata, dict):
            raise ValueError("tensors and metadata must be objects")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptArchiveError(f"{where}: not an index: {type(error).__name__}: {str(error)[:200]}") from error
    return _records(tensors, covered_bytes, where), metadata
