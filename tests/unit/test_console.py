"""Progress: plain lines where nobody watches, bars on a terminal, and finished steps in both."""

from __future__ import annotations

import io

import pytest

from h3store import console
from h3store.console import JobProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(stream: io.StringIO) -> str:
    with JobProgress("row", 3, done=1, stream=stream) as progress:
        for name in ("a", "b[x]"):
            progress.prefill(0, 1000)
            progress.prefill(1000, 1000)
            progress.token(5)
            progress.step_done(f"{name}: 1000 tokens")
    return stream.getvalue()


def test_plain_output_is_one_line_a_step() -> None:
    assert work(io.StringIO()) == "row 2/3  a: 1000 tokens\nrow 3/3  b[x]: 1000 tokens\n"


def test_a_long_prefill_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PLAIN_INTERVAL_S", -1.0)
    assert "  prompt tokens 1000/1000\n" in work(io.StringIO())


def test_a_terminal_gets_bars_and_the_same_lines() -> None:
    shown = work(Terminal())
    assert "row 2/3  a: 1000 tokens" in shown and "row 3/3  b[x]: 1000 tokens" in shown
    assert "\x1b[" in shown and "waiting" in shown


def test_a_job_of_one_step_shows_its_amount() -> None:
    stream = Terminal()
    with JobProgress("bytes", 0, stream=stream) as progress:
        progress.amount(3, 4)
    assert "bytes" in stream.getvalue()
