"""`h3store run-batch` in a process of its own, on a real checkpoint: results, resuming, interruption, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import h3store
from tests.e2e.conftest import CONTEXT_TOKENS, Cli, command, environment

DOCUMENT = "".join(f"Clause {i}: party {i % 7} pays {i * 37} before day {i * 11}. " for i in range(40))


def chat(custom_id: str, content: str, **body: object) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **body},
    }


def completion(custom_id: str, prompt: object, **body: object) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "max_tokens": 8, **body},
    }


def write(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> dict[str | None, dict[str, Any]]:
    """Results by custom_id; every line must be whole and every row there once."""
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def text_of(row: dict[str, Any]) -> str:
    choice = row["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def greedy(model: Path, ids: list[int], new: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = reference.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def test_answers_in_the_openai_format_equal_to_transformers(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write(
        tmp_path / "in.jsonl",
        [
            chat("c", DOCUMENT + "Who pays?"),
            "",
            completion("t", "Clause 3", ignore_eos=True),
            completion("ids", [40, 41, 42]),
        ],
    )
    done = inline(
        "run-batch",
        "-i",
        "in.jsonl",
        "-o",
        "out.jsonl",
        "--model",
        tiny_model,
        "--store",
        "kv.h3",
        "--ddr",
        "1MiB",
        "--json",
        check=0,
    )
    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["answered"], summary["error_rows"]) == (3, 3, 0)
    assert "row 3/3" in done.stderr
    rows = read(tmp_path / "out.jsonl")
    assert set(rows) == {"c", "t", "ids"}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": DOCUMENT + "Who pays?"}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    body = rows["c"]["response"]["body"]
    assert rows["c"]["error"] is None and rows["c"]["response"]["status_code"] == 200
    assert (body["object"], body["model"], body["choices"][0]["message"]["role"]) == (
        "chat.completion",
        "tiny",
        "assistant",
    )
    assert body["usage"]["prompt_tokens"] == len(prompt)
    expected = greedy(tiny_model, prompt, 8)
    assert text_of(rows["c"]) == tokenizer.decode([t for t in expected if t != 256])
    plain = tokenizer("Clause 3", add_special_tokens=False).input_ids
    assert rows["t"]["response"]["body"]["usage"]["prompt_tokens"] == len(plain) == 8
    assert rows["t"]["response"]["body"]["object"] == "text_completion"
    assert rows["t"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert rows["ids"]["response"]["body"]["usage"]["prompt_tokens"] == 3


def test_a_document_is_restored_by_the_next_row_and_the_next_process(
    cli: Cli, tiny_model: Path, tmp_path: Path
) -> None:
    def cached(name: str, rows: list[dict[str, Any]]) -> tuple[list[int], list[str]]:
        write(tmp_path / f"{name}.in", rows)
        cli(
            "run-batch",
            "-i",
            f"{name}.in",
            "-o",
            f"{name}.out",
            "--model",
            tiny_model,
            "--store",
            "kv.h3",
            "--ddr",
            "1MiB",
            check=0,
        )
        found = read(tmp_path / f"{name}.out")
        usages = [found[row["custom_id"]]["response"]["body"]["usage"] for row in rows]
        return [u["prompt_tokens_details"]["cached_tokens"] for u in usages], [
            text_of(found[r["custom_id"]]) for r in rows
        ]

    other = chat("other", "x" * 1500)
    questions = [chat("q1", DOCUMENT + "A?"), other, chat("q2", DOCUMENT + "B?")]
    first, texts = cached("one", questions)
    shared = len("<|start|>user\n".replace("<|start|>", "S") + DOCUMENT)  # a byte a token
    assert first == [0, 0, shared // 64 * 64]
    again, same = cached("two", questions)
    assert all(count >= shared // 64 * 64 for count in (again[0], again[2])) and again[1] > 1400
    assert same == texts


def test_sampling_is_repeatable_by_seed_and_stops_where_told(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    hot = {"temperature": 1.5, "max_tokens": 24, "ignore_eos": True}
    write(
        tmp_path / "in",
        [completion("a", "z", seed=1, **hot), completion("b", "z", seed=1, **hot), completion("c", "z", seed=2, **hot)],
    )
    inline("run-batch", "-i", "in", "-o", "out", "--model", tiny_model, check=0)
    rows = read(tmp_path / "out")
    assert text_of(rows["a"]) == text_of(rows["b"]) != text_of(rows["c"])
    whole = text_of(rows["a"])
    stop = next(c for c in whole[3:] if c.isascii())
    write(tmp_path / "in2", [completion("a", "z", seed=1, stop=[stop, "never seen"], **hot)])
    inline("run-batch", "-i", "in2", "-o", "out2", "--model", tiny_model, check=0)
    row = read(tmp_path / "out2")["a"]
    assert text_of(row) == whole[: whole.index(stop)]
    assert row["response"]["body"]["choices"][0]["finish_reason"] == "stop"


def test_bad_rows_cost_themselves_only(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    rows = [
        chat("good", "hi"),
        "{torn",
        "   ",
        {**chat("x", "hi"), "custom_id": None},
        chat("stream", "hi", stream=True),
        chat("image", image),
        {**chat("url", "hi"), "url": "/v1/embeddings"},
        chat("long", "x" * (CONTEXT_TOKENS + 1)),
        chat("many", "hi", max_tokens=CONTEXT_TOKENS),
        completion("token", [9999]),
        "[1]",
        chat("after", "hi"),
    ]
    done = inline("run-batch", "-i", write(tmp_path / "in", rows), "-o", "out", "--model", tiny_model, check=1)
    assert "2 answered, 9 error rows" in done.stdout
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert len(results) == len(rows) - 1  # the blank line asks for nothing
    assert {r["custom_id"] for r in results if r["error"] is None} == {"good", "after"}
    assert {r["error"]["line"] for r in results if r["custom_id"] is None} == {2, 4, 11}
    said = {r["custom_id"]: r["error"] for r in results if r["error"]}
    assert said["stream"]["param"] == "body.stream" and "true" in said["stream"]["message"]
    assert "image_url" in said["image"]["message"]
    assert "/v1/embeddings" in said["url"]["message"]
    assert said["long"]["code"] == said["many"]["code"] == "context_length_exceeded"
    assert str(CONTEXT_TOKENS) in said["long"]["message"] and "shorten the prompt" in said["long"]["message"]
    assert "9999" in said["token"]["message"]
    again = inline("run-batch", "-i", "in", "-o", "out", "--model", tiny_model, check=1)
    assert "11 from an earlier run" in again.stdout
    assert len((tmp_path / "out").read_text().splitlines()) == len(results)


def test_default_length_is_cut_to_the_context(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    row = completion("a", "x" * (CONTEXT_TOKENS - 5), ignore_eos=True)
    del row["body"]["max_tokens"]
    inline("run-batch", "-i", write(tmp_path / "in", [row]), "-o", "out", "--model", tiny_model, check=0)
    usage = read(tmp_path / "out")["a"]["response"]["body"]["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (5, CONTEXT_TOKENS)


QUESTIONS = [chat(f"q{i}", f"{DOCUMENT}Question {i}?", max_tokens=24, ignore_eos=True) for i in range(24)]
RUN = ["run-batch", "-i", "in", "-o", "out", "--store", "kv.h3", "--ddr", "1MiB"]


def running(model: Path, folder: Path, lines: int) -> subprocess.Popen[str]:
    """A run in a process of its own that has brought the results to so many lines."""
    process = subprocess.Popen(
        command([*RUN, "--model", model]), cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (folder / "out").exists() or (folder / "out").read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)
    return process


def test_interrupted_runs_are_resumed_by_the_same_command(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    write(tmp_path / "in", QUESTIONS)
    kept, finished = b"", 0
    for number, code in [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 143)]:
        process = running(tiny_model, tmp_path, finished + 2)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == code and "Traceback" not in stderr
        before, kept = kept, (tmp_path / "out").read_bytes()
        assert kept.startswith(before)
        if number == signal.SIGKILL:  # a power loss may leave half a line
            kept = kept[: kept.rindex(b"\n") + 1]
            (tmp_path / "out").write_bytes(kept + b'{"id": "batch_req_1", "custom_id": "q9", "respon')
        else:
            assert kept.endswith(b"\n") and "h3store: error: " in stderr
        assert finished + 2 <= kept.count(b"\n") < len(QUESTIONS)
        finished = kept.count(b"\n")
    done = inline(*RUN, "--model", tiny_model, "--json", check=0)
    assert json.loads(done.stdout)["resumed_rows"] == finished
    assert (tmp_path / "out").read_bytes().startswith(kept)
    inline("run-batch", "-i", "in", "-o", "whole", "--model", tiny_model, check=0)
    found, whole = read(tmp_path / "out"), read(tmp_path / "whole")
    assert {name: text_of(row) for name, row in found.items()} == {name: text_of(row) for name, row in whole.items()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_ends_the_run_with_rows_kept(
    inline: Cli, tiny_model: Path, tmp_path: Path, small_disk: Path
) -> None:
    write(tmp_path / "in", [completion(f"c{i}", f"Clause {i}") for i in range(12)])
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (60 * 1024))  # leaves a page, which holds some rows
    args = ["run-batch", "-i", "in", "-o", small_disk / "out", "--model", tiny_model]
    done = inline(*args, check=3)
    assert f"output {small_disk / 'out'}" in done.stderr and "same command again" in done.stderr
    kept = len(read(small_disk / "out"))
    assert 0 < kept < 12
    filler.unlink()
    assert json.loads(inline(*args, "--json", check=0).stdout)["resumed_rows"] == kept
    assert len(read(small_disk / "out")) == 12


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_store_ends_the_run_with_rows_kept(
    inline: Cli, tiny_model: Path, tmp_path: Path, small_disk: Path
) -> None:
    write(tmp_path / "in", [completion("short", "hi"), completion("long", "".join(map(chr, range(33, 126))) * 20)])
    args = [
        "run-batch",
        "-i",
        "in",
        "-o",
        "out",
        "--model",
        tiny_model,
        "--store",
        small_disk / "kv.h3",
        "--ddr",
        "1MiB",
    ]
    done = inline(*args, check=3)
    assert "kv.h3" in done.stderr
    assert set(read(tmp_path / "out")) == {"short"}
    args[args.index("--store") + 1] = "kv.h3"
    assert json.loads(inline(*args, "--json", check=0).stdout)["resumed_rows"] == 1


def test_duplicate_ids_end_before_work_begins(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    write(tmp_path / "in", [chat("a", "hi"), chat("b", "hi"), chat("a", "ho")])
    done = cli("run-batch", "-i", "in", "-o", "out", "--model", tiny_model, check=2)
    assert "'a' is on line 1 and on line 3" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_cut_store_ends_the_run_and_leaves_no_output(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    write(tmp_path / "in", [chat("a", "hi")])
    h3store.save({"a": torch.ones(9)}, tmp_path / "kv.h3")
    os.truncate(tmp_path / "kv.h3", (tmp_path / "kv.h3").stat().st_size - 1)
    inline("run-batch", "-i", "in", "-o", "out", "--model", tiny_model, "--store", "kv.h3", check=3)
    assert not (tmp_path / "out").exists()


def test_a_store_that_is_no_archive_ends_the_run(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    write(tmp_path / "in", [chat("a", "hi")])
    (tmp_path / "kv.h3").write_bytes(b"not an archive" * 1000)
    done = inline("run-batch", "-i", "in", "-o", "out", "--model", tiny_model, "--store", "kv.h3", check=2)
    assert "kv.h3" in done.stderr and not (tmp_path / "out").exists()
    assert (tmp_path / "kv.h3").read_bytes() == b"not an archive" * 1000
