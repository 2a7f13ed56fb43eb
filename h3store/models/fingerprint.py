"""What must be equal for stored KV to fit a model: a short name for weights, configuration and KV format together."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

import torch

from h3store.models.config import LlamaConfig
from h3store.models.source import ModelPath

__all__ = ["fingerprint"]

_LAYOUT_VERSION = 1  # of a KV block: (2, num_kv_heads, block_tokens, head_dim), K after RoPE
_SAMPLES = 256
_SAMPLE_BYTES = 4096


def fingerprint(config: LlamaConfig, weight_files: list[ModelPath], kv_dtype: torch.dtype, kv_format: str,
                rounded: torch.dtype | None = None) -> str:
    """Returns a hexadecimal sha256.

    Args:
        config: the model's numbers.
        weight_files: of its checkpoint, in order.
        kv_dtype: element type of its KV.
        kv_format: how KV is kept.
        rounded: what the weights are rounded to, None if they are not.

    Weight files enter by size, head (where safetensors keeps names and shapes) and 256 pages spread evenly: training
    changes every page, and reading all of a large checkpoint at each start would cost more than it tells.
    """
    essentials = asdict(replace(config, source=Path()))
    for name in ("source", "eos_token_ids", "bos_token_id", "max_position_embeddings", "dtype"):
        del essentials[name]
    parts = (_LAYOUT_VERSION, sorted(essentials.items()), str(kv_dtype), kv_format, str(rounded))
    digest = hashlib.sha256(repr(parts).encode())
    for path in weight_files:
        _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, path: ModelPath) -> None:
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        digest.update(f"{path.name} {size}".encode())
        head = stream.read(8)
        digest.update(head)
        digest.update(stream.read(min(int.from_bytes(head, "little"), size)))
        for i in range(_SAMPLES):
            stream.seek(size * i // _SAMPLES)
            digest.update(stream.read(_SAMPLE_BYTES))
