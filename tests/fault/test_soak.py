"""tests/fault/soak.py, for a few seconds in every delivery, or ten minutes in all."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.tiered import DELIVERIES, ROOT


def soak(seconds: float, delivery: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fault.soak", "--seconds", str(seconds)],
        cwd=ROOT,
        env={**os.environ, "H3STORE_DELIVERY": delivery},
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_few_seconds(delivery: str) -> None:
    counts = soak(4, delivery)
    assert counts["evictions"] > 100 and counts["forks"] > 2 and counts["commits"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("delivery", [*DELIVERIES, "signal"], ids=[*DELIVERIES, "signal again"])
def test_two_and_a_half_minutes(delivery: str) -> None:
    """Four of these are the ten minutes; one run of 600 s is `python -m tests.fault.soak`."""
    counts = soak(150, delivery)
    assert counts["evictions"] > 10_000 and counts["compactions"] > 3
