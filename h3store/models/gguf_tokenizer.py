"""Rebuilds tokenizer.json from the byte-level BPE that a GGUF file carries. Owns that mapping alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from h3store.errors import TokenizerError

__all__ = ["write_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType
_LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                 r"|\s*[\r\n]+|\s+(?!\S)|\s+")


class Metadata(Protocol):
    """Named values of a GGUF file."""

    def get(self, key: str, default: Any = None) -> Any: ...
    def need(self, key: str) -> Any: ...


def write_tokenizer(source: Path, fields: Metadata, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, where the file has one, chat_template.jinja.

    Raises:
        TokenizerError: not byte-level BPE, or a pre-tokenizer whose rule is unknown here.
    """
    kind = fields.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(f"{source}: tokenizer {kind!r}; only byte-level BPE ('gpt2') can be rebuilt exactly")
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(source, fields.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, fields.get("tokenizer.ggml.token_type", [1] * len(tokens)))
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$bos $A", pair="$bos $A $bos $B", special_tokens=[("$bos", int(bos))])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _tokenizer_config(fields, tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    template = fields.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, "utf-8")


def _pre_tokenizer(source: Path, name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in ("default", "gpt-2"):
        return byte_level
    if name in ("llama-bpe", "llama3"):
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise TokenizerError(f"{source}: pre-tokenizer {name!r} is unknown; known are 'smollm', 'gpt-2', 'llama-bpe'")


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    plain = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _tokenizer_config(fields: Metadata, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields.need("llama.context_length")),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{role}_token"] = tokens[int(token)]
    return config
