"""Offline batches in the OpenAI batch format. Owns rows, their order, result files and resuming."""

from __future__ import annotations

from h3store.batch.files import ResultFile, read_input, write_all
from h3store.batch.request import Request
from h3store.batch.rows import Rows
from h3store.batch.runner import answers, run

__all__ = ["Request", "ResultFile", "Rows", "answers", "read_input", "run", "write_all"]
