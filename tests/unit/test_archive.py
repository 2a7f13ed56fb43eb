"""Reader, Writer, verify and describe on sound files: what is written is read, commits are what they say."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from h3store import errors
from h3store._ffi import ffi, lib
from h3store.archive import (
    CHUNK_DTYPE,
    BaseRef,
    Contents,
    Reader,
    TensorRecord,
    Writer,
    describe,
    verify,
)
from h3store.archive.layout import HEADER_BYTES
from h3store.codec import Delta, Filter, Spec, default_spec

BF16, U8 = default_spec("bfloat16"), default_spec("uint8")


def values(count: int, seed: int = 0) -> np.ndarray:
    """Bytes of float32 normal values cut to bf16: uint8, 2 * count."""
    floats = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return np.ascontiguousarray(floats.view(np.uint16)[1::2]).view(np.uint8)


def read(path: Path, name: str) -> np.ndarray:
    with Reader(path) as reader:
        contents, record = Contents(reader), reader.record(name)
        try:
            return contents.span(record, 0, record.nbytes)
        finally:
            contents.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.h3"


def test_a_new_archive_is_committed_and_empty(path: Path) -> None:
    with Writer(path, "w") as writer:
        assert writer.sequence == 1
        with Reader(path) as reader:
            assert (reader.records, reader.metadata, reader.sequence) == ({}, {}, 1)
    assert verify(path).ok
    assert os.listdir(path.parent) == ["a.h3"]


@pytest.mark.parametrize(("dtype", "shape", "chunk_bytes"), [
    ("bfloat16", (300, 1000), 65536), ("float32", (77,), 4096), ("uint8", (), 4096), ("int64", (3, 0, 5), 65536),
    ("complex128", (1000, 3), 8192), ("float8_e4m3fn", (4 << 20,), 4 << 20), ("bool", (1, 1, 1, 70001), 12288)])
def test_tensors_come_back(path: Path, dtype: str, shape: tuple[int, ...], chunk_bytes: int) -> None:
    record = TensorRecord("t", dtype, shape, default_spec(dtype), chunk_bytes)
    raw = np.resize(values(50_000), record.nbytes)
    with Writer(path) as writer:
        added = writer.add("t", raw, dtype, shape, default_spec(dtype), chunk_bytes, metadata={"role": "weight"})
        assert len(writer.chunks(added)) == record.n_chunks
        assert writer.commit() == 2
    with Reader(path) as reader:
        found = reader.record("t")
        assert (found.dtype, found.shape, found.nbytes, found.chunk_bytes) == (dtype, shape, len(raw), chunk_bytes)
        assert found.metadata == {"role": "weight"}
        assert not reader.chunks(found).flags.writeable
    np.testing.assert_array_equal(read(path, "t"), raw)
    report = verify(path, threads=2)
    assert report.ok and report.raw_bytes == len(raw) and report.tensors == 1


def test_addresses_and_buffers_are_the_same_data(path: Path) -> None:
    raw = values(100_000)
    with Writer(path) as writer:
        writer.add("address", raw.ctypes.data, "bfloat16", (100_000,), BF16)
        writer.add("bytes", raw.tobytes(), "bfloat16", (100_000,), BF16)
        writer.add("one thread", raw, "bfloat16", (100_000,), BF16, threads=1)
        writer.commit()
    for name in ("address", "bytes", "one thread"):
        np.testing.assert_array_equal(read(path, name), raw)


def test_a_buffer_of_the_wrong_size_or_layout_is_refused(path: Path) -> None:
    with Writer(path) as writer:
        with pytest.raises(errors.UsageError, match="199 bytes, but shape and dtype make 200"):
            writer.add("t", np.zeros(199, np.uint8), "bfloat16", (100,), BF16)
        with pytest.raises(errors.UsageError, match="contiguous"):
            writer.add("t", np.zeros((20, 20), np.uint8)[:, ::2], "bfloat16", (100,), BF16)
        with pytest.raises(errors.UsageError, match="does not fit dtype"):
            writer.add("t", np.zeros(200, np.uint8), "float16", (100,), BF16)
        assert writer.records == {}


def test_commits_add_up_and_unchanged_tables_are_not_rewritten(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("a", values(40_000, 1), "bfloat16", (40_000,), BF16)
        writer.commit()
    with Writer(path, "r+") as writer:
        before = writer.record("a").table
        writer.add("b", values(40_000, 2), "bfloat16", (40_000,), BF16)
        writer.metadata["step"] = 2
        assert writer.commit() == 3
        assert writer.record("a").table == before
        size = path.stat().st_size
        assert writer.commit() == 3 and path.stat().st_size == size  # nothing changed, nothing written
        writer.put(writer.records["b"])
        assert writer.commit() == 3 and path.stat().st_size == size  # an equal table is the same table
    with Reader(path) as reader:
        assert set(reader.records) == {"a", "b"} and reader.metadata == {"step": 2}
    np.testing.assert_array_equal(read(path, "a"), values(40_000, 1))
    np.testing.assert_array_equal(read(path, "b"), values(40_000, 2))


def test_replace_and_remove_leave_dead_bytes(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("a", values(40_000, 1), "bfloat16", (40_000,), BF16)
        writer.commit()
        stored = int(writer.chunks(writer.record("a"))["stored_bytes"].sum())
        writer.add("a", values(10, 2), "bfloat16", (10,), BF16)
        writer.commit()
    report = verify(path)
    assert report.ok and report.dead_bytes >= stored
    np.testing.assert_array_equal(read(path, "a"), values(10, 2))
    with Writer(path, "r+") as writer:
        writer.remove("a")
        with pytest.raises(errors.TensorNotFoundError, match="no tensor 'a'"):
            writer.remove("a")
        writer.commit()
    with Reader(path) as reader, pytest.raises(errors.TensorNotFoundError):
        reader.record("a")


def test_a_sound_file_has_no_gaps(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("a", values(400_000), "bfloat16", (400_000,), BF16)
    with Writer(path) as writer:  # replaces: one commit only, nothing dead
        writer.add("a", values(400_000), "bfloat16", (400_000,), BF16)
        writer.commit()
        assert writer.sequence == 1
    report = verify(path)
    assert (report.dead_bytes, report.tail_bytes, report.file_bytes) == (0, 0, path.stat().st_size)


def test_close_without_commit_forgets(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("a", values(1000), "bfloat16", (1000,), BF16)
        writer.commit()
        writer.add("b", values(100_000), "bfloat16", (100_000,), BF16)
    assert verify(path).tail_bytes > 0
    with Writer(path, "r+") as writer:
        assert set(writer.records) == {"a"}
        assert path.stat().st_size == writer.covered_bytes
    with pytest.raises(errors.StoreClosedError):
        writer.commit()
    with pytest.raises(errors.StoreClosedError):
        writer.file


def test_mode_w_keeps_the_old_file_until_the_first_commit(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("old", values(1000), "bfloat16", (1000,), BF16)
        writer.commit()
    with Writer(path, "w") as writer:
        assert writer.sequence == 0
        writer.add("new", values(1000, 3), "bfloat16", (1000,), BF16)
        with Reader(path) as reader:
            assert set(reader.records) == {"old"}
    with Reader(path) as reader:
        assert set(reader.records) == {"old"}
    assert os.listdir(path.parent) == ["a.h3"]
    with Writer(path, "w") as writer:
        writer.add("new", values(1000, 3), "bfloat16", (1000,), BF16)
        assert writer.commit() == 1
        writer.add("newer", values(1000, 4), "bfloat16", (1000,), BF16)
        assert writer.commit() == 2
    with Reader(path) as reader:
        assert set(reader.records) == {"new", "newer"}
    assert os.listdir(path.parent) == ["a.h3"]


def test_a_leftover_partial_file_is_taken_over(path: Path) -> None:
    path.with_name(".a.h3.partial").write_bytes(b"\xff" * 100_000)
    with Writer(path, "w") as writer:
        writer.commit()
    assert verify(path).ok and os.listdir(path.parent) == ["a.h3"]


def test_a_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.h3"
    link.symlink_to(tmp_path / "real" / "a.h3")
    with Writer(link, "w") as writer:
        writer.commit()
    assert link.is_symlink() and verify(tmp_path / "real" / "a.h3").ok


@pytest.mark.parametrize("mode", ["w", "r+"])
def test_a_second_writer_is_refused(path: Path, mode: str) -> None:
    with Writer(path, "w") as first:
        with pytest.raises(errors.ArchiveLockedError, match="another writer"):
            Writer(path, mode)
        code = f"from h3store.archive import Writer\nWriter({str(path)!r}, {mode!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "ArchiveLockedError" in done.stderr
        first.commit()
    with Writer(path, "r+"), pytest.raises(BlockingIOError):
        Writer(path, mode)
    Writer(path, mode).close()


def test_a_replacing_writer_is_refused_while_the_old_file_is_written(path: Path) -> None:
    Writer(path).close()
    with Writer(path, "w"), pytest.raises(errors.ArchiveLockedError):  # not yet committed: both names are locked
        Writer(path, "w")
    with Writer(path, "w"), pytest.raises(errors.ArchiveLockedError):
        Writer(path, "r+")


def test_a_forked_child_does_not_keep_the_lock(path: Path) -> None:
    writer = Writer(path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    writer.close()
    Writer(path, "r+").close()
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


@pytest.mark.parametrize("mode", ["r", "a", "", "rb+"])
def test_unknown_modes(path: Path, mode: str) -> None:
    with pytest.raises(errors.UsageError, match="mode"):
        Writer(path, mode)


def test_missing_files_and_wrong_kinds(tmp_path: Path) -> None:
    for opening in (lambda p: Reader(p), lambda p: Writer(p, "r+"), lambda p: verify(p), lambda p: describe(p)):
        with pytest.raises(errors.ArchiveNotFoundError, match=re.escape(str(tmp_path / "none.h3"))):
            opening(tmp_path / "none.h3")
        with pytest.raises(errors.ArchiveFormatError, match="a folder, not an archive file"):
            opening(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(errors.ArchiveFormatError, match="a device or pipe, not an archive file"):
            opening(tmp_path / "pipe")
        os.unlink(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match="folder does not exist"):
        Writer(tmp_path / "no" / "a.h3", "w")
    with pytest.raises(errors.ArchiveFormatError):
        Writer(tmp_path, "w")


def test_put_takes_chunks_that_native_code_appended(path: Path) -> None:
    raw = values(100_000)
    chunks = np.zeros(4, CHUNK_DTYPE)
    with Writer(path) as writer:
        native = ffi.cast("h3_chunk *", ffi.from_buffer(chunks, require_writable=True))
        assert lib.h3_encode_append(writer.file, BF16.to_native(), ffi.from_buffer(raw), len(raw), 65536, ffi.NULL, 2,
                                    native) == 0
        record = TensorRecord("t", "bfloat16", (100_000,), BF16, chunks=chunks)
        writer.put(record)
        chunks[:] = 0  # put has its own copy
        writer.commit()
    np.testing.assert_array_equal(read(path, "t"), raw)


def _entry(**fields: int) -> np.ndarray:
    entry = np.zeros(1, CHUNK_DTYPE)
    entry[0] = (4096, 1, 10, Filter.ZSTD, Delta.NONE, 0, 0)
    for name, value in fields.items():
        entry[name] = value
    return entry


@pytest.mark.parametrize("entry", [
    _entry(offset=4095), _entry(offset=2**63), _entry(offset=2**64 - 1), _entry(stored_bytes=4097), _entry(filter=6),
    _entry(delta=3), _entry(reserved=1), _entry(check_kind=2),
    _entry(filter=Filter.ZERO), _entry(filter=Filter.RAW), _entry(stored_bytes=0),
    _entry(delta=Delta.ROW), _entry(delta=Delta.BASE), _entry(offset=4096 + 100_000)])
def test_put_refuses_entries_outside_the_format(path: Path, entry: np.ndarray) -> None:
    with Writer(path) as writer:
        writer.put(TensorRecord("t", "uint8", (4096,), U8, 4096, chunks=_entry()))
        with pytest.raises(errors.UsageError, match="entry 0 is"):
            writer.put(TensorRecord("t", "uint8", (4096,), U8, 4096, chunks=entry))


@pytest.mark.parametrize(("field", "value"), [
    ("name", ""), ("name", "x" * 1025), ("name", "a\0b"), ("name", "\ud800"), ("dtype", "qint8"), ("shape", (-1,)),
    ("shape", (2**63,)), ("shape", (2**40, 2**40)), ("shape", (1,) * 65), ("chunk_bytes", 4095), ("chunk_bytes", 0),
    ("chunk_bytes", 8 << 20), ("spec", Spec(2)), ("spec", Spec(1, 0, Filter.ZSTD, Delta.ROW)),
    ("base", BaseRef("/abs", bytes(16), 1, "t")), ("base", BaseRef("x", bytes(15), 1, "t")),
    ("base", BaseRef("x", bytes(16), 1, ""))])
def test_put_refuses_fields_outside_the_format(path: Path, field: str, value: object) -> None:
    record = TensorRecord("t", "uint8", (0,), U8, chunks=np.zeros(0, CHUNK_DTYPE))
    setattr(record, field, value)
    with Writer(path) as writer:
        with pytest.raises(errors.UsageError):
            writer.put(record)
        assert writer.records == {}


def test_put_needs_one_entry_per_chunk(path: Path) -> None:
    with Writer(path) as writer:
        with pytest.raises(errors.UsageError, match="needs 2 chunk entries, got none"):
            writer.put(TensorRecord("t", "uint8", (8192,), U8, 4096))
        with pytest.raises(errors.UsageError, match=r"needs 2 chunk entries, got \(1,\)"):
            writer.put(TensorRecord("t", "uint8", (8192,), U8, 4096, chunks=_entry()))


def test_metadata_that_json_cannot_hold(path: Path) -> None:
    deep: list[object] = []
    for _ in range(20):
        deep = [deep]
    with Writer(path) as writer:
        for bad in ({"x": object()}, {"x": float("nan")}, {"x": deep}):
            writer.metadata = dict(bad)
            with pytest.raises(errors.UsageError):
                writer.commit()
        writer.metadata = {"text": "é\u2028\U0001f600", "number": 1.5, "list": [None, True]}
        writer.commit()
        with pytest.raises(errors.UsageError, match="deeper"):
            writer.add("t", b"", "uint8", (0,), U8, metadata={"x": deep})
    with Reader(path) as reader:
        assert reader.metadata == {"text": "é\u2028\U0001f600", "number": 1.5, "list": [None, True]}


def test_names_may_be_anything_printable_or_not(path: Path) -> None:
    names = ["model.layers.0.weight", "é" * 512, "\n\t", '"quoted\\"', "\U0001f600", "a/../b"]
    with Writer(path) as writer:
        for name in names:
            writer.add(name, b"x", "uint8", (), U8)
        writer.commit()
    with Reader(path) as reader:
        assert list(reader.records) == names


def test_delta_to_a_base_archive(tmp_path: Path) -> None:
    old, new = tmp_path / "base" / "old.h3", tmp_path / "new.h3"
    old.parent.mkdir()
    before = values(200_000)
    after = before.copy()
    after[::1001] += 1
    with Writer(old) as writer:
        writer.add("w", before, "bfloat16", (200_000,), BF16)
        writer.commit()
        ref = BaseRef("base/old.h3", writer.uuid, writer.sequence, "w")
    with Writer(new) as writer:
        spec = Spec(2, 0, Filter.ZSTD, Delta.BASE, 8)
        writer.add("w", after, "bfloat16", (200_000,), spec, base=ref, base_data=before)
        writer.commit()
    assert verify(new).ok and verify(new).stored_bytes < 10_000
    np.testing.assert_array_equal(read(new, "w"), after)
    assert describe(new).tensors[0].base == "base/old.h3:w"
    old.rename(tmp_path / "moved.h3")
    with pytest.raises(errors.ArchiveNotFoundError, match=r"difference to .*base/old\.h3, which is not there"):
        verify(new)
    with Writer(old) as writer:  # another archive in its place
        writer.add("w", before, "bfloat16", (200_000,), BF16)
        writer.commit()
    with pytest.raises(errors.CorruptArchiveError, match=r"that was at .*base/old\.h3; another one lies there now"):
        verify(new)


def test_an_archive_that_leans_on_itself_ends(path: Path) -> None:
    raw = values(10_000)
    with Writer(path) as writer:
        ref = BaseRef("a.h3", writer.uuid, 1, "t")
        writer.add("t", raw, "bfloat16", (10_000,), Spec(2, 0, Filter.ZSTD, Delta.BASE, 8), base=ref,
                   base_data=raw)
        writer.commit()
    report = verify(path)
    assert [bad.block for bad in report.bad] == [0] and "over 8 deep" in report.bad[0].reason


def test_describe(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("w", values(200_000), "bfloat16", (2, 100_000), BF16)
        writer.add("z", np.zeros(200_000, np.uint8), "uint8", (200_000,), U8)
        writer.add("rows", np.arange(32_768), "int64", (32_768,), Spec(8, 8, Filter.BYTEPLANE, Delta.ROW))
        writer.metadata["made by"] = "a test"
        writer.commit()
    info = describe(path)
    by_name = {tensor.name: tensor for tensor in info.tensors}
    assert by_name["w"].filters == {"EXPNIBBLE": 7} and 1.45 < by_name["w"].ratio < 1.55
    assert by_name["z"].filters == {"ZERO": 4} and by_name["z"].ratio == float("inf")
    assert by_name["rows"].filters == {"BYTEPLANE+ROW": 4}
    assert info.metadata == {"made by": "a test"} and info.raw_bytes == 400_000 + 200_000 + 262_144
    assert info.file_bytes == path.stat().st_size and 0 < info.dead_bytes < 100  # the empty first index
    assert stat.S_ISREG(path.stat().st_mode) and info.tail_bytes == 0


def test_progress_reaches_the_end(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("w", np.zeros(20 << 20, np.uint8), "uint8", (20 << 20,), U8)
        writer.commit()
    seen: list[tuple[int, int]] = []
    verify(path, progress=lambda done, total: seen.append((done, total)), threads=2)
    assert seen[-1] == (20 << 20, 20 << 20) and seen == sorted(seen) and len(seen) == 5


def test_a_reader_keeps_its_commit_while_the_writer_goes_on(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("a", values(1000, 1), "bfloat16", (1000,), BF16)
        writer.commit()
        with Reader(path) as reader:
            for step in range(5):
                writer.add("a", values(1000, step), "bfloat16", (1000,), BF16)
                writer.commit()
            contents = Contents(reader)
            np.testing.assert_array_equal(contents.span(reader.record("a"), 0, 2000), values(1000, 1))
            with Reader(path) as later:
                assert later.sequence == reader.sequence + 5


def test_readers_open_while_a_writer_commits(path: Path) -> None:
    """Whatever moment a reader hits, it finds a whole commit, and never an older one than it saw before."""
    done = threading.Event()
    seen: list[int] = []

    def read_on() -> None:
        while not done.is_set():
            with Reader(path) as reader:
                seen.append(reader.sequence)

    with Writer(path) as writer, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_on)
        for step in range(200):
            writer.metadata["step"] = step
            writer.commit()
        done.set()
        reading.result()
        assert writer.sequence == 201 and seen == sorted(seen) and len(set(seen)) > 10


def test_the_empty_header_page_is_as_specified(path: Path) -> None:
    with Writer(path) as writer:
        page = path.read_bytes()[:HEADER_BYTES]
        assert page[:16] == bytes.fromhex("8948 3353 0d0a 1a0a 0100 0000 0010 0000")
        assert page[16:32] == bytes(16) and page[32:48] == writer.uuid
    assert not any(page[56:1024]) and any(page[1024:1088]) and not any(page[1088:])  # sequence 1 lies in slot 1
