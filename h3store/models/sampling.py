"""From logits to a token. Owns temperature, top-p and the seeded draw; knows nothing of models."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from h3store.errors import RequestError

__all__ = ["Sampler", "SamplingParams"]


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    Args:
        max_new_tokens: at least 1.
        temperature: 0 is greedy; up to 2.
        top_p: keep the smallest set of tokens whose probability reaches this; in (0, 1].
        seed: same seed, same tokens; None draws a fresh one.
        stop: texts that end the answer; they are not part of it.
        ignore_eos: go on past end-of-sequence tokens.

    Raises:
        RequestError: a value outside its range.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens!r}; needs an integer of at least 1")
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p is 0; needs a number above 0, at most 1")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise RequestError(f"seed is {self.seed!r}; needs an integer")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}; needs a tuple of texts that are not empty")


def _within(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}; needs a number from {low:g} to {high:g}")


class Sampler:
    """Draws the tokens of one sequence; its random stream depends on the seed alone."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % 2**63)

    def __call__(self, logits: Tensor) -> int:
        """Returns a token id for logits (vocab_size,), float32; the lowest id wins a tie when greedy."""
        if self._params.temperature == 0:
            return int(torch.argmax(logits))
        probabilities = torch.softmax(logits.double() / self._params.temperature, -1)
        if self._params.top_p < 1:
            probabilities = _nucleus(probabilities, self._params.top_p)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zeroes all but the most likely tokens that together reach top_p. Source: Holtzman et al. 2020, section 3.1."""
    ordered, order = torch.sort(probabilities, descending=True, stable=True)
    before = torch.cumsum(ordered, -1) - ordered
    kept = torch.where(before < top_p, ordered, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, order, kept)
