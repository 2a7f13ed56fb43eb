"""What a person sees while a job runs: progress on stderr, alive on a terminal, plain lines elsewhere.

Owns how it looks; knows nothing of what the job does. Data goes to stdout and never through here.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Plain output names a long prefill this often.
PLAIN_INTERVAL_S = 10.0


def stdout_console() -> Console:
    """Returns a console for results: as wide as the terminal, and wide enough for whole lines where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


class JobProgress:
    """Progress of a job of several steps, each a prefill and new tokens.

    On a terminal two bars are redrawn in place; elsewhere a finished step is one line, and a long prefill says how
    far it is every PLAIN_INTERVAL_S seconds.

    Args:
        title: name of the steps, such as "rows".
        total: steps in all.
        done: steps that were finished before the job started.
        stream: where to; stderr by default.
    """

    def __init__(self, title: str, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._title, self._total, self._done, self._tokens = title, total, done, 0
        self._bars = self._make_bars() if self._stream.isatty() else None
        self._last_line_s = time.monotonic()

    def _make_bars(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bars = Progress(*columns, console=Console(file=self._stream), transient=True)
        self._steps = bars.add_task(self._title, total=self._total, completed=self._done)
        self._step = bars.add_task("waiting", total=None, visible=self._total > 0)
        return bars

    def say(self, text: str) -> None:
        """Prints one line."""
        if self._bars:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def prefill(self, done: int, total: int) -> None:
        """Prompt tokens of the step in hand: computed or restored so far, and in all."""
        self._tokens = 0
        if self._bars:
            self._bars.update(self._step, description="prompt tokens", completed=done, total=total)
        elif time.monotonic() - self._last_line_s > PLAIN_INTERVAL_S:
            self._line(f"  prompt tokens {done}/{total}")

    def amount(self, done: int, total: int) -> None:
        """Progress of a job that is one step: units done and in all."""
        if self._bars:
            self._bars.update(self._steps, completed=done, total=total)
        elif time.monotonic() - self._last_line_s > PLAIN_INTERVAL_S:
            self._line(f"  {self._title}: {100 * done // max(total, 1)} %")

    def token(self, token: int) -> None:
        """One new token of the step in hand."""
        self._tokens += 1
        if self._bars:
            self._bars.update(self._step, description="new tokens", completed=self._tokens, total=None)

    def step_done(self, text: str) -> None:
        """One more step is finished; `text` says how it went."""
        self._done += 1
        if self._bars:
            self._bars.update(self._steps, completed=self._done)
            self._bars.update(self._step, description="waiting", completed=0, total=None)
        self._line(f"{self._title} {self._done}/{self._total}  {text}")

    def _line(self, text: str) -> None:
        self._last_line_s = time.monotonic()
        self.say(text)

    def __enter__(self) -> JobProgress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bars:
            self._bars.stop()
