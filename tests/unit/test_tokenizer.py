"""Tokenizers: byte-level BPE folders made on the spot, templates, and what fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from h3store.errors import RequestError, TokenizerError
from h3store.models.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<|s|>{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|s|>assistant: {% endif %}"


def write(folder: Path, template: str | None = None, **config: Any) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat"] * 4, trainer)
    backend.add_special_tokens([AddedToken("<|s|>", special=True), AddedToken("<|e|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|e|>"} | config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


MESSAGES = [{"role": "user", "content": "the cat"}]


@pytest.mark.parametrize("text", ["the cat", "", "日本語 🙂 é\n\t  x", "\x00 a"])
def test_text_survives_the_round_trip(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_in_text_are_recognised_and_left_out_of_answers(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    ids = tokenizer.encode("the<|e|>")
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "the" and tokenizer.decode(ids, skip_special_tokens=False) == "the<|e|>"
    assert max(ids) < tokenizer.vocab_size


def test_the_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, TEMPLATE, chat_template="other"))
    assert tokenizer.render_chat(MESSAGES) == "<|s|>user: the cat<|e|><|s|>assistant: "
    assert tokenizer.apply_chat_template(MESSAGES) == tokenizer.encode(tokenizer.render_chat(MESSAGES))
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False) == "<|s|>user: the cat<|e|>"


def test_a_template_of_the_configuration(tmp_path: Path) -> None:
    eos = {"content": "<|e|>", "special": True}
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ eos_token }}!"}]
    for template in ("{{ eos_token }}!", named):
        tokenizer = Tokenizer(write(tmp_path, chat_template=template, eos_token=eos))
        assert tokenizer.has_chat_template and tokenizer.render_chat(MESSAGES) == "<|e|>!"


def test_block_statements_leave_no_lines_behind(tmp_path: Path) -> None:
    template = "{% for m in messages %}\n  {% if loop.first %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    assert Tokenizer(write(tmp_path, template)).render_chat(MESSAGES) == "the cat\n"


def test_no_template_is_an_error_only_when_one_is_needed(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    assert not tokenizer.has_chat_template and tokenizer.encode("the")
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize("template", [
    "{{ raise_exception('roles must alternate') }}", "{{ messages[5].content.x }}", "{{ 1 + 'a' }}"])
def test_messages_that_a_template_refuses(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="refuses"):
        Tokenizer(write(tmp_path, template)).apply_chat_template(MESSAGES)


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}"])
def test_templates_run_in_a_sandbox(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError):
        Tokenizer(write(tmp_path, template)).render_chat(MESSAGES)


def test_files_that_do_not_load(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    write(tmp_path, "{% broken")
    with pytest.raises(TokenizerError, match="does not compile"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="tokenizer_config"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not load"):
        Tokenizer(tmp_path)


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not encode"):
        Tokenizer(write(tmp_path)).encode("\ud83d")
