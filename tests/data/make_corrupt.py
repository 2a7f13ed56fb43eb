"""Makes tests/data/corrupt: small invalid archives, each named for its attack. All checks hold except the one attacked,
so that the file gets as far as it can. FILES maps each name to the error it must give and a part of the message.

Run from the repository: python tests/data/make_corrupt.py
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

CORRUPT = Path(__file__).parent / "corrupt"
# name: (error type, where it shows: "open" or "verify", text of the message)
FILES: dict[str, tuple[str, str, str]] = {
    "cut-in-the-header.h3": ("CorruptArchiveError", "open", "inside its header"),
    "text-mode-transfer.h3": ("ArchiveFormatError", "open", "not an h3store archive"),
    "newer-major-version.h3": ("ArchiveFormatError", "open", "version 2"),
    "unknown-required-feature.h3": ("ArchiveFormatError", "open", "0x8000000000000000"),
    "index-past-the-end.h3": ("CorruptArchiveError", "open", "the file has"),
    "index-offset-overflow.h3": ("CorruptArchiveError", "open", "the commit covers"),
    "index-nested-deep.h3": ("CorruptArchiveError", "open", "RecursionError"),
    "duplicate-tensor-name.h3": ("CorruptArchiveError", "open", "appears twice"),
    "shape-product-overflow.h3": ("CorruptArchiveError", "open", "the limit is 2^62"),
    "table-larger-than-file.h3": ("CorruptArchiveError", "open", "the commit covers"),
    "chunk-count-below-shape.h3": ("CorruptArchiveError", "open", "its shape makes 2"),
    "base-path-absolute.h3": ("CorruptArchiveError", "open", "not a relative path"),
    "chunk-past-the-end.h3": ("CorruptArchiveError", "verify", "entry 0"),
    "chunk-in-the-header.h3": ("CorruptArchiveError", "verify", "entry 0"),
    "chunk-larger-than-raw.h3": ("CorruptArchiveError", "verify", "entry 0"),
    "unknown-filter.h3": ("CorruptArchiveError", "verify", "entry 0"),
    "unknown-check-kind.h3": ("CorruptArchiveError", "verify", "entry 0"),
    "zstd-frame-larger-than-raw.h3": ("CorruptBlockError", "verify", "do not decode"),
    "planes-longer-than-stored.h3": ("CorruptBlockError", "verify", "do not decode"),
    "nibble-escapes-missing.h3": ("CorruptBlockError", "verify", "do not decode"),
    "wrong-bytes-right-structure.h3": ("CorruptBlockError", "verify", "do not decode"),
    "patch-of-a-patch.h3": ("CorruptBlockError", "verify", "breaks a rule"),
    "patch-base-of-unknown-check-kind.h3": ("CorruptBlockError", "verify", "breaks a rule"),
    "patch-base-past-the-end.h3": ("CorruptBlockError", "verify", "breaks a rule"),
    "patch-base-in-the-header.h3": ("CorruptBlockError", "verify", "breaks a rule"),
    "patch-without-pages.h3": ("CorruptBlockError", "verify", "breaks a rule"),
    "patch-page-past-the-end.h3": ("CorruptBlockError", "verify", "breaks a rule"),
    "patch-pages-longer-than-stored.h3": ("CorruptBlockError", "verify", "breaks a rule"),
    "patch-cut-in-its-head.h3": ("CorruptBlockError", "verify", "a patch record of 55 bytes"),
    "patch-page-of-wrong-length.h3": ("CorruptBlockError", "verify", "do not decode"),
    "patch-with-wrong-pages.h3": ("CorruptBlockError", "verify", "fails its check"),
}


def archive(index: dict[str, Any] | bytes, payload: bytes = b"", **slot: int) -> bytearray:
    """One commit: header, payload, index; slot fields override what would be right."""
    from h3store.archive.layout import HEADER_BYTES, SLOT_BYTES, SLOT_OFFSETS, Header, Slot, xxh64

    data = index if isinstance(index, bytes) else json.dumps(index).encode()
    header, at = Header(bytes(range(16))), HEADER_BYTES + len(payload)
    fields = {"sequence": 1, "index_offset": at, "index_bytes": len(data), "index_check": xxh64(data),
              "covered_bytes": at + len(data), **slot}
    page = bytearray(header.to_bytes())
    page[SLOT_OFFSETS[1]:SLOT_OFFSETS[1] + SLOT_BYTES] = Slot(**fields).to_bytes(header.uuid)
    return page + payload + data


def one(**fields: Any) -> dict[str, Any]:
    """An index of one bf16 tensor of one chunk of 4,096 bytes."""
    entry = {"dtype": "bfloat16", "shape": [2048], "chunk_bytes": 4096, "spec": [2, 0, 4, 0, 8, 1], "table": None}
    entry.update(fields)
    return {"tensors": {"t": entry}, "metadata": {}}


def chunk(stored: bytes, *, filter_: int, offset: int = 4096, size: int | None = None, check: int = 0,
          kind: int = 0) -> bytearray:
    """An archive whose only chunk has these stored bytes and this entry."""
    from h3store.archive.layout import xxh64

    table = struct.pack("<QQIBBH", offset, check, len(stored) if size is None else size, filter_, 0, kind)
    index = one(table=[4096 + len(stored), 1, f"{xxh64(table):016x}"])
    return archive(index, stored + table)


def patch(*, base: tuple[int, int, int] = (0, 0, 1), pages: bytes = b"p" * 4096, size: int | None = None, bits: int = 1,
          filter_: int = 0, raw: bytes = b"", kind: int = 0) -> bytes:
    """A patch record of a chunk of one page; base: offset, stored bytes, filter; raw: what pages decode to; kind: of
    the base's check."""
    from h3store.archive.layout import xxh64

    offset, stored, base_filter = base
    zeros = 0 if stored else xxh64(bytes(4096))
    return (struct.pack("<QQIBBH", offset, zeros, stored, base_filter, 0, kind)
            + struct.pack("<QQIBBH", 0, xxh64(raw or pages), len(pages) if size is None else size, filter_, 0, 0)
            + struct.pack("<Q", bits) + pages)


def frame_of(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=1).compress(data)


def header_field(offset: int, value: bytes) -> bytearray:
    from h3store.archive.layout import xxh64

    data = archive({"tensors": {}, "metadata": {}})
    data[offset:offset + len(value)] = value
    data[48:56] = struct.pack("<Q", xxh64(bytes(data[:48])))
    return data


def make() -> dict[str, bytes]:
    """Every file's bytes by name."""
    import zstandard

    frame = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 20))
    nibbles = struct.pack("<4I", 127, 1024, 0, 0) + bytes(2048) + b"\xff" * 1024  # every nibble an escape, none stored
    base = {"path": "/etc/passwd", "uuid": "00" * 16, "sequence": 1, "name": "t"}
    files: dict[str, bytes | bytearray] = {
        "cut-in-the-header.h3": archive({"tensors": {}, "metadata": {}})[:1000],
        "text-mode-transfer.h3": bytes(archive({"tensors": {}, "metadata": {}})).replace(b"\r\n", b"\n"),
        "newer-major-version.h3": header_field(8, b"\x02"),
        "unknown-required-feature.h3": header_field(23, b"\x80"),
        "index-past-the-end.h3": archive(one(), covered_bytes=1 << 40),
        "index-offset-overflow.h3": archive(one(), index_offset=2**64 - 1, index_bytes=4097),
        "index-nested-deep.h3": archive(b"[" * 90_000),
        "duplicate-tensor-name.h3": archive(b'{"tensors":{"t":1,"t":2},"metadata":{}}'),
        "shape-product-overflow.h3": archive(one(shape=[2**62, 2**62, 2**4])),
        "table-larger-than-file.h3": archive(one(shape=[2**40], table=[4096, 2**29, "00"])),
        "chunk-count-below-shape.h3": archive(one(shape=[4096], table=[4096, 1, "00"])),
        "base-path-absolute.h3": archive(one(shape=[0], table=[0, 0, "ef46db3751d8e999"], base=base)),
        "chunk-past-the-end.h3": chunk(b"x" * 64, filter_=2, offset=2**63),
        "chunk-in-the-header.h3": chunk(b"x" * 64, filter_=2, offset=512),
        "chunk-larger-than-raw.h3": chunk(b"x" * 4097, filter_=2),
        "unknown-filter.h3": chunk(b"x" * 64, filter_=77),
        "unknown-check-kind.h3": chunk(b"x" * 64, filter_=2, kind=2),
        "zstd-frame-larger-than-raw.h3": chunk(frame, filter_=2),
        "planes-longer-than-stored.h3": chunk(struct.pack("<2I", 2048, 2**31 - 1) + bytes(2048), filter_=3),
        "nibble-escapes-missing.h3": chunk(nibbles, filter_=4),
        "wrong-bytes-right-structure.h3": chunk(bytes(range(256)) * 16, filter_=0),
    }
    short = b"p" * 64
    for name, record in {
        "patch-of-a-patch.h3": patch(base=(4096, 64, 5), pages=short),
        "patch-base-of-unknown-check-kind.h3": patch(kind=2, pages=short),
        "patch-base-past-the-end.h3": patch(base=(2**63, 64, 2), pages=short),
        "patch-base-in-the-header.h3": patch(base=(512, 64, 2), pages=short),
        "patch-without-pages.h3": patch(bits=0, pages=b""),
        "patch-page-past-the-end.h3": patch(bits=2, pages=short),
        "patch-pages-longer-than-stored.h3": patch(size=2**31, pages=short),
        "patch-cut-in-its-head.h3": patch(pages=b"")[:55],
        "patch-page-of-wrong-length.h3": patch(pages=short),
        "patch-with-wrong-pages.h3": patch(pages=frame_of(b"p" * 4096), filter_=2, raw=b"p" * 4096),
    }.items():
        files[name] = chunk(record, filter_=5)
    return {name: bytes(data) for name, data in files.items()}


if __name__ == "__main__":
    CORRUPT.mkdir(exist_ok=True)
    for name, data in make().items():
        (CORRUPT / name).write_bytes(data)
