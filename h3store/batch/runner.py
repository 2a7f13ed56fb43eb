"""Runs requests on a decoder. Owns which failure costs one row and which ends the run; knows no files.

A request that can't be served becomes an error row. A failure of storage or of a budget would meet every later row
too, so it ends the run and leaves rows not yet finished to the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from h3store.batch.order import by_shared_prefix
from h3store.batch.render import answer_row, error_row
from h3store.batch.request import CHAT_URL, DEFAULT_MAX_TOKENS, Request
from h3store.batch.rows import Rows, read_rows
from h3store.errors import ArchiveError, BudgetError, RequestError, StoreClosedError, TokenizerError

if TYPE_CHECKING:
    from h3store.models.decode import Completion, Decoder

# What ends a run instead of costing one row.
FATAL = (ArchiveError, BudgetError, StoreClosedError, OSError)


class Listener(Protocol):
    """Who wants to know how a run goes on."""

    def prefill(self, done: int, total: int) -> None:
        """Prompt tokens of the row in hand: computed or restored so far, and in all."""

    def token(self, token: int) -> None:
        """A new token of the row in hand."""


class Silent:
    """A listener that does nothing."""

    def prefill(self, done: int, total: int) -> None:
        """Ignores."""

    def token(self, token: int) -> None:
        """Ignores."""


def run(requests: Iterable[str | bytes | Mapping[str, Any]], *, decoder: Decoder) -> Iterator[dict[str, Any]]:
    """Answers a batch.

    Args:
        requests: rows in the OpenAI batch format, as objects or as lines of JSON. All are read before the first runs,
            because rows that begin with the same document run one after another.
        decoder: the model; its store keeps what later rows and later runs restore.

    Returns:
        An iterator of result rows, one a request, rows that can't be served first. Each row is computed when asked for.

    Raises:
        UsageError: two rows have the same custom_id.
        TokenizerError: the model has no tokenizer.
        ArchiveError, BudgetError: from the iterator; rows already given stand.
    """
    rows = read_rows(enumerate(requests, 1))
    decoder.tokenizer  # noqa: B018  a model without one must fail before work begins
    return _results(rows, decoder)


def _results(rows: Rows, decoder: Decoder) -> Iterator[dict[str, Any]]:
    yield from rows.errors
    yield from answers(rows.requests, decoder)


def answers(requests: Sequence[Request], decoder: Decoder, listener: Listener | None = None,
            model: str = "h3store") -> Iterator[dict[str, Any]]:
    """Yields one result row a request, requests with a common beginning side by side.

    Args:
        requests: what to run.
        decoder: the model.
        listener: told of progress.
        model: the name that answers carry when their request names no model.
    """
    for i in by_shared_prefix([request.text() for request in requests]):
        request = requests[i]
        try:
            yield answer_row(request, _complete(request, decoder, listener or Silent()), model)
        except FATAL:
            raise
        except Exception as error:  # one row's failure, even a defect of ours, must not cost the rows after it
            yield error_row(error, request.custom_id, request.line)


def _complete(request: Request, decoder: Decoder, listener: Listener) -> Completion:
    from h3store.models.decode import SamplingParams  # brings torch, which checking rows does without

    ids = prompt_ids(request, decoder)
    params = SamplingParams(
        max_new_tokens=_new_tokens(request, len(ids), decoder.config.max_position_embeddings),
        temperature=request.temperature, top_p=request.top_p, seed=request.seed, stop=request.stop,
        ignore_eos=request.ignore_eos)
    return decoder.complete(ids, params, on_prefill=listener.prefill, on_token=listener.token)


def prompt_ids(request: Request, decoder: Decoder) -> list[int]:
    """Returns a request's prompt as token ids; completions get no template and no special tokens.

    Raises:
        RequestError: the chat template refuses the messages, or a token id is outside the vocabulary.
    """
    if request.url == CHAT_URL:
        messages = [{"role": role, "content": content} for role, content in request.messages]
        try:
            return decoder.tokenizer.apply_chat_template(messages)
        except TokenizerError as error:
            raise RequestError(f"the model's chat template refuses body.messages: {error}", code="invalid_messages",
                               param="body.messages") from None
    if isinstance(request.prompt, str):
        return decoder.tokenizer.encode(request.prompt)
    if (top := max(request.prompt)) >= decoder.config.vocab_size:
        raise RequestError(f"body.prompt holds token {top}; the model's vocabulary ends at "
                           f"{decoder.config.vocab_size - 1}", code="invalid_value", param="body.prompt")
    return list(request.prompt)


def _new_tokens(request: Request, prompt_tokens: int, context_tokens: int) -> int:
    """New tokens at most; a named maximum must fit, the default is cut to what is left of the context."""
    left = context_tokens - prompt_tokens
    asked = request.max_tokens if request.max_tokens is not None else min(DEFAULT_MAX_TOKENS, max(left, 1))
    if prompt_tokens == 0:
        raise RequestError("the prompt has no tokens; give it a text", code="invalid_value", param="body")
    if asked > left:
        way_out = f"at most {left} new tokens fit" if left > 0 else f"shorten the prompt by {1 - left} tokens or more"
        raise RequestError(f"the prompt has {prompt_tokens} tokens and {asked} new ones were asked for, but the "
                           f"model's context holds {context_tokens}; {way_out}", code="context_length_exceeded",
                           param="body.max_tokens" if left > 0 else "body")
    return asked
