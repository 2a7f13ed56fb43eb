"""The real model: tokens and logits against transformers in float32, under budgets of KV and weights."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from h3store.models.decode import Decoder, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

NEW_TOKENS = 32
LOGIT_TOLERANCE = 1e-3  # float32 sums in another order, over 30 layers; logits are of size 10 to 30
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
WEIGHT_BYTES = 269_000_000


@dataclass
class Oracle:
    """Prompts, and what transformers makes of them: greedy tokens, and logits after every token of both."""

    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[torch.Tensor]

    @property
    def kv_bytes(self) -> int:
        return max(len(prompt) + NEW_TOKENS for prompt in self.prompts) * KV_BYTES_PER_TOKEN


def questions() -> list[str]:
    document = pydoc_data.topics.topics["specialnames"]
    return ["What is the capital of France?", "Write a short poem about the sea, the wind and 365 days.",
            f"{document[:9000]}\n\nWhich method is called by repr()?"]


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Iterator[Oracle]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompts, answers, logits = [], [], []
    for question in questions():
        message = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        # the mask is given: the prompt holds token 2, which generate() would take for padding
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                               eos_token_id=None, pad_token_id=2)
        prompts.append(ids[0].tolist())
        answers.append(whole[0, ids.shape[1] :].tolist())
        with torch.no_grad():
            logits.append(model(whole).logits[0])
    assert len(prompts[-1]) > 2000
    yield Oracle(smollm2, prompts, answers, logits)


@pytest.mark.parametrize("budget", [1.0, 0.25, 0.1])
def test_greedy_tokens_equal_transformers_under_any_kv_budget(oracle: Oracle, budget: float) -> None:
    ddr_bytes = int(oracle.kv_bytes * budget)
    with Decoder.from_pretrained(oracle.folder, dtype="float32", ddr_bytes=ddr_bytes) as decoder:
        assert decoder.generate(oracle.prompts, NEW_TOKENS, ignore_eos=True) == oracle.answers
        assert decoder.store.stats()["peak_resident_bytes"] <= ddr_bytes


def test_greedy_tokens_equal_transformers_with_weights_at_a_quarter(oracle: Oracle) -> None:
    with Decoder.from_pretrained(oracle.folder, dtype="float32", weights_ddr_bytes=WEIGHT_BYTES // 4) as decoder:
        assert decoder.generate(oracle.prompts, NEW_TOKENS, ignore_eos=True) == oracle.answers


def test_logits_equal_transformers(oracle: Oracle) -> None:
    with Decoder.from_pretrained(oracle.folder, dtype="float32", ddr_bytes="16MiB") as decoder:
        for prompt, answer, expected in zip(oracle.prompts, oracle.answers, oracle.logits, strict=True):
            ours = decoder(torch.tensor([prompt + answer]))[0]
            assert float((ours - expected).abs().max()) <= LOGIT_TOLERANCE


def test_a_restored_document_gives_the_same_answer(oracle: Oracle, tmp_path: Path) -> None:
    prompt, results = oracle.prompts[-1], []
    for _ in range(2):
        with Decoder.from_pretrained(oracle.folder, store=tmp_path / "kv.h3", ddr_bytes="32MiB") as decoder:
            results.append(decoder.complete(prompt, SamplingParams(NEW_TOKENS, temperature=0.7, top_p=0.9, seed=1)))
    first, second = results
    assert second.token_ids == first.token_ids and second.text == first.text
    assert second.restored_tokens == (len(prompt) - 1) // 64 * 64 and second.first_token_s < first.first_token_s / 5


def test_tokenizer_equals_transformers(smollm2: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2)
    with Decoder.from_pretrained(smollm2) as decoder:
        for text in (*questions(), "  12,345.67 naïve café 日本語 🙂\n\n\tend<|im_end|>"):
            assert decoder.tokenizer.encode(text) == theirs(text).input_ids
            assert decoder.tokenizer.decode(theirs(text).input_ids) == theirs.decode(theirs(text).input_ids,
                                                                                     skip_special_tokens=True)
        message = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        expected = theirs.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert decoder.tokenizer.apply_chat_template(message) == expected
        assert decoder.eos_token_ids == {2}
