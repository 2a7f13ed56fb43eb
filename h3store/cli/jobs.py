"""demo and run-batch: documents and questions."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from h3store.cli.flags import DONE, ERROR_ROWS, add_model_flags, command, file, positive, print_json, size
from h3store.errors import UsageError
from h3store.units import counted, format_bytes

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Adds this group's commands."""
    _add_demo(commands)
    _add_run_batch(commands)


def _add_demo(commands: Any) -> None:
    parser = command(commands, "demo", _demo, "ask a long document questions under a small memory budget",
                     "h3store demo --document contract.txt --questions 'Who signs it?' --ddr 64MiB")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="Hugging Face folder, or packed archive (default: "
                        "SmolLM2-135M-Instruct, fetched once)")
    parser.add_argument("--document", type=Path, metavar="FILE", help="text to ask about (default: a part of the "
                        "Python language reference)")
    parser.add_argument("--questions", nargs="+", metavar="TEXT", help="what to ask (default: three questions)")
    parser.add_argument("--max-tokens", type=positive, default=48, metavar="N",
                        help="length of an answer (default 48)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what the table shows to this file")
    add_model_flags(parser, "float32")


def _demo(args: argparse.Namespace) -> int:
    from h3store import demo

    job = demo.Job(model=args.model, document=args.document, questions=args.questions, store=args.store,
                   ddr_bytes=args.ddr, dtype=args.dtype, max_tokens=args.max_tokens)
    if args.json:
        _try_to_write(args.json)
    report = demo.run(job)
    demo.show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return DONE


def _try_to_write(path: Path) -> None:
    """Finds out before the work whether its report can be kept; leaves everything as it was."""
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}; give a file in a folder that can be written") from None
    if is_new:
        path.unlink()


def _add_run_batch(commands: Any) -> None:
    parser = command(commands, "run-batch", _run_batch, "answer a file of requests in the OpenAI batch format",
                     "h3store run-batch -i questions.jsonl -o answers.jsonl --model demo-data/SmolLM2-135M-Instruct "
                     "--store kv.h3 --ddr 1GiB")
    parser.add_argument("-i", "--input", type=file, required=True, metavar="FILE", help="requests, one a line")
    parser.add_argument("-o", "--output", type=file, required=True, metavar="FILE",
                        help="results, appended as they finish; the same command again goes on where it stopped")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER",
                        help="Hugging Face folder of a model, or packed archive")
    add_model_flags(parser, None)
    parser.add_argument("--hbm", type=size, metavar="SIZE",
                        help="GPU memory for KV blocks; refused today: KV is kept in host memory and on disk")
    parser.add_argument("--kv-format", default="native", metavar="NAME",
                        help="how KV is kept; today only native (the default): as it was computed")
    parser.add_argument("--policy", default="exact", metavar="NAME",
                        help="what attention reads; today only exact (the default): every token")
    parser.add_argument("--files", type=Path, metavar="FOLDER",
                        help="files that rows name; refused today: put the text into the rows")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def _refuse_unserved(args: argparse.Namespace) -> None:
    if args.hbm is not None:
        raise UsageError(f"--hbm {format_bytes(args.hbm)}: this version keeps KV in host memory and on disk only; "
                         "leave --hbm out")
    if args.kv_format != "native":
        raise UsageError(f"--kv-format {args.kv_format}: only native is served, which keeps KV as it was computed")
    if args.policy != "exact":
        raise UsageError(f"--policy {args.policy}: only exact is served, which reads every token")
    if args.files is not None:
        raise UsageError(f"--files {args.files}: rows that name files are not served; put the text in the row "
                         "and leave --files out")


def _run_batch(args: argparse.Namespace) -> int:
    _refuse_unserved(args)
    from h3store.batch import job

    summary = job.run_file(job.FileJob(source=args.input, output=args.output, model=args.model, store=args.store,
                                       ddr_bytes=args.ddr, dtype=args.dtype))
    if args.json:
        print_json(summary)
    else:
        earlier = f", {summary['resumed_rows']} from an earlier run" if summary["resumed_rows"] else ""
        print(f"{counted(summary['rows'], 'row')} in {args.output}: {summary['answered']} answered, "
              f"{counted(summary['error_rows'], 'error row')}{earlier}")
    return ERROR_ROWS if summary["error_rows"] else DONE
