"""The Llama family: its weights by name, and one pass of some tokens through the layers.

Owns the forward pass over float32 rows, whatever the weights are stored in. Keys and values go to a sequence's blocks
and are read from there alone; nothing here holds KV of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from h3store.attention import BlockKV, block_attention, rope_write
from h3store.models.checkpoint import Checkpoint
from h3store.models.config import LlamaConfig
from h3store.models.layers import Embedding, Linear, Norm, Rows, silu_mul

__all__ = ["KVBlocks", "Llama", "load_weight", "load_weights", "rounded_to", "weight_names"]


class KVBlocks(Protocol):
    """What a forward pass needs of a sequence's KV (h3store.kv serves it)."""

    length: int

    def reserve(self, n_tokens: int) -> None:
        """Room for n more tokens."""

    def block_table(self, layer: int) -> np.ndarray:
        """Block addresses of a layer, uint64, covering length and what is reserved."""

    def advance(self, n_tokens: int) -> None:
        """K and V of n more tokens are written."""


def weight_names(config: LlamaConfig) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Maps each matrix of this module to the checkpoint tensors that are stacked into it, and its shape.

    Query, key and value rows lie in one matrix, gate and up rows in another: one pass over the input for each.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    names: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "embed": (("model.embed_tokens.weight",), (config.vocab_size, hidden))}
    for l in range(config.num_hidden_layers):
        at = f"model.layers.{l}."
        names[f"{l}.qkv"] = (tuple(f"{at}self_attn.{x}_proj.weight" for x in "qkv"), (q + 2 * kv, hidden))
        names[f"{l}.o"] = ((f"{at}self_attn.o_proj.weight",), (hidden, q))
        names[f"{l}.gate_up"] = (tuple(f"{at}mlp.{x}_proj.weight" for x in ("gate", "up")), (2 * inner, hidden))
        names[f"{l}.down"] = ((f"{at}mlp.down_proj.weight",), (hidden, inner))
    if not config.tie_word_embeddings:
        names["head"] = (("lm_head.weight",), (config.vocab_size, hidden))
    return names


def load_weights(checkpoint: Checkpoint, config: LlamaConfig, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Reads every matrix of `weight_names`.

    Args:
        checkpoint: the folder.
        config: its configuration.
        dtype: what weights are rounded to; None keeps the checkpoint's. float32 keeps narrower weights as they are,
            since every kernel widens them exactly.

    Raises:
        CheckpointError: a tensor is missing, or has another shape than the configuration promises.
    """
    return {name: load_weight(checkpoint, config, name, dtype) for name in weight_names(config)}


def rounded_to(checkpoint: Checkpoint, dtype: torch.dtype | None) -> torch.dtype | None:
    """What a choice of dtype rounds this checkpoint's weights to; None when they stay as they are."""
    stays = dtype in (None, torch.float32, checkpoint.dtype_of("model.embed_tokens.weight"))
    return None if stays else dtype


def load_weight(checkpoint: Checkpoint, config: LlamaConfig, name: str, dtype: torch.dtype | None) -> Tensor:
    """Reads one matrix of `weight_names`; see `load_weights`."""
    parts, _ = weight_names(config)[name]
    tensors = [checkpoint.get(name, _shape(config, name)) for name in parts]
    stored = tensors[0].dtype
    for tensor in tensors[1:]:
        stored = torch.promote_types(stored, tensor.dtype)
    if dtype is not None and dtype != torch.float32:
        stored = dtype
    # into memory of our own: what safetensors gives may be a view of the file, and a cut file would end the process
    return torch.cat([tensor.to(stored) for tensor in tensors])


def _shape(config: LlamaConfig, name: str) -> tuple[int, ...]:
    """Shape of a checkpoint tensor."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    role, kind = name.split(".")[-2:]
    rows, columns = {"embed_tokens": (config.vocab_size, hidden), "lm_head": (config.vocab_size, hidden),
                     "q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q),
                     "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}[role]
    return (rows,) if kind == "bias" else (rows, columns)


@dataclass(frozen=True)
class _Layer:
    attention_norm: Norm
    qkv: Linear
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class _Workspace:
    """Rows that one pass needs; kept from pass to pass while they are large enough."""

    def __init__(self, config: LlamaConfig, capacity: int) -> None:
        q = config.num_attention_heads * config.head_dim
        self.capacity = capacity
        self.hidden = Rows(capacity, config.hidden_size)
        self.normed = Rows(capacity, config.hidden_size)
        self.qkv = Rows(capacity, q + 2 * config.num_key_value_heads * config.head_dim)
        self.attended = Rows(capacity, q)
        self.lse = Rows(capacity, config.num_attention_heads)
        self.gate_up = Rows(capacity, 2 * config.intermediate_size)
        self.inner = Rows(capacity, config.intermediate_size)


class Llama:
    """A model ready to run.

    Args:
        config: its numbers.
        checkpoint: where the small tensors (norms, biases) are read from.
        weights: the matrices of `weight_names`, plain or tiered; kept.
    """

    def __init__(self, config: LlamaConfig, checkpoint: Checkpoint, weights: dict[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        self._embed = Embedding(weights["embed"])
        self._layers = [self._layer(checkpoint, l) for l in range(config.num_hidden_layers)]
        self._norm = self._read_norm(checkpoint, "model.norm")
        self._head = Linear(weights["embed" if config.tie_word_embeddings else "head"], name="of the output head")
        self._inverse_frequencies = config.rope.inverse_frequencies(config.head_dim)
        self._workspace = _Workspace(config, 1)
        self._last = Rows(1, config.hidden_size)
        self._logits = Rows(1, config.vocab_size)

    def _layer(self, checkpoint: Checkpoint, l: int) -> _Layer:
        at, config = f"model.layers.{l}", self.config

        def linear(name: str, parts: tuple[str, ...], biased: bool) -> Linear:
            names = [f"{at}.{part}.bias" for part in parts]
            bias = torch.cat([checkpoint.get(n, _shape(config, n)).float() for n in names]) if biased else None
            return Linear(self.weights[f"{l}.{name}"], bias, f"of {at}, {', '.join(parts)}")

        return _Layer(
            self._read_norm(checkpoint, f"{at}.input_layernorm"),
            linear("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.attention_bias),
            linear("o", ("self_attn.o_proj",), config.attention_bias),
            self._read_norm(checkpoint, f"{at}.post_attention_layernorm"),
            linear("gate_up", ("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
            linear("down", ("mlp.down_proj",), config.mlp_bias),
        )

    def _read_norm(self, checkpoint: Checkpoint, name: str) -> Norm:
        return Norm(checkpoint.get(f"{name}.weight", (self.config.hidden_size,)), self.config.rms_norm_eps)

    def prefill(self, ids: Tensor, sequence: KVBlocks, kv: BlockKV) -> None:
        """Runs tokens through all layers: their K and V join the sequence.

        A token's results have the same bits however tokens are cut into calls.

        Args:
            ids: (rows,), int64, contiguous.
            sequence: tokens before these; grows by these.
            kv: shape of its blocks.
        """
        self._forward(ids, sequence, kv, exact_rows=True)

    def decode(self, token: int, sequence: KVBlocks, kv: BlockKV) -> Tensor:
        """Runs one token and returns the logits after it: (vocab_size,), float32, valid until the next call."""
        self._forward(torch.tensor([token]), sequence, kv, exact_rows=False)
        return self.last_logits(1)

    def last_logits(self, rows: int) -> Tensor:
        """Logits after the last of the `rows` rows just run: (vocab_size,), float32, valid until the next call."""
        self._last.tensor.copy_(self._workspace.hidden.tensor[rows - 1 : rows])
        self._norm(self._last, self._last, 1)
        self._head(self._last, self._logits, 1)
        return self._logits.tensor[0]

    def all_logits(self, out: Tensor) -> None:
        """Writes the logits after each of the rows just run to out: (rows, vocab_size), float32, contiguous."""
        space, rows = self._workspace, len(out)
        self._norm(space.hidden, space.normed, rows)
        self._head(space.normed, Rows(rows, self.config.vocab_size, out), rows, exact_rows=True)

    def _forward(self, ids: Tensor, sequence: KVBlocks, kv: BlockKV, exact_rows: bool) -> None:
        rows, start = len(ids), sequence.length
        sequence.reserve(rows)
        if self._workspace.capacity < rows:
            self._workspace = _Workspace(self.config, rows)
        space = self._workspace
        cos, sin = self._rotation(start, rows)
        self._embed(ids, space.hidden)
        for l, layer in enumerate(self._layers):
            kv.bind(sequence.block_table(l))
            layer.attention_norm(space.hidden, space.normed, rows)
            layer.qkv(space.normed, space.qkv, rows, exact_rows=exact_rows)
            self._attend(space, kv, rows, start, (cos, sin), exact_rows)
            layer.o(space.attended, space.hidden, rows, accumulate=True, exact_rows=exact_rows)
            layer.mlp_norm(space.hidden, space.normed, rows)
            layer.gate_up(space.normed, space.gate_up, rows, exact_rows=exact_rows)
            silu_mul(space.gate_up, space.inner, rows)
            layer.down(space.inner, space.hidden, rows, accumulate=True, exact_rows=exact_rows)
        sequence.advance(rows)

    def _attend(self, space: _Workspace, kv: BlockKV, rows: int, start: int, rotation: tuple[Tensor, Tensor],
                exact_rows: bool) -> None:
        heads, qkv = self.config.num_attention_heads, space.qkv.tensor[:rows]
        rope_write(qkv, heads, *rotation, kv, start)
        block_attention(qkv, heads, kv, kv_to=start + rows, first=start, scale=self.config.head_dim**-0.5,
                        exact_rows=exact_rows, out=space.attended.tensor[:rows], lse=space.lse.tensor[:rows])

    def _rotation(self, start: int, rows: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each (rows, head_dim // 2), float32."""
        angles = torch.arange(start, start + rows).float()[:, None] * self._inverse_frequencies
        return angles.cos(), angles.sin()


