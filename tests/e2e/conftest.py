"""A tiny Llama checkpoint with a byte tokenizer, and the command line in a subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import h3store
from h3store.cli import main
from h3store.models.fetch import cache_dir

SPECIAL = ["<|endoftext|>", "<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
CONTEXT_TOKENS = 4096


def write_tokenizer(folder: Path) -> int:
    """A byte a token and three special ones; returns the vocabulary's size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as save_pretrained writes it: 3 layers, 4 heads, 2 KV heads of 32, float32, random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    folder.mkdir()
    vocab_size = write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=256,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(11)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def environment() -> dict[str, str]:
    """This process's environment with our package found first, wherever the command runs."""
    root = str(Path(h3store.__file__).resolve().parents[1])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "H3STORE_CACHE": str(cache_dir().resolve()),
        "H3STORE_DEBUG": "",
    }


Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs `python -m h3store ...` in tmp_path and returns what came of it."""

    def run(
        *args: object, check: int | None = None, timeout_s: float = 120, **more: object
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command(args),
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **more,
        )  # type: ignore[call-overload]
        if check is not None:
            assert done.returncode == check, f"exit {done.returncode}, not {check}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture
def inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The same in this process, for tests that need no process of their own: starting one costs seconds of import."""

    def run(*args: object, check: int) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert code == check, f"exit {code}, not {check}\n{out}\n{err}"
        return subprocess.CompletedProcess(list(map(str, args)), code, out, err)

    return run


def command(args: Sequence[object]) -> list[str]:
    """The command line of a run."""
    return [sys.executable, "-m", "h3store", *map(str, args)]
