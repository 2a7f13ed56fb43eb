"""`h3store demo` in a process of its own, on the tiny checkpoint: answers, table, JSON, and the second run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.conftest import CONTEXT_TOKENS, Cli


def write_document(path: Path, chars: int) -> Path:
    path.write_text("".join(f"{i}: the quick brown fox pays {i * 7} for lunch.\n" for i in range(chars))[:chars])
    return path


def test_second_run_restores_the_document_and_answers_the_same(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    document = write_document(tmp_path / "doc.txt", 3000)
    args = [
        "demo",
        "--model",
        tiny_model,
        "--document",
        document,
        "--questions",
        "Who pays?",
        "How much?",
        "--store",
        "kv.h3",
        "--max-tokens",
        "6",
        "--ddr",
        "1MiB",
    ]
    first = cli(*args, "--json", "one.json", check=0)
    second = cli(*args, "--json", "two.json", check=0)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert [q["tokens_restored"] for q in one["questions"]] == [0, (len("S") + len("user\n") + 3000 + 2) // 64 * 64]
    assert all(q["tokens_restored"] >= 2900 for q in two["questions"])
    assert [q["answer"] for q in one["questions"]] == [q["answer"] for q in two["questions"]]
    assert one["kv_bytes_raw"] > one["ddr_bytes"] == 2**20 >= one["peak_resident_bytes"] > 0
    assert one["evictions"] > 0 and one["kv_bytes_on_disk"] > 0
    assert two["tokens_prefilled"] < 300 < one["tokens_prefilled"]
    for said in (
        "tokens prefilled",
        "tokens restored",
        "time to first token",
        "tokens/s",
        "KV bytes raw",
        "KV bytes on disk",
        "ddr budget",
        "peak resident",
        "faults",
        "evictions",
        "Who pays?",
    ):
        assert said in first.stdout
    assert "question 2/2" in second.stderr and "question 2/2" not in second.stdout


def test_a_long_document_is_cut_to_the_context_and_says_so(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    document = write_document(tmp_path / "doc.txt", CONTEXT_TOKENS + 500)
    done = inline(
        "demo",
        "--model",
        tiny_model,
        "--document",
        document,
        "--questions",
        "Q?",
        "--max-tokens",
        "2",
        "--json",
        "r.json",
        check=0,
    )
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["document_tokens"] + report["document_tokens_left_out"] == CONTEXT_TOKENS + 500
    assert report["document_tokens"] > CONTEXT_TOKENS - 100
    assert "are left out" in done.stderr
