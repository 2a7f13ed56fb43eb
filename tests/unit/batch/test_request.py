"""Rows of a batch file: what is served, and what each refusal says."""

from __future__ import annotations

import json

import pytest

from h3store.batch.request import CHAT_URL, COMPLETIONS_URL, decode_row, parse
from h3store.errors import RequestError


def chat(**body: object) -> dict:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    return {"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": body}


def completion(**body: object) -> dict:
    return {"custom_id": "a", "method": "POST", "url": COMPLETIONS_URL, "body": {"prompt": "hi", **body}}


def test_chat_row_is_read_whole() -> None:
    request = parse(chat(max_completion_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop=["x", "y"]), 12)
    assert (request.custom_id, request.line, request.model) == ("a", 12, "m")
    assert request.messages == (("user", "hi"),)
    assert (request.max_tokens, request.temperature, request.top_p, request.seed) == (7, 0.5, 0.9, 3)
    assert request.stop == ("x", "y")


def test_defaults_are_greedy_and_leave_the_maximum_open() -> None:
    request = parse(completion(), 1)
    assert (request.max_tokens, request.temperature, request.top_p, request.seed) == (None, 0.0, 1.0, None)
    assert (request.stop, request.model, request.ignore_eos) == ((), None, False)


def test_null_fields_count_as_absent() -> None:
    row = chat(max_tokens=None, stop=None, tools=None, seed=None, n=None, response_format=None)
    assert parse(row, 1) == parse(chat(), 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"stream": False},
        {"tools": []},
        {"logprobs": False},
        {"response_format": {"type": "text"}},
        {"frequency_penalty": 0},
        {"presence_penalty": 0.0},
        {"logit_bias": {}},
        {"user": "u"},
        {"metadata": {"a": "b"}},
    ],
)
def test_values_that_ask_for_nothing_are_taken(fields: dict) -> None:
    assert parse(chat(**fields), 1) == parse(chat(), 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "body.n"),
        ({"n": True}, "body.n"),
        ({"stream": True}, "body.stream"),
        ({"logprobs": True}, "body.logprobs"),
        ({"logprobs": 0}, "body.logprobs"),
        ({"tools": [{}]}, "body.tools"),
        ({"frequency_penalty": 0.1}, "body.frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "body.response_format"),
        ({"top_logprobs": 3}, "body.top_logprobs"),
        ({"no_such_field": 1}, "body.no_such_field"),
        ({"prompt": "x"}, "body.prompt"),
    ],
)
def test_fields_not_served_are_named(fields: dict, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(chat(**fields), 1)
    assert (caught.value.code, caught.value.param) == ("unsupported_field", param)
    assert param in str(caught.value)
    assert json.dumps(next(iter(fields.values()))) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "body.max_tokens"),
        ({"max_tokens": 1.5}, "body.max_tokens"),
        ({"max_tokens": True}, "body.max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "body.max_tokens"),
        ({"temperature": -1}, "body.temperature"),
        ({"temperature": "0"}, "body.temperature"),
        ({"temperature": float("nan")}, "body.temperature"),
        ({"temperature": 2.1}, "body.temperature"),
        ({"temperature": True}, "body.temperature"),
        ({"top_p": 0}, "body.top_p"),
        ({"top_p": 1.01}, "body.top_p"),
        ({"seed": 1.0}, "body.seed"),
        ({"seed": 2**63}, "body.seed"),
        ({"stop": ""}, "body.stop"),
        ({"stop": [1]}, "body.stop"),
        ({"stop": ["a"] * 17}, "body.stop"),
        ({"model": 4}, "body.model"),
        ({"messages": []}, "body.messages"),
        ({"messages": "hi"}, "body.messages"),
        ({"messages": None}, "body.messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "body.messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "body.messages[0].role"),
        ({"messages": [{"role": "user"}]}, "body.messages[0].content"),
        ({"messages": [7]}, "body.messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "body.messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "body.messages[0].content"),
    ],
)
def test_bad_values_are_named(fields: dict, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(chat(**fields), 1)
    assert (caught.value.code, caught.value.param) == ("invalid_value", param)
    assert param in str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "input_audio"},
        "text",
        {},
    ],
)
def test_parts_that_are_not_text_are_refused(part: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse(chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]), 1)
    assert (caught.value.code, caught.value.param) == ("unsupported_field", "body.messages[0].content[1].type")


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse(chat(messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]), 1)
    assert request.messages == (("system", "s"), ("user", "a\nb"))


def test_tool_messages_are_refused() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [{"id": "t"}]}
    with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls"):
        parse(chat(messages=[message]), 1)


@pytest.mark.parametrize(("prompt", "read"), [("hi", "hi"), (["hi"], "hi"), ([5, 6], (5, 6)), ([[5, 6]], (5, 6))])
def test_prompts_are_text_or_tokens(prompt: object, read: object) -> None:
    assert parse(completion(prompt=prompt), 1).prompt == read


@pytest.mark.parametrize("prompt", [None, "", [], [""], [-1], [1.5], [True], {}, 4])
def test_bad_prompts(prompt: object) -> None:
    with pytest.raises(RequestError, match=r"body\.prompt"):
        parse(completion(prompt=prompt), 1)


def test_several_prompts_in_one_row_are_refused() -> None:
    with pytest.raises(RequestError, match="2 prompts in one row"):
        parse(completion(prompt=["a", "b"]), 1)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"custom_id": None}, "invalid_custom_id"),
        ({"custom_id": 5}, "invalid_custom_id"),
        ({"custom_id": ""}, "invalid_custom_id"),
        ({"method": "GET"}, "invalid_method"),
        ({"method": None}, "invalid_method"),
        ({"url": "/v1/embeddings"}, "invalid_url"),
        ({"url": []}, "invalid_url"),
        ({"body": None}, "invalid_body"),
        ({"body": []}, "invalid_body"),
        ({"extra": 1}, "unsupported_field"),
    ],
)
def test_row_fields(change: dict, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse({**chat(), **change}, 1)
    assert caught.value.code == code


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_missing_and_null_are_told_apart(name: str) -> None:
    row = chat()
    with pytest.raises(RequestError, match=f"{name} is null"):
        parse({**row, name: None}, 1)
    del row[name]
    with pytest.raises(RequestError, match=f"{name} is missing"):
        parse(row, 1)


def test_null_content_and_a_null_line_are_named() -> None:
    for message, found in (({"role": "user"}, "missing"), ({"role": "user", "content": None}, "null")):
        with pytest.raises(RequestError, match=rf"messages\[0\]\.content is {found}"):
            parse(chat(messages=[message]), 1)
    with pytest.raises(RequestError, match="the line is null"):
        decode_row("null")


@pytest.mark.parametrize("line", ["{", "[]", "3", "null", b"\xff", "[" * 100_000, '{"a": 1} x'])
def test_lines_that_are_not_objects(line: str | bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode_row(line)
    assert caught.value.code == "invalid_json"
    assert len(str(caught.value)) < 300
