"""One row of a batch file: from JSON to a checked request.

Owns the OpenAI batch row format on its way in: which fields are served, their limits, and the message for each that is
not. Pure: no model, no tokenizer, no files; what depends on a tokenizer (the length of a prompt) is checked later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from h3store.errors import RequestError

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
# New tokens of a row that names no maximum; fewer where the context ends sooner.
DEFAULT_MAX_TOKENS = 256
MAX_STOP_STRINGS = 16
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# A field that is not there, as against one that is null.
_MISSING: Any = object()
_ROW_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True)
class Request:
    """A row that can be served.

    Attributes:
        custom_id: the caller's name for the row, unique in its file.
        line: 1-based line of the file, or position in the sequence given to `run`.
        url: CHAT_URL or COMPLETIONS_URL.
        model: the model name that the row asks for and the answer repeats; None if it names none.
        messages: chat messages as (role, text) pairs; empty for a completion.
        prompt: a completion's text or token ids; empty for a chat.
        max_tokens: new tokens at most; None lets DEFAULT_MAX_TOKENS and the context decide.
        temperature: 0 is greedy.
        top_p: nucleus of the distribution that is sampled from, in (0, 1].
        seed: of the sampler; None draws one.
        stop: texts that end the answer.
        ignore_eos: go on after the model's end token.
    """

    custom_id: str
    line: int
    url: str
    model: str | None
    messages: tuple[tuple[str, str], ...]
    prompt: str | tuple[int, ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool

    def text(self) -> str:
        """Returns the prompt as one text: what rows are ordered by."""
        if self.url == CHAT_URL:
            return "\n".join(f"{role}\n{content}" for role, content in self.messages)
        return self.prompt if isinstance(self.prompt, str) else " ".join(map(str, self.prompt))


def decode_row(text: str | bytes) -> dict[str, Any]:
    """Returns the JSON object of one line.

    Raises:
        RequestError: not UTF-8, not JSON, or not an object.
    """
    try:
        row = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise RequestError(f"the line is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; save the "
                           "file as UTF-8", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the line is not JSON ({reason}); write one object a line", code="invalid_json") from None
    if not isinstance(row, dict):
        raise RequestError(f"the line is {_kind(row)}, not a JSON object; write one object a line", code="invalid_json")
    return row


def custom_id_of(row: Mapping[str, Any]) -> str:
    """Returns a row's custom_id.

    Raises:
        RequestError: it is missing or not a text.
    """
    value = row.get("custom_id", _MISSING)
    if not isinstance(value, str) or not value:
        raise RequestError(f"custom_id {_found(value)}; give each row a text of its own", code="invalid_custom_id",
                           param="custom_id")
    return value


def parse(row: Mapping[str, Any], line: int) -> Request:
    """Checks one row and returns it as a Request.

    Args:
        row: the JSON object of the row.
        line: its line number, for messages.

    Raises:
        RequestError: the first thing that cannot be served, with the field, the value, and the way out.
    """
    custom_id = custom_id_of(row)
    for name in row:
        if name not in _ROW_FIELDS:
            raise _unsupported(name, row[name], "a row has custom_id, method, url and body")
    if (method := row.get("method", _MISSING)) != "POST":
        raise RequestError(f"method {_found(method)}; only \"POST\" is served", code="invalid_method",
                           param="method")
    url = row.get("url", _MISSING)
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise RequestError(f"url {_found(url)}; {CHAT_URL} and {COMPLETIONS_URL} are served", code="invalid_url",
                           param="url")
    body = row.get("body", _MISSING)
    if not isinstance(body, dict):
        found = "is missing" if body is _MISSING else f"is {_kind(body)}"
        raise RequestError(f"body {found}; it must be an object", code="invalid_body", param="body")
    return _parse_body(custom_id, line, url, body)


def _parse_body(custom_id: str, line: int, url: str, given: dict[str, Any]) -> Request:
    chat = url == CHAT_URL
    body = {name: value for name, value in given.items() if value is not None}
    _refuse_unserved(body, chat)
    return Request(
        custom_id=custom_id,
        line=line,
        url=url,
        model=_field(body, "model", None, lambda v: isinstance(v, str), "a text"),
        messages=_messages(given.get("messages", _MISSING)) if chat else (),
        prompt="" if chat else _prompt(given.get("prompt", _MISSING)),
        max_tokens=_max_tokens(body),
        temperature=float(_number(body, "temperature", 0.0, lambda v: 0 <= v <= 2, "a number from 0 to 2")),
        top_p=float(_number(body, "top_p", 1.0, lambda v: 0 < v <= 1, "a number above 0, at most 1")),
        seed=_field(body, "seed", None, lambda v: _is_int(v) and -(2**63) <= v < 2**63, "a 64-bit integer"),
        stop=_stop(body.get("stop")),
        ignore_eos=_field(body, "ignore_eos", False, lambda v: isinstance(v, bool), "true or false"),
    )


_COMMON_FIELDS = frozenset({
    "model", "max_tokens", "temperature", "top_p", "seed", "stop", "ignore_eos",
    # Nothing about the answer depends on these.
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options",
})
_CHAT_FIELDS = _COMMON_FIELDS | {"messages", "max_completion_tokens"}
_COMPLETION_FIELDS = _COMMON_FIELDS | {"prompt"}
# Fields that are not served, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,), "suffix": ("",),
    "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},),
    "frequency_penalty": (0,), "presence_penalty": (0,),
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "modalities": (["text"],),
}


def _refuse_unserved(body: dict[str, Any], chat: bool) -> None:
    served = _CHAT_FIELDS if chat else _COMPLETION_FIELDS
    for name, value in body.items():
        if name in served or any(type(value) is type(v) and value == v for v in _NEUTRAL.get(name, ())):
            continue
        if _is_number(value) and any(_is_number(v) and value == v for v in _NEUTRAL.get(name, ())):
            continue
        neutral = _NEUTRAL.get(name)
        allowed = " or ".join(json.dumps(v) for v in neutral) if neutral else ""
        raise _unsupported(f"body.{name}", value, f"leave it out or set it to {allowed}" if neutral else "leave it out")


def _messages(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise _invalid("messages", value, "a list of at least one message")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(value))


def _message(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise _invalid(where, message, "an object with role and content")
    role = message.get("role", _MISSING)
    if not isinstance(role, str) or role not in _ROLES:
        raise _invalid(f"{where}.role", role, "one of " + ", ".join(_ROLES))
    for name, value in message.items():
        if name not in ("role", "content", "name") and value is not None:
            raise _unsupported(f"body.{where}.{name}", value, "a message has role, content and name")
    return _ROLES[role], _content(message.get("content", _MISSING), f"{where}.content")


def _content(value: Any, where: str) -> str:
    """A message's text; the text parts of a list are joined by a line end, as chat templates take one text."""
    if isinstance(value, str):
        return _encodable(value, where)
    if not isinstance(value, list) or not value:
        raise _invalid(where, value, "a text or a list of text parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type", _MISSING) if isinstance(part, dict) else _MISSING
        if kind != "text":
            raise _unsupported(f"body.{where}[{i}].type", kind, "only parts of type \"text\" are served")
        if not isinstance(part.get("text"), str):
            raise _invalid(f"{where}[{i}].text", part.get("text", _MISSING), "a text")
        texts.append(_encodable(part["text"], f"{where}[{i}].text"))
    return "\n".join(texts)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return _encodable(value, "prompt")
    if isinstance(value, list) and value and all(_is_int(token) and token >= 0 for token in value):
        return tuple(value)
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        raise _unsupported("body.prompt", value, f"{len(value)} prompts in one row; write one row a prompt")
    raise _invalid("prompt", value, "a text or a list of token ids, not empty")


def _encodable(text: str, where: str) -> str:
    """The text, unless JSON escapes left half of a surrogate pair in it, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"body.{where} is not valid Unicode: a lone surrogate at character {error.start}; remove it",
                           code="invalid_value", param=f"body.{where}") from None
    return text


def _max_tokens(body: dict[str, Any]) -> int | None:
    values = {_field(body, name, None, lambda v: _is_int(v) and v >= 1, "an integer of at least 1")
              for name in ("max_completion_tokens", "max_tokens")} - {None}
    if len(values) > 1:
        raise RequestError("body.max_tokens and body.max_completion_tokens differ; give one of them",
                           code="invalid_value", param="body.max_tokens")
    return values.pop() if values else None


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in stops):
        raise _invalid("stop", value, f"a text or a list of at most {MAX_STOP_STRINGS} texts, none empty")
    return tuple(_encodable(s, "stop") for s in stops)


def _field(body: dict[str, Any], name: str, default: Any, good: Callable[[Any], bool], rule: str) -> Any:
    value = body.get(name, default)
    if value is not default and not good(value):
        raise _invalid(name, value, rule)
    return value


def _number(body: dict[str, Any], name: str, default: float, good: Callable[[Any], bool], rule: str) -> float:
    return _field(body, name, default, lambda v: _is_number(v) and good(v), rule)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) and math.isfinite(value)


def _invalid(name: str, value: Any, rule: str) -> RequestError:
    return RequestError(f"body.{name} {_found(value)}; it must be {rule}", code="invalid_value", param=f"body.{name}")


def _unsupported(name: str, value: Any, way_out: str) -> RequestError:
    return RequestError(f"{name} {_found(value)}, which is not served; {way_out}", code="unsupported_field",
                        param=name)


def _found(value: Any) -> str:
    return "is missing" if value is _MISSING else f"is {_show(value)}"


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
