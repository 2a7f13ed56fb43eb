"""A batch from file to file. Owns the order of checks before work, progress, and the summary."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h3store.batch.files import ResultFile, read_input, write_all
from h3store.batch.rows import Rows
from h3store.batch.runner import answers
from h3store.console import JobProgress
from h3store.errors import StorageFullError, UsageError

if TYPE_CHECKING:
    from h3store.models.decode import Decoder


@dataclass(frozen=True)
class FileJob:
    """What `run-batch` was asked to do.

    Attributes:
        source: requests, one JSON object a line.
        output: results; resumed if it exists.
        model: a Hugging Face folder.
        store: archive of KV caches; None is a temporary one.
        ddr_bytes: host memory for KV blocks; None lets the decoder decide.
        dtype: "float32", "bfloat16", or None for the checkpoint's.
    """

    source: Path
    output: Path
    model: Path
    store: Path | None = None
    ddr_bytes: int | None = None
    dtype: str | None = None


def run_file(job: FileJob) -> dict[str, Any]:
    """Runs a batch file and returns its summary; results are in the output, one a row.

    Rows are read and checked before the model is loaded, and a batch that is finished loads none.

    Raises:
        UsageError, CheckpointError, TokenizerError: before work began.
        ArchiveError, OSError: storage failed; finished rows are kept.
    """
    if job.store is not None and _same_file(job.store, job.output):
        raise UsageError(f"--store {job.store} is the output file; give another name")
    rows = read_input(job.source)
    start = time.monotonic()
    with ResultFile(job.output, job.source) as out:
        remaining = out.remaining(rows)
        if remaining.requests:
            _answer(job, remaining, out)
        else:
            out.append(remaining.errors)
        total = len(rows.requests) + len(rows.errors)
        return {"rows": total, "answered": total - out.error_rows, "error_rows": out.error_rows,
                "resumed_rows": out.resumed_rows, "seconds": round(time.monotonic() - start, 3),
                "output": str(job.output)}


def _same_file(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b) or (a.exists() and b.exists() and a.samefile(b))


def _answer(job: FileJob, remaining: Rows, out: ResultFile) -> None:
    total = len(remaining.requests) + len(remaining.errors)
    with JobProgress("row", total + out.resumed_rows, out.resumed_rows) as progress, _decoder(job) as decoder:
        decoder.tokenizer  # noqa: B018  a model without one must fail before work begins
        answered = answers(remaining.requests, decoder, progress, model=job.model.resolve().name)
        for row in write_all(out, remaining, _naming_the_store(answered, decoder.store.path)):
            progress.step_done(_line(row))


def _naming_the_store(answered: Iterator[dict[str, Any]], store: str | Path) -> Iterator[dict[str, Any]]:
    """The same rows; a full disk says whose file it was and what to do."""
    try:
        yield from answered
    except StorageFullError as error:
        raise StorageFullError(f"store {store}: {error}; finished rows are kept. Make room and run the same command "
                               "again") from error


def _decoder(job: FileJob) -> Decoder:
    from h3store.models.decode import Decoder  # brings torch: rows and flags are checked before it loads

    return Decoder.from_pretrained(job.model, dtype=job.dtype, store=job.store, ddr_bytes=job.ddr_bytes)


def _line(row: dict[str, Any]) -> str:
    name = row["custom_id"] or "(no custom_id)"
    if row["error"]:
        return f"{name}: error: {row['error']['message']}"
    usage = row["response"]["body"]["usage"]
    restored = usage["prompt_tokens_details"]["cached_tokens"]
    return (f"{name}: {usage['prompt_tokens']} prompt tokens, {restored} of them restored, "
            f"{usage['completion_tokens']} new")
