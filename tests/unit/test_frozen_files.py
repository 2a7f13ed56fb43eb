"""Files written once and kept: what older builds wrote is still read, what attackers may write is still refused, and
the example in FORMAT.md is true."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import h3store.archive
from h3store import errors
from h3store.archive import Contents, Reader, verify
from h3store.codec import Delta, Filter

DATA = Path(__file__).parent.parent / "data"
FORMAT = Path(h3store.archive.__file__).with_name("FORMAT.md")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DATA / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


golden, corrupt = load("make_golden"), load("make_corrupt")


@pytest.mark.parametrize("file", sorted(path.name for path in (DATA / "golden").glob("*.h3")))
def test_golden_files_decode_to_the_values_they_were_made_from(file: str) -> None:
    with Reader(DATA / "golden" / file) as reader:
        contents = Contents(reader)
        assert reader.records
        for name, record in reader.records.items():
            raw = contents.span(record, 0, record.nbytes)
            np.testing.assert_array_equal(raw, golden.expected(name.split(":")[0]), err_msg=name)
        contents.close()
    assert verify(DATA / "golden" / file).ok


def test_golden_files_cover_every_filter_and_delta() -> None:
    seen: set[tuple[int, int]] = set()
    for path in (DATA / "golden").glob("*.h3"):
        with Reader(path) as reader:
            for record in reader.records.values():
                chunks = reader.chunks(record)
                seen |= set(zip(chunks["filter"].tolist(), chunks["delta"].tolist(), strict=True))
    assert {filter_ for filter_, _ in seen} == set(Filter) and {delta for _, delta in seen} == set(Delta)
    assert len(seen) >= 9


def test_the_list_of_corrupt_files_is_the_folder() -> None:
    assert sorted(path.name for path in (DATA / "corrupt").glob("*.h3")) == sorted(corrupt.FILES)


@pytest.mark.parametrize("file", sorted(corrupt.FILES))
def test_corrupt_files_are_refused_for_their_reason(file: str) -> None:
    kind, where, text = corrupt.FILES[file]
    error_type = getattr(errors, kind)
    path = DATA / "corrupt" / file
    if where == "open":
        with pytest.raises(error_type, match=re.escape(text)) as caught:
            Reader(path)
        assert str(path) in str(caught.value)
        return
    with Reader(path) as reader, pytest.raises(error_type, match=re.escape(text)):
        Contents(reader).chunk(reader.record("t"), 0)
    report = verify(path)
    assert len(report.bad) == 1 and text in report.bad[0].reason


def test_the_example_of_the_format_page_is_a_file(tmp_path: Path) -> None:
    """The hex lines of FORMAT.md, zeros between them, are the very archive that the page decodes by hand."""
    example = FORMAT.read_text().split("## Example")[1].split("## Errata")[0]
    lines = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} ?)+)", example, re.M)
    size = int(re.search(r"file of ([0-9,]+) bytes", example)[1].replace(",", ""))  # type: ignore[index]
    data = bytearray(size)
    for offset, text in lines:
        part = bytes.fromhex(text)
        data[int(offset, 16):int(offset, 16) + len(part)] = part
    path = tmp_path / "example.h3"
    path.write_bytes(data)
    report = verify(path)
    assert report.ok and len(data) == report.file_bytes == size
    assert report.dead_bytes == 0
    with Reader(path) as reader:
        record = reader.record("x")
        assert record.dtype == "bfloat16" and record.shape == (40,)
        assert reader.chunks(record)["filter"].tolist() == [Filter.EXPNIBBLE]
        words = Contents(reader).chunk(record, 0).view("<u2").astype("<u4") << 16
    values = words.view("<f4")
    np.testing.assert_array_equal(values, [1.0, -2.0, 0.5, 1.5] * 9 + [1.0, -2.0, 0.5, 0.0])
