"""Decoder: prefill and decode on CPU in float32 against transformers, in one process, same weights, tokens and threads.

The shape is SmolLM2-135M's with random weights: the ratios need no download. `python -m asv_bench.benchmarks.decoder`
prints them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from h3store.models.decode import Decoder, SamplingParams

from .common import SEED, Scratch, named

PROMPT_TOKENS = 2000
DECODED_TOKENS = 16
ROUNDS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}  # fmt: skip


class Ours:
    """This package's decoder."""

    def __init__(self, folder: str, ddr_bytes: int | None = None) -> None:
        self.decoder = Decoder.from_pretrained(folder, dtype="float32", ddr_bytes=ddr_bytes)

    def run(self, ids: list[int]) -> tuple[float, float]:
        """Seconds of prefill, and of one decode step."""
        params = SamplingParams(DECODED_TOKENS, ignore_eos=True)
        done = self.decoder.complete(ids, params)
        assert done.restored_tokens == 0
        return done.prefill_s, done.decode_s / (DECODED_TOKENS - 1)

    def close(self) -> None:
        """Removes the temporary store."""
        self.decoder.close()


class Theirs:
    """transformers with sdpa attention and its DynamicCache."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")

    @torch.no_grad()
    def run(self, ids: list[int]) -> tuple[float, float]:
        """Seconds of prefill, and of one decode step."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        started = time.perf_counter()
        out = self.model(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1)
        prefilled = time.perf_counter()
        for _ in range(DECODED_TOKENS - 1):
            token = out.logits[:, -1:].argmax(-1)
            out = self.model(token, cache=cache, use_cache=True, logits_to_keep=1)
        return prefilled - started, (time.perf_counter() - prefilled) / (DECODED_TOKENS - 1)

    def close(self) -> None:
        """Lets go of the model."""
        del self.model


def prompt(round_: int) -> list[int]:
    """Another prompt for each round, so that nothing is restored."""
    generator = torch.Generator().manual_seed(SEED + round_)
    return torch.randint(0, SHAPE["vocab_size"], (PROMPT_TOKENS,), generator=generator).tolist()


def write_model(folder: str) -> None:
    """A random model in bfloat16, as SmolLM2 is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)


def measure(makers: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, tuple[float, float]]:
    """Median seconds of prefill and decode step of each, run in turn after one round that does not count."""
    runners = {name: make() for name, make in makers.items()}
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for round_ in range(rounds + 1):
        for name, runner in runners.items():
            times = runner.run(prompt(round_))
            if round_:
                seen[name].append(times)
    for runner in runners.values():
        runner.close()
    return {name: (statistics.median(t[0] for t in times), statistics.median(t[1] for t in times))
            for name, times in seen.items()}  # fmt: skip


class Decode:
    """Speed at PROMPT_TOKENS of context, and its ratio to transformers in the same process."""

    timeout = 900

    def setup_cache(self) -> dict[str, tuple[float, float]]:
        """Measures once for all numbers below."""
        scratch = Scratch()
        folder = str(scratch.path / "model")
        write_model(folder)
        quarter = PROMPT_TOKENS * SHAPE["num_hidden_layers"] * 2 * SHAPE["num_key_value_heads"] * 64 * 4 // 4
        times = measure({"theirs": lambda: Theirs(folder), "ours": lambda: Ours(folder),
                         "quarter": lambda: Ours(folder, quarter)})  # fmt: skip
        scratch.close()
        return times

    @named("Prefill, KV in memory", "tokens/s")
    def track_prefill_tokens_per_s(self, times: dict[str, tuple[float, float]]) -> float:
        """KV wholly in memory."""
        return PROMPT_TOKENS / times["ours"][0]

    @named("Decode, KV in memory", "tokens/s")
    def track_decode_tokens_per_s(self, times: dict[str, tuple[float, float]]) -> float:
        """KV wholly in memory."""
        return 1 / times["ours"][1]

    @named("Prefill, a quarter of the KV in memory", "tokens/s")
    def track_prefill_tokens_per_s_quarter_budget(self, times: dict[str, tuple[float, float]]) -> float:
        """A quarter of the KV in memory."""
        return PROMPT_TOKENS / times["quarter"][0]

    @named("Decode, a quarter of the KV in memory", "tokens/s")
    def track_decode_tokens_per_s_quarter_budget(self, times: dict[str, tuple[float, float]]) -> float:
        """A quarter of the KV in memory."""
        return 1 / times["quarter"][1]

    @named("Prefill, times faster than transformers", "x")
    def track_prefill_ratio_to_transformers(self, times: dict[str, tuple[float, float]]) -> float:
        """Above 1: faster."""
        return times["theirs"][0] / times["ours"][0]

    @named("Decode, times faster than transformers", "x")
    def track_decode_ratio_to_transformers(self, times: dict[str, tuple[float, float]]) -> float:
        """Above 1: faster."""
        return times["theirs"][1] / times["ours"][1]


def main() -> None:
    """Prints the figures of `Decode` as one table."""
    for name, (prefill_s, step_s) in (times := Decode().setup_cache()).items():
        print(f"{name:8}  prefill {PROMPT_TOKENS / prefill_s:7.1f} tokens/s   decode {1000 * step_s:7.2f} ms/token")
    prefill, decode = (times["theirs"][i] / times["ours"][i] for i in range(2))
    print(f"ratios to transformers ({torch.get_num_threads()} threads, {PROMPT_TOKENS} tokens of context): "
          f"prefill {prefill:.2f} x, decode {decode:.2f} x")


if __name__ == "__main__":
    main()
