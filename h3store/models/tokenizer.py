"""Text to ids and back, and chat templates. Owns the tokenizer files of a model folder; never invents a template."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from h3store.errors import CheckpointError, RequestError, TokenizerError
from h3store.models.config import read_json
from h3store.models.source import PackedPath, model_folder

__all__ = ["Tokenizer"]


class Tokenizer:
    """The tokenizer of a Hugging Face folder, or of a packed one.

    Args:
        folder: holds tokenizer.json, and may hold tokenizer_config.json, special_tokens_map.json and a chat template.

    Raises:
        TokenizerError: no tokenizer.json, or files that do not load.
    """

    def __init__(self, folder: str | Path | PackedPath) -> None:
        self.folder = model_folder(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{self.folder} has no tokenizer.json; give token ids, or a folder with a tokenizer")
        try:
            self._backend = Backend.from_buffer(path.read_bytes())
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise TokenizerError(f"{path} does not load: {error}") from error
        self._config = self._optional("special_tokens_map.json") | self._optional("tokenizer_config.json")
        self._template = self._find_template()

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence id that the tokenizer names, if it names one."""
        token = self._special("eos_token")
        return None if token is None else self._backend.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of a text; special tokens spelled out in it are recognised.

        Raises:
            RequestError: the text holds a lone surrogate, which is not text.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text does not encode: {error}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids; bytes that are not valid UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return self._template is not None

    def apply_chat_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Returns the ids of a conversation as the model's template writes it.

        Args:
            messages: dicts with "role" and "content".
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            TokenizerError: the folder has no chat template, or it does not compile.
            RequestError: the template refuses these messages.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt))

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Returns the text that `apply_chat_template` encodes; same arguments and errors."""
        if self._template is None:
            raise TokenizerError(f"{self.folder} has no chat template; use completions, or add chat_template.jinja")
        values: dict[str, Any] = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        values |= {name: self._special(name) or "" for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        try:
            return str(self._template.render(values))
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error

    def _find_template(self) -> jinja2.Template | None:
        path = self.folder / "chat_template.jinja"
        source = path.read_text("utf-8") if path.is_file() else self._config.get("chat_template")
        if isinstance(source, list):  # several named templates
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        try:
            return _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"{self.folder}: the chat template does not compile: {error}") from error

    def _special(self, name: str) -> str | None:
        token = self._config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        return token if isinstance(token, str) else None

    def _optional(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            return read_json(path) if path.is_file() else {}
        except CheckpointError as error:
            raise TokenizerError(str(error)) from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Sandboxed: a template comes with the checkpoint and is as untrusted as its other files."""
    extensions: list[str | type[Extension]] = [loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
