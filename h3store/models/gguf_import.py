"""Turns a GGUF file of the llama family into an ordinary Hugging Face folder.

Owns reading GGUF metadata and tensors, and undoing what llama.cpp did to them (quantisation, interleaved q and k
rows, renamed tensors). Refuses other architectures, tokenizers it cannot rebuild exactly, and tensors it cannot name;
it never guesses. Downloads nothing and runs no model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from h3store.errors import CheckpointError, Unavailable, UnsupportedModelError, UsageError
from h3store.models.gguf_tokenizer import write_tokenizer

__all__ = ["import_gguf"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SAFETENSORS_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def import_gguf(source: str | Path, out: str | Path, *, dtype: str = "bfloat16") -> Path:
    """Writes a folder that AutoModelForCausalLM and AutoTokenizer load unchanged.

    One tensor at a time is dequantised, so memory stays near the largest tensor's size. The folder appears under its
    name only when it is complete.

    Args:
        source: a GGUF file whose architecture is llama.
        out: folder to create; must not exist, or be empty.
        dtype: "bfloat16", "float16" or "float32": what the weights are rounded to.

    Returns:
        The folder.

    Raises:
        UsageError: no such file, `out` in the way, or an unknown dtype.
        CheckpointError: not a GGUF file, or metadata or tensors are missing.
        UnsupportedModelError: another architecture, RoPE form or tensor.
        TokenizerError: a tokenizer that cannot be rebuilt exactly.
        Unavailable: the package gguf is not installed.
    """
    source, out = Path(source), Path(out)
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder; name a new one")
    reader = _open(source)
    fields = _Fields(source, reader)
    names = _name_map(source, reader)
    config = _config(source, fields, reader, dtype)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_tokenizer(source, fields, partial)
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", _generation_config(config))
        _write_weights(partial / "model.safetensors", reader, names, config, _DTYPES[dtype])
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def _open(source: Path) -> Any:
    if not source.is_file():
        raise UsageError(f"{source} is not a file; give the path of a .gguf file")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise Unavailable("reading GGUF needs the package gguf: pip install 'h3store[gguf]'") from error
    with source.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise CheckpointError(f"{source} is not a GGUF file: it starts with {magic!r}, not b'GGUF'")
    try:
        return GGUFReader(source)
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source} is a damaged or unknown GGUF file: {error}; fetch it again") from error


class _Fields:
    """Metadata of one file by name, with an error that names a missing key."""

    def __init__(self, source: Path, reader: Any) -> None:
        self._source, self._fields = source, reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self._source} has no metadata {key!r}, which a llama model needs")
        return value


def _name_map(source: Path, reader: Any) -> dict[str, str]:
    """Hugging Face name of each tensor but the RoPE factors."""
    names: dict[str, str] = {}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        new = _TOP_NAMES.get(tensor.name)
        if new is None:
            prefix, _, rest = tensor.name.partition(".")
            layer, _, rest = rest.partition(".")
            role, _, kind = rest.partition(".")
            if prefix != "blk" or not layer.isdigit() or role not in _BLOCK_NAMES or kind not in ("weight", "bias"):
                raise UnsupportedModelError(f"{source}: tensor {tensor.name!r} is no part of a dense llama model")
            new = f"model.layers.{layer}.{_BLOCK_NAMES[role]}.{kind}"
        names[tensor.name] = new
    for needed in ("token_embd.weight", "output_norm.weight"):
        if needed not in names:
            raise CheckpointError(f"{source} has no tensor {needed!r}")
    return names


def _config(source: Path, fields: _Fields, reader: Any, dtype: str) -> dict[str, Any]:
    architecture = fields.need("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(f"{source}: architecture {architecture!r}; only 'llama' can be imported")
    heads = int(fields.need("llama.attention.head_count"))
    hidden = int(fields.need("llama.embedding_length"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(fields.need("llama.feed_forward_length")),
        "num_hidden_layers": int(fields.need("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(fields.get("llama.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(fields.need("llama.context_length")),
        # the file holds the float32 nearest to a short decimal; its shortest spelling is that decimal
        "rms_norm_eps": float(str(np.float32(fields.need("llama.attention.layer_norm_rms_epsilon")))),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_parameters": _rope(source, fields, tensors),
        "dtype": dtype,
    }
    for role in ("bos", "eos", "padding"):
        token = fields.get(f"tokenizer.ggml.{role}_token_id")
        config[f"{'pad' if role == 'padding' else role}_token_id"] = None if token is None else int(token)
    return config


def _rope(source: Path, fields: _Fields, tensors: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0))}
    kind = fields.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": float(fields.need("llama.rope.scaling.factor"))}
    if kind != "none":
        raise UnsupportedModelError(f"{source}: RoPE scaling {kind!r}; 'none', 'linear' and llama3 can be imported")
    if _ROPE_FACTORS in tensors:
        factors = np.asarray(tensors[_ROPE_FACTORS].data, dtype=np.float64)
        return rope | _llama3_parameters(source, rope["rope_theta"], factors)
    return rope


def _llama3_parameters(source: Path, theta: float, factors: np.ndarray) -> dict[str, Any]:
    """The llama3 RoPE parameters whose per-frequency factors these are; the file keeps only the factors."""
    factor = float(factors.max())
    original, low, high = 8192, 1.0, 4.0
    wavelength = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
        raise UnsupportedModelError(f"{source}: {_ROPE_FACTORS} does not follow the llama3 rule for 8192 positions")
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original}


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}


def _write_weights(path: Path, reader: Any, names: dict[str, str], config: dict[str, Any], dtype: torch.dtype) -> None:
    """Streams one safetensors file: its header follows from the shapes alone."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    tensors = [tensor for tensor in reader.tensors if tensor.name in names]
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        end = offset + int(np.prod(shape)) * dtype.itemsize
        header[names[tensor.name]] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for array in _dequantised(tensors, config):
            stream.write(torch.from_numpy(array).to(dtype).view(torch.uint8).numpy().tobytes())


def _dequantised(tensors: list[Any], config: dict[str, Any]) -> Iterator[np.ndarray]:
    """Float32 values of each tensor in Hugging Face order."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in tensors:
        try:
            array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"tensor {tensor.name!r}: GGUF type {tensor.tensor_type.name} has no decoder "
                                        "in the package gguf; requantise the file to a common type") from error
        array = array.reshape([int(size) for size in reversed(tensor.shape)])
        role = tensor.name.split(".")[-2]
        yield _uninterleave(array, heads[role]) if role in heads else np.ascontiguousarray(array)


def _uninterleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (0, d/2, 1, d/2 + 1, ...) back to halves."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
