"""Sampling: greedy, the nucleus, seeds, and the ranges of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from h3store.errors import RequestError
from h3store.models.sampling import Sampler, SamplingParams


def draws(count: int, logits: torch.Tensor, **changes: Any) -> list[int]:
    sampler = Sampler(SamplingParams(1, **changes))
    return [sampler(logits) for _ in range(count)]


def test_temperature_zero_is_greedy_whatever_the_seed() -> None:
    logits = torch.tensor([0.1, 3.0, 2.9, 3.0])
    assert draws(5, logits, seed=1) == draws(5, logits, top_p=0.1) == [1] * 5


def test_same_seed_same_tokens() -> None:
    logits = torch.randn(1000)
    first = draws(30, logits, temperature=1.0, seed=7)
    assert first == draws(30, logits, temperature=1.0, seed=7)
    assert first != draws(30, logits, temperature=1.0, seed=8)
    assert draws(30, logits, temperature=1.0) != draws(30, logits, temperature=1.0)
    assert draws(3, logits, temperature=1.0, seed=-1)


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -torch.inf])
    counts = torch.bincount(torch.tensor(draws(4000, logits, temperature=0.5, seed=0)), minlength=4) / 4000
    # three standard deviations of 4,000 draws
    torch.testing.assert_close(counts, torch.softmax(logits / 0.5, -1), atol=0.024, rtol=0)
    assert counts[3] == 0


@pytest.mark.parametrize("top_p,kept", [(0.01, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.85, {0, 1, 2}),
                                        (1.0, {0, 1, 2, 3})])
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draws(500, logits, temperature=1.0, top_p=top_p, seed=0)) == kept


def test_tiny_temperatures_stay_finite() -> None:
    assert draws(3, torch.tensor([50.0, 49.0]), temperature=1e-6, seed=0) == [0, 0, 0]


@pytest.mark.parametrize("changes,message", [
    ({"max_new_tokens": 0}, "max_new_tokens is 0"), ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
    ({"temperature": -0.1}, "temperature is -0.1"), ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": 2.1}, "from 0 to 2"), ({"top_p": 0}, "top_p is 0"), ({"top_p": 1.1}, "top_p is 1.1"),
    ({"seed": 1.0}, "seed is 1.0"), ({"stop": "end"}, "stop is 'end'"), ({"stop": ("",)}, "not empty"),
    ({"temperature": True}, "temperature is True")])
def test_parameters_outside_their_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**({"max_new_tokens": 1} | changes))
