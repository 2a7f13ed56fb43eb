"""Result files: whole lines, resuming, and outputs that must be left alone."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from h3store.batch.files import ResultFile, read_input
from h3store.batch.request import CHAT_URL
from h3store.errors import StorageFullError, UsageError


def request(custom_id: str) -> str:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT_URL, "body": body})


def answer(custom_id: str, text: str = "x") -> dict:
    return {"id": "i", "custom_id": custom_id, "response": {"body": text}, "error": None}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([request("a"), "", "{torn", request("b"), request("c")]) + "\n")
    return path


def test_blank_lines_are_skipped_and_bad_ones_become_errors_with_their_line(source: Path) -> None:
    rows = read_input(source)
    assert [r.custom_id for r in rows.requests] == ["a", "b", "c"]
    assert [r.line for r in rows.requests] == [1, 4, 5]
    assert [(e["custom_id"], e["error"]["line"], e["error"]["code"]) for e in rows.errors] == [
        (None, 3, "invalid_json")
    ]


def test_duplicate_names_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(request("a") + "\n\n" + request("a") + "\n")
    with pytest.raises(UsageError, match=r"'a' is on line 1 and on line 3"):
        read_input(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (request("a").encode("utf-16"), "UTF-16"),
        (request("a").encode("utf-16-le"), "line 1, byte 1 of the file"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "line 1, byte 0 of the file"),
        (b"\n".join([request("a").encode(), b"\xff", b"\0\0"]), "2 of 3 lines are not UTF-8 text, the first at line 2"),
    ],
)
def test_a_file_that_is_not_utf8_text_is_refused_whole(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=said):
        read_input(path)


def test_one_bad_byte_costs_its_row(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [request("a").encode(), b'{"custom_id": "\xe9"}', request("b").encode()]
    path.write_bytes(codecs.BOM_UTF8 + b"\n".join(lines))
    rows = read_input(path)
    assert [r.custom_id for r in rows.requests] == ["a", "b"]
    assert "not UTF-8: byte 15 is 0xe9" in rows.errors[0]["error"]["message"]


def test_a_run_that_never_started_leaves_no_output(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyError), ResultFile(out, source):
        raise KeyError
    assert not out.exists()
    out.touch()  # not ours
    with pytest.raises(KeyError), ResultFile(out, source):
        raise KeyError
    assert out.exists()


def test_missing_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.jsonl"):
        read_input(tmp_path / "no.jsonl")


def test_resume_drops_a_torn_line_and_keeps_whole_ones(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    rows = read_input(source)
    with ResultFile(out, source) as results:
        results.append([*rows.errors, answer("a", "ü\u2028\n")])
    whole = out.read_bytes()
    out.write_bytes(whole + b'{"custom_id": "b", "err')
    with ResultFile(out, source) as results:
        remaining = results.remaining(rows)
        assert (results.resumed_rows, results.error_rows) == (2, 1)
        assert [r.custom_id for r in remaining.requests] == ["b", "c"]
        assert remaining.errors == []
        assert out.read_bytes() == whole
        results.append([answer("b")])
    assert [json.loads(line)["custom_id"] for line in out.read_bytes().splitlines()] == [None, "a", "b"]


def test_a_second_writer_is_refused(source: Path, tmp_path: Path) -> None:
    with ResultFile(tmp_path / "out", source), pytest.raises(UsageError, match="another run"):
        ResultFile(tmp_path / "out", source)


def test_the_input_is_not_an_output(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(UsageError, match="is the input"):
        ResultFile(source, source)
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    "text", ["my notes\n", "{}\n", '{"custom_id": 4, "error": null}\n', "[1]\n", '{"custom_id": "a"}\n']
)
def test_a_file_of_something_else_is_left_alone(source: Path, tmp_path: Path, text: str) -> None:
    out = tmp_path / "out"
    out.write_text(text)
    with pytest.raises(UsageError, match="line 1 is not a result row"):
        ResultFile(out, source)
    assert out.read_text() == text


def test_results_of_another_batch_are_refused(source: Path, tmp_path: Path) -> None:
    with ResultFile(tmp_path / "out", source) as results:
        results.append([answer("zz")])
        with pytest.raises(UsageError, match="'zz'"):
            results.remaining(read_input(source))


def test_a_full_disk_is_a_storage_error(source: Path) -> None:
    with ResultFile(Path("/dev/full"), source) as results, pytest.raises(StorageFullError, match="same command again"):
        results.append([answer("a")])
    assert results.custom_ids == set()


def test_a_missing_folder_is_a_usage_error(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        ResultFile(tmp_path / "no" / "out", source)
