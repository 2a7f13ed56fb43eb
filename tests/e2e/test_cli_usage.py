"""What the command line says to wrong input, in this process: one line on stderr, nothing on stdout, an exit code."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

import h3store
from h3store.cli.app import _exit_code, main
from h3store.errors import ArchiveError
from tests.e2e.conftest import CONTEXT_TOKENS

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, *args: object, code: int = 2) -> str:
    """Runs a command that must fail, and returns its error line."""
    assert main([str(arg) for arg in args]) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    line = err.strip().splitlines()[-1]
    assert line.startswith("h3store: error: ")
    return line


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "args", [[], ["nothing"], ["inspect"], ["inspect", "a", "b"], ["run-batch", "-i", "x"], ["doctor", "--what"]]
)
def test_usage(capsys: Capture, args: list[str]) -> None:
    assert "--help" in refused(capsys, *args)


@pytest.mark.parametrize("command", ["demo", "run-batch", "inspect", "verify", "doctor", "import-gguf"])
def test_help_has_an_example(capsys: Capture, command: str) -> None:
    assert main(["--help"]) == 0 and command in capsys.readouterr().out
    assert main([command, "--help"]) == 0
    assert f"example: h3store {command}" in " ".join(capsys.readouterr().out.split())


BATCH_FLAGS = [
    (["--hbm", "1GiB"], "--hbm 1.0 GiB"),
    (["--kv-format", "int4"], "--kv-format int4: only native"),
    (["--policy", "sparse"], "--policy sparse: only exact"),
    (["--files", "."], "--files ."),
    (["--ddr", "lots"], "'lots' is not a size"),
    (["--ddr", "-1"], "--ddr"),
    (["--ddr", "1KiB"], "--ddr 1KiB is below"),
    (["--ddr", "48KiB"], "give --ddr of at least 128KiB"),
    (["--dtype", "int3"], "int3"),
    (["--model", "no-folder"], "no-folder"),
    (["--model", "in"], "in is a file; give a Hugging Face model folder"),
    (["--store", "out"], "--store out is the output file; give another name"),
    (["--store", "in"], "not an h3store archive"),
    (["--store", "."], "a folder, not an archive"),
    (["-i", "-"], "standard input and output are not served"),
    (["-o", "-"], "standard input and output are not served"),
    (["-i", "nothing"], "input nothing"),
    (["-i", "."], "input ."),
    (["-o", "no/folder"], "output no/folder"),
    (["-o", "."], "output ."),
    (["-o", "in"], "is the input"),
    (["--store", "no/folder/kv.h3"], "no/folder"),
]


@pytest.mark.parametrize(("flags", "said"), BATCH_FLAGS, ids=lambda value: " ".join(value))
def test_batch_flags(capsys: Capture, tiny_model: Path, here: Path, flags: list[str], said: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (here / "in").write_text(json.dumps(row) + "\n")
    given = {"-i": "in", "-o": "out", "--model": str(tiny_model), **dict(zip(flags[::2], flags[1::2], strict=True))}
    assert said in refused(capsys, "run-batch", *[part for pair in given.items() for part in pair])
    assert not (here / "out").exists() and not (here / "-").exists()


def test_a_budget_below_a_block_is_found_before_error_rows_are_written(
    capsys: Capture, tiny_model: Path, here: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (here / "in").write_text(json.dumps(row) + "\n" + json.dumps(row | {"custom_id": "b", "url": "/v1/no"}) + "\n")
    flags = ["-i", "in", "-o", "out", "--model", tiny_model, "--ddr", "48KiB"]
    assert "give --ddr of at least" in refused(capsys, "run-batch", *flags)
    assert not (here / "out").exists()


def test_pack_into_a_folder_where_no_file_can_be_made(capsys: Capture, tiny_model: Path) -> None:
    assert "choose another folder" in refused(capsys, "pack", tiny_model, "/proc/x.h3")


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (None, [], "--document doc.txt"),
        (b" \n", [], "has no text"),
        (b"caf\xe9", [], "UTF-8"),
        (b"text", ["--ddr", "2KiB"], "--ddr 2KiB"),
        (b"text", ["--max-tokens", CONTEXT_TOKENS], "no room"),
        (b"text", ["--max-tokens", "0"], "'0'"),
        (b"text", ["--model", "no-folder"], "no-folder"),
        (b"text", ["--json", "no/x.json"], "--json no/x.json: No such file"),
        (b"text", ["--json", "."], "--json .: Is a directory"),
    ],
)
def test_demo_input(
    capsys: Capture, tiny_model: Path, here: Path, text: bytes | None, flags: list[str], said: str
) -> None:
    if text is not None:
        (here / "doc.txt").write_bytes(text)
    assert said in refused(capsys, "demo", "--model", tiny_model, "--document", "doc.txt", *flags)


def test_import_gguf_refuses_what_is_not_gguf(capsys: Capture, here: Path) -> None:
    (here / "x.gguf").write_bytes(b"nothing like it" * 100)
    assert "x.gguf" in refused(capsys, "import-gguf", "x.gguf", "out")
    assert "no.gguf" in refused(capsys, "import-gguf", "no.gguf", "out")
    assert not (here / "out").exists()


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_archives(capsys: Capture, here: Path, command: str) -> None:
    assert "no.h3" in refused(capsys, command, "no.h3")
    (here / "other.h3").write_bytes(b"something else entirely")
    assert "other.h3" in refused(capsys, command, "other.h3")
    assert str(here) in refused(capsys, command, here)
    assert "a device or pipe" in refused(capsys, command, "/dev/null")
    assert "mode" not in refused(capsys, command, "no.h3")
    (here / "cut.h3").write_bytes(b"")
    assert "cut.h3" in refused(capsys, command, "cut.h3", code=3)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_bad_input(capsys: Capture, here: Path) -> None:
    (here / "mine.h3").write_bytes(b"")
    (here / "mine.h3").chmod(0)
    assert "Permission denied" in refused(capsys, "inspect", "mine.h3")


def test_a_refused_path_is_bad_input_and_a_failing_disk_is_not() -> None:
    def code(number: int) -> int:
        error = ArchiveError("a.h3")
        error.__cause__ = OSError(number, "")
        return _exit_code(error)

    assert (code(errno.EACCES), code(errno.EIO)) == (2, 3)


def test_a_document_is_read_before_the_model(capsys: Capture, here: Path) -> None:
    (here / "folder").mkdir()
    for given in ("no.txt", "folder"):
        said = refused(capsys, "demo", "--model", "nothing", "--document", given)
        assert said.count(given) == 1 and "nothing" not in said


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"h3store {h3store.__version__}\n"
