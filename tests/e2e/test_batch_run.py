"""`h3store.batch.run` on a real decoder: what costs one row, and what ends the run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import h3store
from h3store.errors import BudgetError, CorruptBlockError, TokenizerError, UsageError
from h3store.models.decode import Decoder
from tests.e2e.conftest import environment


@pytest.fixture
def decoder(tiny_model: Path) -> Iterator[Decoder]:
    with h3store.Decoder.from_pretrained(tiny_model, ddr_bytes="1MiB") as opened:
        yield opened


def row(custom_id: str, prompt: str = "hi", **body: object) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "max_tokens": 3, **body},
    }


def test_rows_may_be_objects_or_lines_and_are_computed_when_asked_for(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    complete = decoder.complete
    monkeypatch.setattr(decoder, "complete", lambda *a, **k: calls.append(1) or complete(*a, **k))
    results = h3store.batch.run([row("a"), json.dumps(row("b")), "", b"{torn", row("c", n=3)], decoder=decoder)
    assert not calls
    first, second, third = next(results), next(results), next(results)
    assert [(r["custom_id"], r["error"]["line"]) for r in (first, second)] == [(None, 4), ("c", 5)]
    assert third["custom_id"] == "a" and third["response"]["body"]["usage"]["completion_tokens"] == 3
    assert len(calls) == 1
    assert [r["custom_id"] for r in results] == ["b"]


def test_duplicates_are_found_before_anything_runs(decoder: Decoder) -> None:
    with pytest.raises(UsageError, match="line 1 and on line 3"):
        h3store.batch.run([row("a"), row("b"), row("a")], decoder=decoder)


def test_a_defect_costs_its_row(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = decoder.complete

    def fails_on_b(ids: list[int], *args: Any, **more: Any) -> Any:
        return 1 // 0 if ids == [*b"b"] else complete(ids, *args, **more)

    monkeypatch.setattr(decoder, "complete", fails_on_b)
    # a byte's token is its place in the sorted alphabet, so the prompt is given as tokens
    rows = [row("a"), {**row("b"), "body": {"prompt": [*b"b"], "max_tokens": 3}}, row("c")]
    results = {r["custom_id"]: r for r in h3store.batch.run(rows, decoder=decoder)}
    assert results["a"]["error"] is results["c"]["error"] is None
    assert results["b"]["error"]["code"] == "internal_error"
    assert results["b"]["response"]["status_code"] == 500
    assert "ZeroDivisionError" in results["b"]["error"]["message"]


@pytest.mark.parametrize("error", [CorruptBlockError, BudgetError, OSError])
def test_a_failure_of_storage_ends_the_run(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    complete = decoder.complete
    left = [2]

    def fails_third(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error("block 7")
        return complete(*args, **more)

    monkeypatch.setattr(decoder, "complete", fails_third)
    results = h3store.batch.run([row("a"), row("b"), row("c"), row("d")], decoder=decoder)
    assert [next(results)["custom_id"], next(results)["custom_id"]] == ["a", "b"]
    with pytest.raises(error, match="block 7"):
        next(results)


def test_a_model_without_a_tokenizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    with h3store.Decoder.from_pretrained(tmp_path) as decoder, pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        h3store.batch.run([row("a")], decoder=decoder)


def test_a_model_without_a_chat_template_serves_completions_only(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    chat = {**row("chat"), "url": "/v1/chat/completions"}
    chat["body"] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with h3store.Decoder.from_pretrained(tmp_path) as decoder:
        results = {r["custom_id"]: r for r in h3store.batch.run([chat, row("plain")], decoder=decoder)}
    assert "chat template" in results["chat"]["error"]["message"]
    assert results["chat"]["error"]["param"] == "body.messages"
    assert results["plain"]["error"] is None


TEMPORARY = """
import gc, sys
from h3store import Decoder
decoder = Decoder.from_pretrained(sys.argv[1])
if sys.argv[2] == "collected":
    del decoder
    gc.collect()
    import os, tempfile
    assert os.listdir(tempfile.gettempdir()) == []
if sys.argv[2] == "raises":
    raise ValueError
"""


@pytest.mark.parametrize("end", ["returns", "raises", "collected"])
def test_a_temporary_store_goes_with_its_decoder(tiny_model: Path, tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-c", TEMPORARY, str(tiny_model), end]
    done = subprocess.run(command, env={**environment(), "TMPDIR": str(tmp_path)}, timeout=60, check=False)
    assert done.returncode == (end == "raises")
    assert list(tmp_path.iterdir()) == []


def test_a_store_with_a_path_needs_no_temporary_folder(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with Decoder.from_pretrained(tiny_model, store=tmp_path / "kv.h3"):
        assert list(scratch.iterdir()) == []
    with Decoder.from_pretrained(tiny_model) as decoder:
        assert Path(decoder.store.path).parent.parent == scratch
    assert list(scratch.iterdir()) == []
