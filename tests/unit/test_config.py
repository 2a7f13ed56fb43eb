"""config.json: both spellings, RoPE against transformers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from h3store.errors import CheckpointError, UnsupportedModelError
from h3store.models.config import LlamaConfig, RopeConfig, read_config

BASE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> LlamaConfig:
    values = {key: value for key, value in (BASE | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_old_and_new_spelling_mean_the_same(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2}, torch_dtype="bfloat16")
    new = read(tmp_path, rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, dtype="bfloat16")
    assert old == new
    assert (old.rope, old.dtype) == (RopeConfig("linear", 5e5, 2.0), torch.bfloat16)


def test_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads="absent", max_position_embeddings="absent", rope_scaling=None)
    assert config.num_key_value_heads == 4 and config.head_dim == 16 and config.max_position_embeddings == 2048
    assert config.rope == RopeConfig("default", 10000.0) and config.dtype is None and not config.tie_word_embeddings


def test_end_of_sequence_ids_come_from_both_files(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=2).eos_token_ids == {2}
    assert read(tmp_path, {"eos_token_id": [5, 6]}, eos_token_id=2).eos_token_ids == {2, 5, 6}
    assert read(tmp_path, {}, eos_token_id=None).eos_token_ids == frozenset()


@pytest.mark.parametrize("rope", [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
], ids=lambda rope: f"{rope['rope_type']}-{rope['rope_theta']:g}")
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rope_frequencies_equal_transformers(tmp_path: Path, rope: dict[str, Any], head_dim: int) -> None:
    ours = read(tmp_path, rope_parameters=rope, head_dim=head_dim).rope.inverse_frequencies(head_dim)
    theirs = {key: value for key, value in BASE.items() if key != "model_type"}
    embedding = LlamaRotaryEmbedding(TheirConfig(**theirs, head_dim=head_dim, rope_parameters=rope))
    positions = torch.arange(256)[None]
    cos, _ = embedding(torch.zeros(1), positions)
    angles = positions[0].float()[:, None] * ours
    torch.testing.assert_close(angles.cos(), cos[0, :, : head_dim // 2], atol=2e-5, rtol=0)
    torch.testing.assert_close(ours, embedding.inv_freq, atol=0, rtol=1e-6)


@pytest.mark.parametrize("changes,message", [
    ({"model_type": "mamba"}, r"model_type 'mamba'.*llama"),
    ({"model_type": "absent"}, "model_type None"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"RoPE type 'yarn'.*llama3"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ({"head_dim": 20}, "head_dim 20"),
    ({"quantization_config": {"quant_method": "awq"}}, "awq"),
])
def test_what_this_build_does_not_run(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize("changes,message", [
    ({"hidden_size": "absent"}, "hidden_size is None"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"vocab_size": "many"}, "vocab_size is 'many'"),
    ({"num_key_value_heads": 3}, "no multiple"),
    ({"rms_norm_eps": "NaN"}, "rms_norm_eps"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
    ({"rope_parameters": [1]}, "RoPE parameters"),
    ({"eos_token_id": "two"}, "eos_token_id"),
])
def test_what_contradicts_itself(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize("content,message", [(None, "missing"), ("{", "does not read as JSON"), ("[]", "not an object"),
                                             ("\xff", "JSON")])
def test_config_files_that_do_not_read(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)
