"""What the command line says to wrong input, in this process: one line on stderr, nothing on stdout, an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h3store.cli import main
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
    (["--ddr", "1KiB"], "ddr_bytes=1024"),
    (["--dtype", "int3"], "int3"),
    (["--model", "no-folder"], "no-folder"),
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
    assert not (here / "out").exists() or (here / "out").read_bytes() == b""


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (None, [], "--document doc.txt"),
        (b" \n", [], "has no text"),
        (b"caf\xe9", [], "UTF-8"),
        (b"text", ["--ddr", "2KiB"], "2048"),
        (b"text", ["--max-tokens", CONTEXT_TOKENS], "no room"),
        (b"text", ["--max-tokens", "0"], "'0'"),
        (b"text", ["--model", "no-folder"], "no-folder"),
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
    assert "other.h3" in refused(capsys, command, "other.h3", code=3)
    assert str(here) in refused(capsys, command, here, code=3)
