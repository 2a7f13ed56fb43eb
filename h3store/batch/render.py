"""Result rows in the OpenAI batch format. Owns how answers and errors look; pure but for ids and time."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from h3store.batch.request import CHAT_URL, Request
from h3store.errors import H3Error, RequestError

if TYPE_CHECKING:
    from h3store.models.decode import Completion


def answer_row(request: Request, completion: Completion, model: str) -> dict[str, Any]:
    """Returns the result row of an answered request.

    Args:
        request: the row that was asked.
        completion: what the decoder made of it.
        model: name to report when the row names no model.
    """
    body = _chat_body(completion) if request.url == CHAT_URL else _completion_body(completion)
    body |= {"created": int(time.time()), "model": request.model or model, "usage": _usage(completion)}
    return _row(request.custom_id, 200, body, None)


def error_row(error: Exception, custom_id: str | None, line: int) -> dict[str, Any]:
    """Returns the result row of a request that was not served.

    `error` and the response body say the same: readers of batch files look in either place.

    Args:
        error: why.
        custom_id: the row's name; None if it has none.
        line: 1-based line of the row, the only name of a row without a custom_id.
    """
    code = error.code if isinstance(error, RequestError) else "internal_error"
    text = str(error) if isinstance(error, H3Error) else f"{type(error).__name__}: {error}"
    detail = {"code": code, "message": f"line {line}: {text}", "param": getattr(error, "param", None), "line": line}
    status = 400 if isinstance(error, RequestError) else 500
    kind = "invalid_request_error" if status == 400 else "server_error"
    body = {"error": {"message": detail["message"], "type": kind, "param": detail["param"], "code": code}}
    return _row(custom_id, status, body, detail)


def _row(custom_id: str | None, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def _chat_body(completion: Completion) -> dict[str, Any]:
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": completion.finish_reason}
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "choices": [choice]}


def _completion_body(completion: Completion) -> dict[str, Any]:
    choice = {"index": 0, "text": completion.text, "logprobs": None, "finish_reason": completion.finish_reason}
    return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "choices": [choice]}


def _usage(completion: Completion) -> dict[str, Any]:
    new = len(completion.token_ids)
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": new,
        "total_tokens": completion.prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": completion.restored_tokens},
    }
