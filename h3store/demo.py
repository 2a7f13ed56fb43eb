"""The main job in one command: a long document in, answers out, its KV cache tiered over host memory and an archive.

Owns the default document and questions, and the report. Everything else is what any caller of the decoder does.
"""

from __future__ import annotations

import pydoc_data.topics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from h3store.console import JobProgress, stdout_console
from h3store.errors import UsageError
from h3store.models.config import LlamaConfig, read_config
from h3store.models.decode import Completion, Decoder, SamplingParams
from h3store.models.fetch import fetch_smollm2
from h3store.models.tokenizer import Tokenizer
from h3store.units import MiB, format_bytes

# Topics of the language reference that every supported Python has, in this order; their text differs a little.
TOPICS = ("import", "assert", "global", "nonlocal", "raise", "with", "try")
DEFAULT_DOCUMENT_TOKENS = 6000
QUESTIONS = (
    "Which methods does a context manager have?",
    "What is a relative import?",
    "Explain the nonlocal statement.",
)
# The default budget: this part of the document's KV cache.
DDR_PART = 4


@dataclass(frozen=True)
class Job:
    """What the demo was asked to do.

    Attributes:
        model: Hugging Face folder; None fetches SmolLM2-135M-Instruct.
        document: a text file; None takes TOPICS.
        questions: None takes QUESTIONS.
        store: archive that keeps KV for the next run; None is a temporary one.
        ddr_bytes: host memory for KV blocks; None takes 1/DDR_PART of the document's KV.
        dtype: "float32" or "bfloat16".
        max_tokens: length of an answer at most.
    """

    model: Path | None = None
    document: Path | None = None
    questions: Sequence[str] | None = None
    store: Path | None = None
    ddr_bytes: int | None = None
    dtype: str = "float32"
    max_tokens: int = 48


@dataclass(frozen=True)
class Plan:
    """What follows from document, model and budget before any work.

    Attributes:
        document: the text that is asked about, cut to what the context holds.
        tokens: its length.
        left_out: tokens of the document that did not fit.
        kv_bytes: raw KV bytes of these tokens.
        ddr_bytes: the budget.
    """

    document: str
    tokens: int
    left_out: int
    kv_bytes: int
    ddr_bytes: int


def default_document() -> str:
    """Returns the part of the Python language reference that the demo asks about."""
    return "\n\n".join(pydoc_data.topics.topics[name] for name in TOPICS)


def run(job: Job) -> dict[str, Any]:
    """Answers the questions and returns the report, sizes in bytes and times in seconds.

    Raises:
        UsageError: the document can't be read or is empty, or a question leaves it no room.
        BudgetError: ddr_bytes is below what one block needs.
    """
    text = _read(job)
    folder = job.model or _fetch()
    questions = tuple(job.questions or QUESTIONS)
    with JobProgress("question", len(questions)) as progress:
        progress.say(f"loading {folder}")
        plan = _plan(job, text, folder, questions)
        progress.say(f"document: {plan.tokens} tokens, {format_bytes(plan.kv_bytes)} of KV cache; "
                     f"ddr budget {format_bytes(plan.ddr_bytes)}")
        if plan.left_out:
            progress.say(f"the last {plan.left_out} tokens of the document are left out: the context holds no more")
        with Decoder.from_pretrained(folder, dtype=job.dtype, store=job.store, ddr_bytes=plan.ddr_bytes) as decoder:
            answers = [_ask(decoder, plan.document, question, job.max_tokens, progress) for question in questions]
            return _report(job, folder, plan, decoder, answers)


def _fetch() -> Path:
    print("SmolLM2-135M-Instruct: looking in the cache, fetching it once if needed (93 MB)", file=sys.stderr)
    return fetch_smollm2()


def _read(job: Job) -> str:
    if job.document is None:
        return default_document()
    try:
        text = job.document.read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--document {job.document}: {error.strerror}; give a text file in UTF-8") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--document {job.document}: not UTF-8 text, from byte {error.start} on; save it as UTF-8, "
                         "or extract its text first") from None
    if not text.strip():
        raise UsageError(f"--document {job.document}: the file has no text; give a text file in UTF-8")
    return text


def _plan(job: Job, text: str, folder: Path, questions: Sequence[str]) -> Plan:
    config, tokenizer = read_config(folder), Tokenizer(folder)
    around = max(len(tokenizer.apply_chat_template(_messages("", question))) for question in questions)
    room = config.max_position_embeddings - around - job.max_tokens
    if room < 1:
        raise UsageError(f"questions of up to {around} tokens and answers of {job.max_tokens} leave the document no "
                         f"room in a context of {config.max_position_embeddings} tokens; shorten them, or --max-tokens")
    if job.document is None:
        room = min(room, DEFAULT_DOCUMENT_TOKENS)
    ids = tokenizer.encode(text)
    # Cutting may leave half a character, and joining the question may merge a token: a few tokens stay free for both.
    document = text if len(ids) <= room else tokenizer.decode(ids[:room - 4]).rstrip("\ufffd")
    tokens = len(tokenizer.encode(document))
    kv_bytes = tokens * _kv_bytes_per_token(config, job.dtype)
    # A budget has to hold more than the block in hand, however short the document is.
    ddr_bytes = job.ddr_bytes if job.ddr_bytes is not None else max(kv_bytes // DDR_PART, MiB)
    return Plan(document, tokens, len(ids) - tokens if job.document else 0, kv_bytes, ddr_bytes)


def _kv_bytes_per_token(config: LlamaConfig, dtype: str) -> int:
    element_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * element_bytes


def _messages(document: str, question: str) -> list[dict[str, str]]:
    """The document first, so that every question shares it as a prefix."""
    return [{"role": "user", "content": f"{document}\n\n{question}"}]


def _ask(decoder: Decoder, document: str, question: str, max_tokens: int, progress: JobProgress) -> dict[str, Any]:
    ids = decoder.tokenizer.apply_chat_template(_messages(document, question))
    start = time.perf_counter()
    done = decoder.complete(ids, SamplingParams(max_new_tokens=max_tokens), on_prefill=progress.prefill,
                            on_token=progress.token)
    progress.step_done(f"{time.perf_counter() - start:.1f} s: {done.restored_tokens} tokens restored, "
                       f"{done.prefilled_tokens} prefilled, {len(done.token_ids)} new")
    return {
        "question": question,
        "answer": done.text,
        "finish_reason": done.finish_reason,
        "prompt_tokens": done.prompt_tokens,
        "tokens_restored": done.restored_tokens,
        "tokens_prefilled": done.prefilled_tokens,
        "time_to_first_token_s": done.first_token_s,
        "new_tokens": len(done.token_ids),
        "tokens_per_s": _tokens_per_s(done),
    }


def _tokens_per_s(done: Completion) -> float:
    """Speed after the first token, which the time to it covers."""
    return (len(done.token_ids) - 1) / done.decode_s if done.decode_s > 0 and len(done.token_ids) > 1 else 0.0


def _report(job: Job, folder: Path, plan: Plan, decoder: Decoder, answers: list[dict[str, Any]]) -> dict[str, Any]:
    stats = decoder.store.stats()
    return {
        "model": folder.name,
        "dtype": job.dtype,
        "document": str(job.document or "Python language reference"),
        "document_tokens": plan.tokens,
        "document_tokens_left_out": plan.left_out,
        "questions": answers,
        "tokens_prefilled": sum(a["tokens_prefilled"] for a in answers),
        "tokens_restored": sum(a["tokens_restored"] for a in answers),
        "time_to_first_token_s": answers[0]["time_to_first_token_s"],
        "kv_bytes_raw": decoder.kv_bytes_per_token * max(a["prompt_tokens"] for a in answers),
        "kv_bytes_on_disk": Path(decoder.store.path).stat().st_size,
        "ddr_bytes": plan.ddr_bytes,
        "peak_resident_bytes": stats["peak_resident_bytes"],
        "faults": stats["faults"],
        "blocks_fetched": stats["fills"],
        "evictions": stats["evictions"],
        "fault_delivery": stats["delivery"],
        "store": str(job.store) if job.store else None,
    }


def show(report: dict[str, Any]) -> None:
    """Prints answers and table to stdout."""
    console = stdout_console()
    for answer in report["questions"]:
        console.print(f"\n[bold]{escape(answer['question'])}[/bold]\n{escape(answer['answer'].strip())}")
    console.print()
    console.print(_question_table(report["questions"]))
    console.print(_total_table(report))


def _question_table(answers: list[dict[str, Any]]) -> Table:
    table = Table("question", *(str(i) for i in range(1, len(answers) + 1)))
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {"tokens prefilled": "tokens_prefilled", "tokens restored": "tokens_restored", "new tokens": "new_tokens"}
    for title, key in rows.items():
        table.add_row(title, *(f"{a[key]:,}" for a in answers))
    table.add_row("time to first token", *(f"{a['time_to_first_token_s']:.2f} s" for a in answers))
    table.add_row("tokens/s", *(f"{a['tokens_per_s']:.1f}" for a in answers))
    return table


def _total_table(report: dict[str, Any]) -> Table:
    table = Table("over all questions", "")
    table.columns[1].justify = "right"
    table.add_row("document", f"{report['document_tokens']:,} tokens")
    table.add_row("KV bytes raw", format_bytes(report["kv_bytes_raw"]))
    table.add_row("KV bytes on disk", format_bytes(report["kv_bytes_on_disk"]))
    table.add_row("ddr budget", format_bytes(report["ddr_bytes"]))
    table.add_row("peak resident", format_bytes(report["peak_resident_bytes"]))
    table.add_row("blocks fetched: a kernel asks before it reads", f"{report['blocks_fetched']:,}")
    table.add_row("page faults: blocks touched without asking", f"{report['faults']:,}")
    table.add_row("evictions: blocks that made room", f"{report['evictions']:,}")
    return table
