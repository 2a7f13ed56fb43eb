"""Tiny random Llama checkpoints in the form that transformers writes, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["reference_logits", "write_tiny"]


def write_tiny(folder: Path, *, dtype: torch.dtype = torch.float32, shard_bytes: str = "1GB", seed: int = 0,
               **changes: Any) -> LlamaForCausalLM:
    """Saves a model to folder and returns it. Weights are larger than at initialisation, so that logits differ."""
    values: dict[str, Any] = {
        "vocab_size": 99, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(seed)
    # head_dim is free of hidden_size / heads only if the check of that quotient is met
    model = LlamaForCausalLM(LlamaConfig(**(values | {"hidden_size": 96} | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if "embed" in name else parameter.shape[-1] ** -0.5))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_bytes)
    # loaded again: moving a model to a narrow type rounds its RoPE frequencies, too
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """transformers' float32 logits, (batch, q_len, vocab_size)."""
    return model(ids).logits
