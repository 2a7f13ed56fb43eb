"""Model configurations: config.json in, checked numbers out. Owns which models and RoPE forms this build runs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h3store.errors import CheckpointError, UnsupportedModelError
from h3store.models.source import ModelPath, PackedPath, model_folder

__all__ = ["LlamaConfig", "RopeConfig", "read_config"]

_MODEL_TYPES = ("llama",)
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: how fast each pair of a head's dimensions turns."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Returns (head_dim // 2,) float32 radians per position.

        "dynamic" equals "default" here: it only differs past max_position_embeddings, where this decoder refuses to go.

        Source: Su et al. 2021, section 3.2.2 (default); Chen et al. 2023, section 3.2 (linear); the frequency rule
        published with Llama 3.1 (llama3).
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / self.theta**exponents
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind != "llama3":
            return frequencies
        wavelengths = 2 * math.pi / frequencies
        turns = self.original_max_position_embeddings / wavelengths
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        slow = torch.where(turns < self.low_freq_factor, frequencies / self.factor, blended)
        return torch.where(turns > self.high_freq_factor, frequencies, slow)


@dataclass(frozen=True)
class LlamaConfig:
    """A dense Llama-family model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: torch.dtype | None
    rope: RopeConfig
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    model_type: str = "llama"
    source: ModelPath = field(default=Path(), compare=False)


def read_config(folder: str | Path | PackedPath) -> LlamaConfig:
    """Reads config.json and generation_config.json of a Hugging Face folder, or of a packed one.

    Both spellings are accepted: rope_parameters and dtype, or rope_theta, rope_scaling and torch_dtype.

    Raises:
        CheckpointError: no or broken config.json, or a value that is missing or contradicts another.
        UnsupportedModelError: a model type, activation, RoPE type or dtype that this build does not run.
    """
    path = model_folder(folder) / "config.json"
    values = read_json(path)
    kind = values.get("model_type")
    if kind not in _MODEL_TYPES:
        raise UnsupportedModelError(f"{path}: model_type {kind!r}; this build runs {', '.join(_MODEL_TYPES)}")
    if values.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"{path}: hidden_act {values['hidden_act']!r}; this build runs 'silu'")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method")
        raise UnsupportedModelError(f"{path}: quantised weights ({method!r}); use the bfloat16 or float16 checkpoint")
    return _llama(path, values)


def read_json(path: ModelPath) -> dict[str, Any]:
    """Returns the object in a JSON file; CheckpointError names the file otherwise."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; give a Hugging Face model folder") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} does not read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not an object")
    return values


def _llama(path: ModelPath, values: dict[str, Any]) -> LlamaConfig:
    heads = _count(path, values, "num_attention_heads")
    kv_heads = _count(path, values, "num_key_value_heads", heads)
    hidden = _count(path, values, "hidden_size")
    head_dim = _count(path, values, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 8 or head_dim > 256:
        raise UnsupportedModelError(f"{path}: head_dim {head_dim}; this build runs multiples of 8 up to 256")
    return LlamaConfig(
        vocab_size=_count(path, values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(path, values, "intermediate_size"),
        num_hidden_layers=_count(path, values, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_count(path, values, "max_position_embeddings", 2048),
        rms_norm_eps=_number(path, values, "rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        attention_bias=bool(values.get("attention_bias", False)),
        mlp_bias=bool(values.get("mlp_bias", False)),
        dtype=_dtype(path, values),
        rope=_rope(path, values),
        eos_token_ids=_eos(path.parent, values),
        bos_token_id=values.get("bos_token_id"),
        source=path.parent,
    )


def _count(path: ModelPath, values: dict[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {key} is {value!r}; needs a positive integer")
    return value


def _number(path: ModelPath, values: dict[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"{path}: {key} is {value!r}; needs a positive number")
    return float(value)


def _dtype(path: ModelPath, values: dict[str, Any]) -> torch.dtype | None:
    name = values.get("dtype", values.get("torch_dtype"))
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModelError(f"{path}: dtype {name!r}; this build runs {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _rope(path: ModelPath, values: dict[str, Any]) -> RopeConfig:
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{path}: RoPE parameters are {given!r}; needs an object")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise UnsupportedModelError(f"{path}: RoPE type {kind!r}; this build runs {', '.join(_ROPE_TYPES)}")
    if values.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(f"{path}: partial_rotary_factor is not 1; this build rotates whole heads")
    theta = _number(path, {"rope_theta": given.get("rope_theta", values.get("rope_theta"))}, "rope_theta", 10000.0)
    if kind in ("default", "dynamic"):
        return RopeConfig(kind, theta)
    if kind == "linear":
        return RopeConfig(kind, theta, _number(path, given, "factor"))
    return RopeConfig(kind, theta, _number(path, given, "factor"), _number(path, given, "low_freq_factor"),
                      _number(path, given, "high_freq_factor"), _count(path, given, "original_max_position_embeddings"))


def _eos(folder: ModelPath, values: dict[str, Any]) -> frozenset[int]:
    """Ids of config and generation config together; the tokenizer's own is added where there is a tokenizer."""
    path = folder / "generation_config.json"
    found: set[int] = set()
    for value in (values.get("eos_token_id"), read_json(path).get("eos_token_id") if path.is_file() else None):
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in ids):
            raise CheckpointError(f"{folder}: eos_token_id is {value!r}; needs an id or a list of ids")
        found.update(ids)
    return frozenset(found)
