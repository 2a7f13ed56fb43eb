"""The decoder against transformers on tiny random checkpoints: every form of checkpoint, cut and budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import h3store
from h3store.errors import (
    BudgetError,
    CheckpointError,
    CorruptBlockError,
    RequestError,
    TokenizerError,
    Unavailable,
    UnsupportedModelError,
    UsageError,
)
from h3store.models import decode
from h3store.models.decode import Decoder, SamplingParams
from tests.tiered import DELIVERIES
from tests.tiny_models import reference_logits, write_tiny

TOLERANCE = 2e-4  # float32 sums in another order; logits are of size 1 to 10


def ids_of(n: int, seed: int = 0, vocab: int = 99) -> torch.Tensor:
    return torch.randint(3, vocab, (1, n), generator=torch.Generator().manual_seed(seed))


FORMS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "sharded": {"shard_bytes": "40KB"},
    "no grouping": {"num_key_value_heads": 6},
    "one KV head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd sizes": {"hidden_size": 36, "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 37,
                  "vocab_size": 101},
    "linear RoPE": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    "dynamic RoPE": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}},
    "llama3 RoPE": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                        "original_max_position_embeddings": 64}},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_transformers(tmp_path: Path, form: str) -> None:
    model = write_tiny(tmp_path, **FORMS[form])
    ids = ids_of(150)
    with Decoder.from_pretrained(tmp_path, dtype="float32") as decoder:
        logits = decoder(ids)
    assert logits.dtype == torch.float32 and logits.shape == (1, 150, model.config.vocab_size)
    torch.testing.assert_close(logits, reference_logits(model, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunks_of_any_size_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    write_tiny(tmp_path)
    ids = ids_of(170)
    with Decoder.from_pretrained(tmp_path) as decoder:
        whole = decoder(ids)
        monkeypatch.setattr(decode, "PREFILL_TOKENS", chunk)
        assert torch.equal(decoder(ids), whole)


@pytest.mark.parametrize("form", ["untied", "tied", "bfloat16"])
def test_64_greedy_steps_equal_transformers(tmp_path: Path, form: str) -> None:
    model = write_tiny(tmp_path, **FORMS[form])
    ids = ids_of(70, seed=3)
    expected = model.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 70:]
    with Decoder.from_pretrained(tmp_path, dtype="float32") as decoder:
        assert decoder.generate(ids, 64, ignore_eos=True) == [expected.tolist()]


def test_each_row_of_a_batch_is_a_sequence_of_its_own(tmp_path: Path) -> None:
    model = write_tiny(tmp_path)
    ids = torch.cat([ids_of(40, seed=i) for i in range(3)])
    with Decoder.from_pretrained(tmp_path) as decoder:
        torch.testing.assert_close(decoder(ids), reference_logits(model, ids), atol=TOLERANCE, rtol=0)
        together = decoder.generate(ids, 5, ignore_eos=True)
        assert together == [decoder.generate(row, 5, ignore_eos=True)[0] for row in ids.tolist()]
        assert decoder.generate([row.tolist() for row in ids], 5, ignore_eos=True) == together


def test_end_of_sequence_ends_a_row_and_ignore_eos_does_not(tmp_path: Path) -> None:
    model = write_tiny(tmp_path)
    ids = ids_of(20)
    free = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 20:].tolist()
    config = json.loads((tmp_path / "config.json").read_text())
    config["eos_token_id"] = [98, free[5]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink()
    upto = free[: free.index(free[5]) + 1]
    with Decoder.from_pretrained(tmp_path) as decoder:
        assert decoder.generate(ids, 12) == [upto]
        done = decoder.complete(ids[0].tolist(), SamplingParams(12))
        assert (done.token_ids, done.finish_reason, done.end_token) == (upto[:-1], "stop", free[5])
        assert decoder.generate(ids, 12, ignore_eos=True) == [free]


@pytest.mark.parametrize("budget", [1.0, 0.25, 0.1])
def test_same_tokens_under_any_kv_budget(tmp_path: Path, budget: float) -> None:
    model = write_tiny(tmp_path, max_position_embeddings=4096, num_hidden_layers=6)
    ids = ids_of(2000)
    kv_bytes = 2000 * 6 * 2 * 2 * 16 * 4
    expected = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 2000:]
    with Decoder.from_pretrained(tmp_path, ddr_bytes=int(kv_bytes * budget)) as decoder:
        assert decoder.generate(ids, 16, ignore_eos=True) == [expected.tolist()]
        sampled = decoder.generate(ids, 16, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
        stats = decoder.store.stats()
        assert stats["peak_resident_bytes"] <= kv_bytes * budget
        assert budget == 1 or min(stats["evictions"], stats["write_backs"], stats["fills"]) > 0
    with Decoder.from_pretrained(tmp_path) as decoder:
        assert decoder.generate(ids, 16, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True) == sampled
        assert decoder.generate(ids, 16, temperature=0.8, top_p=0.9, seed=6, ignore_eos=True) != sampled


def test_weights_under_a_budget_give_the_same_bits(tmp_path: Path) -> None:
    folder, store = tmp_path / "model", tmp_path / "kv.h3"
    write_tiny(folder, vocab_size=4000, hidden_size=192, intermediate_size=1024)
    ids = ids_of(60)
    with Decoder.from_pretrained(folder) as decoder:
        expected = decoder(ids), decoder.generate(ids, 8, ignore_eos=True)
    for _ in range(2):  # packed by the first, found by the second
        with Decoder.from_pretrained(folder, store=store, weights_ddr_bytes="1MiB") as decoder:
            assert torch.equal(decoder(ids), expected[0])
            assert decoder.generate(ids, 8, ignore_eos=True) == expected[1]
    assert len(list(tmp_path.glob("kv.weights-*.h3"))) == 1


def test_a_prompt_is_restored_by_a_later_decoder_with_the_same_bits(tmp_path: Path) -> None:
    folder, store = tmp_path / "model", tmp_path / "kv.h3"
    write_tiny(folder)
    ids = ids_of(300)[0].tolist()
    seen: list[tuple[int, int]] = []
    results = []
    for _ in range(2):
        with Decoder.from_pretrained(folder, store=store) as decoder:
            params = SamplingParams(20, temperature=1.0, seed=3, ignore_eos=True)
            results.append(decoder.complete(ids, params, on_prefill=lambda *at: seen.append(at)))
    first, second = results
    assert (first.restored_tokens, first.prefilled_tokens) == (0, 300)
    assert (second.restored_tokens, second.prefilled_tokens) == (256, 44)
    assert second.token_ids == first.token_ids
    assert seen == [(0, 300), (300, 300), (256, 300), (300, 300)]


def test_a_whole_stored_prompt_still_computes_its_last_token(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    ids = ids_of(128)[0].tolist()
    with Decoder.from_pretrained(tmp_path) as decoder:
        first, second = (decoder.complete(ids, SamplingParams(4, ignore_eos=True)) for _ in range(2))
    assert second.restored_tokens == 64 and second.token_ids == first.token_ids


def test_other_weights_do_not_restore(tmp_path: Path) -> None:
    ids = ids_of(200)[0].tolist()
    for seed in (0, 1):
        write_tiny(tmp_path / str(seed), seed=seed)
        with Decoder.from_pretrained(tmp_path / str(seed), store=tmp_path / "kv.h3") as decoder:
            assert decoder.complete(ids, SamplingParams(1)).restored_tokens == 0
    with Decoder.from_pretrained(tmp_path / "0", dtype="bfloat16", store=tmp_path / "kv.h3") as decoder:
        assert decoder.complete(ids, SamplingParams(1)).restored_tokens == 0


@pytest.mark.parametrize("dtype,tolerance", [("bfloat16", 0.15), ("float16", 0.02)])
def test_narrow_dtypes_round_weights_and_kv_alone(tmp_path: Path, dtype: str, tolerance: float) -> None:
    model = write_tiny(tmp_path)
    ids = ids_of(80)
    with Decoder.from_pretrained(tmp_path, dtype=dtype) as decoder:
        assert decoder.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2
        error = (decoder(ids) - reference_logits(model, ids)).abs().max()
    assert 1e-6 < float(error) < tolerance


@pytest.mark.parametrize("bad,message", [
    ([], "empty"), ([5, 99], "token 1 of the prompt is 99"), ([-1], "token 0"), ([1.5], "1.5"), ([True], "True"),
    ([3] * 510, "512 positions")])
def test_prompts_that_cannot_be_served(tmp_path: Path, bad: list[Any], message: str) -> None:
    write_tiny(tmp_path)
    with Decoder.from_pretrained(tmp_path) as decoder, pytest.raises(RequestError, match=message):
        decoder.complete(bad, SamplingParams(4))


def test_tensors_that_cannot_be_served(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with Decoder.from_pretrained(tmp_path) as decoder:
        for bad in (ids_of(5)[0], ids_of(5).int(), ids_of(5).float(), "text"):
            with pytest.raises(RequestError, match="int64"):
                decoder(bad)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="int64"):
            decoder.generate(ids_of(5).int(), 3)
        with pytest.raises(RequestError, match="512 positions"):
            decoder(ids_of(513))
        assert decoder(ids_of(512)).shape == (1, 512, 99)
        assert decoder(torch.empty(0, 4, dtype=torch.int64)).shape == (0, 4, 99)


def test_no_tokenizer_matters_only_where_one_is_needed(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with Decoder.from_pretrained(tmp_path) as decoder:
        assert decoder.complete([5, 6], SamplingParams(3, ignore_eos=True)).text == ""
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            decoder.tokenizer
        with pytest.raises(TokenizerError):
            decoder.complete([5, 6], SamplingParams(3, stop=("x",)))


def test_arguments_that_are_not_served(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    for error, arguments in (
        (Unavailable, {"device": "cuda"}), (Unavailable, {"kv_format": "int9"}), (Unavailable, {"policy": "guess"}),
        (UsageError, {"hbm_bytes": "1MiB"}), (UsageError, {"dtype": "int8"}), (UsageError, {"ddr_bytes": "much"}),
    ):
        with pytest.raises(error):
            Decoder.from_pretrained(tmp_path, **arguments)


def test_a_budget_below_one_block_is_one_clear_error(tmp_path: Path) -> None:
    write_tiny(tmp_path, head_dim=128)
    with pytest.raises(BudgetError), Decoder.from_pretrained(tmp_path, ddr_bytes=4096) as decoder:
        decoder(ids_of(5))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_every_fault_delivery_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  delivery: str) -> None:
    write_tiny(tmp_path, vocab_size=4000)
    ids = ids_of(400)
    with Decoder.from_pretrained(tmp_path) as decoder:
        expected = decoder.generate(ids, 12, ignore_eos=True)
    monkeypatch.setenv("H3STORE_DELIVERY", delivery)
    with Decoder.from_pretrained(tmp_path, ddr_bytes=80_000, weights_ddr_bytes="1MiB") as decoder:
        assert decoder.store.stats()["delivery"] == delivery
        assert decoder.generate(ids, 12, ignore_eos=True) == expected
        assert decoder.store.stats()["evictions"] > 0


def flip_bit(path: Path, share: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 1
    path.write_bytes(data)


def test_damaged_blocks_are_named(tmp_path: Path) -> None:
    folder, store = tmp_path / "model", tmp_path / "kv.h3"
    write_tiny(folder)
    ids = ids_of(300)
    with Decoder.from_pretrained(folder, store=store, weights_ddr_bytes="1MiB") as decoder:
        expected = decoder.complete(ids[0].tolist(), SamplingParams(4, ignore_eos=True)).token_ids
    flip_bit(store, 0.4)
    with Decoder.from_pretrained(folder, store=store) as decoder:
        with pytest.raises(CorruptBlockError, match=r"kv\.h3.*blocks', block \d+.*attention"):
            decoder.complete(ids[0].tolist(), SamplingParams(4))
        assert decoder.generate(ids[:, 1:], 1)  # other prompts are served
    store.unlink()
    packed = next(tmp_path.glob("kv.weights-*.h3"))
    flip_bit(packed, 0.5)
    with (Decoder.from_pretrained(folder, store=store, weights_ddr_bytes="1MiB") as decoder,
          pytest.raises(CorruptBlockError, match=r"kv\.weights-.*\.h3.*block \d+.*weights of")):
        decoder(ids)
    with Decoder.from_pretrained(folder, store=store) as decoder:
        assert decoder.generate(ids, 4, ignore_eos=True) == [expected]


def test_an_open_store_stays_open(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model")
    with h3store.open(tmp_path / "kv.h3", mode="w", ddr_bytes="1MiB") as store:
        with Decoder.from_pretrained(tmp_path / "model", store=store) as decoder:
            decoder.complete(ids_of(100)[0].tolist(), SamplingParams(2))
            assert decoder.store is store
        assert store.stats()["ddr_bytes"] == 1024**2
        with pytest.raises(UsageError, match="ddr_bytes"):
            Decoder.from_pretrained(tmp_path / "model", store=store, ddr_bytes="2MiB")


def test_a_failed_start_leaves_no_store_locked(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model")
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    (tmp_path / "model" / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Decoder.from_pretrained(tmp_path / "model", store=tmp_path / "kv.h3")
    (tmp_path / "model" / "model.safetensors").write_bytes(weights)
    Decoder.from_pretrained(tmp_path / "model", store=tmp_path / "kv.h3").close()


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_checkpoints_that_are_broken(tmp_path: Path) -> None:
    write_tiny(tmp_path, shard_bytes="40KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    saved = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        Decoder.from_pretrained(tmp_path)
    shards[1].write_bytes(saved)
    edit_config(tmp_path, intermediate_size=113)
    with pytest.raises(CheckpointError, match=r"shape \(112, 96\).*promises \(113, 96\)"):
        Decoder.from_pretrained(tmp_path)
    edit_config(tmp_path, intermediate_size=112, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\..*missing"):
        Decoder.from_pretrained(tmp_path)
    edit_config(tmp_path, num_hidden_layers=3, model_type="gpt9")
    with pytest.raises(UnsupportedModelError, match=r"gpt9.*llama"):
        Decoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Decoder.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        Decoder.from_pretrained(tmp_path / "nowhere")


def test_weights_of_a_type_that_is_not_served(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"up_proj.*int8"):
        Decoder.from_pretrained(tmp_path)
