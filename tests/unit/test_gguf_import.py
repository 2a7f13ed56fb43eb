"""GGUF import: files written here as llama.cpp writes them, read back by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from h3store.errors import CheckpointError, TokenizerError, UnsupportedModelError, UsageError
from h3store.models.config import read_config
from h3store.models.gguf_import import import_gguf
from tests.tiny_models import write_tiny

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
Q8, F16, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "F16", "F32"))


def name_of(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, role = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[role]}.{kind}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, kind: Any = F32, **changes: Any) -> Path:
    config, writer = model.config, gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    fields: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers, "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size, "llama.context_length": 512,
        "llama.attention.head_count": config.num_attention_heads, "llama.attention.key_length": config.head_dim,
        "llama.attention.head_count_kv": config.num_key_value_heads, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.chat_template": "{{ messages[0].content }}"}
    extra = changes.pop("tensors", {})
    for key, value in (fields | changes).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", config.rope_parameters["rope_theta"])
    add_tokens(writer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        for role, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if role in name:
                array = interleaved(array, heads)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = kind if array.ndim == 2 else F32
        writer.add_tensor(name_of(name), gguf.quants.quantize(array, stored), raw_dtype=stored)
    for name, array in extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokens(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,", "Ġ", "Ċ"]
    tokens = ["<u>", "<s>", "<e>", *letters, "Ġa", "Ġb", "ab", "12", "<tool>"]
    tokens += [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    kinds = [3, 3, 3] + [1] * (len(letters) + 4) + [4] + [1] * (vocab_size - len(letters) - 8)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ a", "Ġ b", "a b", "1 2"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return write_tiny(tmp_path_factory.mktemp("gguf"), num_hidden_layers=2, intermediate_size=128)


@pytest.mark.parametrize("kind,dtype,tolerance", [(F32, "float32", 0), (F16, "float16", 2**-11),
                                                  (F32, "bfloat16", 2**-8), (Q8, "float32", None)])
def test_transformers_loads_the_same_weights(tmp_path: Path, model: LlamaForCausalLM, kind: Any, dtype: str,
                                             tolerance: float | None) -> None:
    folder = import_gguf(write_gguf(tmp_path / "m.gguf", model, kind), tmp_path / "out", dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == getattr(torch, dtype)
    for name, expected in model.state_dict().items():
        ours = loaded.state_dict()[name].float()
        if tolerance is None:  # Q8_0 rounds to 1/127 of each block's largest value
            assert float((ours - expected).abs().max()) <= float(expected.abs().max()) / 127
        else:
            torch.testing.assert_close(ours, expected, atol=2**-25 if tolerance else 0, rtol=tolerance)
    assert loaded.generation_config.eos_token_id == 2
    config = read_config(folder)
    assert config.rms_norm_eps == model.config.rms_norm_eps and config.eos_token_ids == {2}


def test_a_tied_model_stays_tied(tmp_path: Path) -> None:
    tied = write_tiny(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=1)
    folder = import_gguf(write_gguf(tmp_path / "m.gguf", tied), tmp_path / "out", dtype="float32")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 7, 9]])
    assert torch.equal(loaded(ids).logits, tied(ids).logits)


def test_the_tokenizer_is_rebuilt(tmp_path: Path, model: LlamaForCausalLM) -> None:
    folder = import_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "ab a 12 <tool> b<e>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("ab a 12") == ["ab", "Ġa", "Ġ", "1", "2"]  # smollm splits digits before it merges
    assert tokenizer.eos_token_id == 2 and tokenizer.bos_token_id == 1
    assert tokenizer.decode(tokenizer("a<tool><e>").input_ids, skip_special_tokens=True) == "a<tool>"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_llama3_factors_become_llama3_rope(tmp_path: Path, model: LlamaForCausalLM) -> None:
    wavelength = 2 * np.pi * 10000.0 ** (np.arange(8) / 8)
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    source = write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": factors})
    rope = read_config(import_gguf(source, tmp_path / "out")).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("llama3", 32.0, 8192)
    source = write_gguf(tmp_path / "n.gguf", model, tensors={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        import_gguf(source, tmp_path / "out2")


@pytest.mark.parametrize("changes,error,message", [
    ({"architecture": "qwen9"}, UnsupportedModelError, "'qwen9'"),
    ({"llama.rope.scaling.type": "yarn"}, UnsupportedModelError, "'yarn'"),
    ({"tokenizer.ggml.model": "llama"}, TokenizerError, "byte-level BPE"),
    ({"tokenizer.ggml.pre": "mystery"}, TokenizerError, "'mystery'"),
    ({"llama.block_count": None}, CheckpointError, "llama.block_count"),
    ({"tensors": {"blk.0.ffn_gate_inp.weight": np.ones((2, 2), np.float32)}}, UnsupportedModelError, "ffn_gate_inp"),
])
def test_what_is_not_imported_leaves_nothing_behind(tmp_path: Path, model: LlamaForCausalLM, changes: dict[str, Any],
                                                    error: type[Exception], message: str) -> None:
    source = write_gguf(tmp_path / "m.gguf", model, **changes)
    with pytest.raises(error, match=message):
        import_gguf(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]


def test_bad_arguments_and_files(tmp_path: Path, model: LlamaForCausalLM) -> None:
    source = write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(UsageError, match="not a file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")
    with pytest.raises(UsageError, match="dtype 'int4'"):
        import_gguf(source, tmp_path / "out", dtype="int4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match="not an empty folder"):
        import_gguf(source, tmp_path / "full")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        import_gguf(tmp_path / "text.gguf", tmp_path / "out")
    (tmp_path / "cut.gguf").write_bytes(source.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="damaged"):
        import_gguf(tmp_path / "cut.gguf", tmp_path / "out")
