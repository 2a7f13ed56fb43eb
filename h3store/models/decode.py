"""The decoder that callers use: a checkpoint, a store for KV, and the loop from prompt to tokens.

Owns chunking of the prompt, the order of sampling, stopping, and what is published to the store. The forward pass is
llama.py's, blocks are h3store.kv's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from h3store.attention import BlockKV
from h3store.errors import RequestError, TokenizerError, Unavailable, UsageError
from h3store.kv import KVLayout, KVSequence, KVStore
from h3store.models.checkpoint import Checkpoint
from h3store.models.config import LlamaConfig, read_config
from h3store.models.fingerprint import fingerprint
from h3store.models.layers import use_torch_threads
from h3store.models.llama import Llama, load_weights, rounded_to
from h3store.models.sampling import Sampler, SamplingParams
from h3store.models.source import model_folder
from h3store.models.storage import named_failures, open_store
from h3store.models.tokenizer import Tokenizer
from h3store.models.weights import open_weights, packed_path
from h3store.store import Store

__all__ = ["Completion", "Decoder", "SamplingParams"]

PREFILL_TOKENS = 512  # of a chunk: history is read once per chunk, and the rows of one must stay in cache
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Completion:
    """What came of one prompt.

    Attributes:
        token_ids: new tokens, without the end-of-sequence token.
        text: their text, cut before a stop text; empty for a model without a tokenizer.
        finish_reason: "stop" (end of sequence or a stop text) or "length".
        prompt_tokens: length of the prompt.
        restored_tokens: of these, how many had their KV in the store.
        prefilled_tokens: of these, how many were computed.
        prefill_s: seconds from the call to the end of prefill.
        first_token_s: seconds from the call to the first token.
        decode_s: seconds from the first token to the last.
        end_token: the end-of-sequence token that ended the answer, if one did.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    restored_tokens: int
    prefilled_tokens: int
    prefill_s: float
    first_token_s: float
    decode_s: float
    end_token: int | None = None


class Decoder:
    """A Llama-family model whose KV lives in a store under a byte budget.

    Make one with `from_pretrained`. Not for use from several threads at once.

    Attributes:
        config: the model's numbers.
        store: where KV blocks live.
        kv_bytes_per_token: bytes of K and V that one token adds, over all layers.
    """

    def __init__(self, config: LlamaConfig, model: Llama, kv: KVStore, layout: KVLayout, store: Store,
                 resources: ExitStack) -> None:
        self.config, self.store = config, store
        self._model, self._kv, self._resources = model, kv, resources
        self._layout = layout
        self.kv_bytes_per_token = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize
        self._blocks = BlockKV(layout.num_kv_heads, layout.head_dim, layout.dtype, layout.block_tokens)

    @classmethod
    def from_pretrained(cls, folder_or_archive: str | Path, *, dtype: str | torch.dtype | None = None,
                        device: str = "cpu", weights_ddr_bytes: int | str | None = None,
                        store: str | Path | Store | None = None, ddr_bytes: int | str | None = None,
                        hbm_bytes: int | str | None = None, kv_format: str = "native",
                        policy: str = "exact") -> Decoder:
        """Opens a Hugging Face folder, or an archive that `h3store pack` made of one.

        Args:
            folder_or_archive: config.json, safetensors weights, and usually a tokenizer.
            dtype: float32, float16 or bfloat16: what weights are rounded to and KV is kept in. None: the checkpoint's.
                Activations and sums are float32 whatever it is.
            device: "cpu".
            weights_ddr_bytes: budget of the weights; None keeps them all in memory.
            store: a path (created if absent) or an open Store; None is a temporary one, removed on close.
            ddr_bytes: budget of the KV cache; None is the store's default. Not with an open Store, which has its own.
            hbm_bytes: budget on a GPU; not with device "cpu".
            kv_format: "native".
            policy: "exact".

        Raises:
            CheckpointError, UnsupportedModelError: the folder does not hold a model that this build runs.
            UsageError, Unavailable: an argument that is wrong, or asks for what this build does not serve.
            BudgetError: a budget below one block.
        """
        _check_served(device, hbm_bytes, kv_format, policy)
        folder = model_folder(folder_or_archive)
        config = read_config(folder)
        wanted = _dtype(dtype)
        with ExitStack() as resources, Checkpoint.open(folder) as checkpoint:
            kv_dtype = wanted or config.dtype or checkpoint.dtype_of("model.embed_tokens.weight")
            name = fingerprint(config, checkpoint.files, kv_dtype, kv_format, rounded_to(checkpoint, wanted))
            opened = resources.enter_context(open_store(store, ddr_bytes))
            if weights_ddr_bytes is None:
                weights = load_weights(checkpoint, config, wanted)
            else:
                path = packed_path(opened.path, name)
                packed, weights = open_weights(path, checkpoint, config, wanted, weights_ddr_bytes)
                resources.callback(packed.close)
            model = Llama(config, checkpoint, weights)
            layout = KVLayout(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, kv_dtype)
            return cls(config, model, KVStore(opened, layout, name), layout, opened, resources.pop_all())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer.

        Raises:
            TokenizerError: it has none, or it does not load.
        """
        return Tokenizer(self.config.source)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: of config, generation config and tokenizer together."""
        try:
            own = self.tokenizer.eos_token_id
        except TokenizerError:
            own = None
        return self.config.eos_token_ids | ({own} if own is not None else frozenset())

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits after every token; no state is kept.

        Args:
            input_ids: (batch, q_len), int64, CPU. Each row is a sequence of its own.

        Returns:
            (batch, q_len, vocab_size), float32.

        Raises:
            RequestError: not such a tensor, ids outside the vocabulary, or more tokens than the model has positions.
        """
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.dtype != torch.int64:
            what = f"{input_ids.dtype} {tuple(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids)
            raise RequestError(f"input_ids: {what}; needs an int64 tensor (batch, q_len)")
        rows = [self._checked(row, 0) for row in input_ids]
        use_torch_threads()
        logits = torch.empty(*input_ids.shape, self.config.vocab_size)
        for row, out in zip(rows, logits, strict=True):
            self._write_logits(row, out)
        return logits

    def _write_logits(self, ids: list[int], out: Tensor) -> None:
        sequence = self._kv.sequence(())
        try:
            with named_failures():
                for rows in self._prefill_chunks(sequence, ids):
                    self._model.all_logits(out[sequence.length - rows : sequence.length])
        finally:
            sequence.close()

    def _prefill_chunks(self, sequence: KVSequence, ids: Sequence[int]) -> Iterator[int]:
        """Computes the tokens of ids that the sequence lacks; gives the number of rows after each chunk."""
        while sequence.length < len(ids):
            chunk = torch.tensor(ids[sequence.length : sequence.length + PREFILL_TOKENS])
            self._model.prefill(chunk, sequence, self._blocks)
            yield len(chunk)

    def generate(self, input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]], max_new_tokens: int, *,
                 temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None, stop: Sequence[str] = (),
                 ignore_eos: bool = False) -> list[list[int]]:
        """Continues each row.

        Args:
            input_ids: (batch, q_len), int64; or a list of ids; or a list of such lists, of any lengths.
            max_new_tokens: at least 1.
            temperature: 0 is greedy.
            top_p: share of probability to draw from.
            seed: row i draws from the stream of seed + i: same seed, same tokens, whatever the budgets.
            stop: texts that end a row.
            ignore_eos: go on past end-of-sequence tokens.

        Returns:
            New token ids per row; the end-of-sequence token that ended a row is its last.

        Raises:
            RequestError: ids or parameters that cannot be served; before any work.
        """
        rows = [self._checked(row, max_new_tokens) for row in _rows(input_ids)]
        results = []
        for i, row in enumerate(rows):
            params = SamplingParams(max_new_tokens, temperature, top_p, None if seed is None else seed + i,
                                    (stop,) if isinstance(stop, str) else tuple(stop), ignore_eos)
            done = self.complete(row, params)
            results.append(done.token_ids + ([] if done.end_token is None else [done.end_token]))
        return results

    def complete(self, input_ids: Sequence[int], params: SamplingParams, *,
                 on_prefill: Callable[[int, int], None] | None = None,
                 on_token: Callable[[int], None] | None = None) -> Completion:
        """Continues one prompt; its KV blocks are kept in the store for later prompts that start alike.

        Args:
            input_ids: the prompt.
            params: how to continue.
            on_prefill: called with (tokens done, tokens of the prompt); done starts at what the store restored.
            on_token: called with each new token.

        Raises:
            RequestError: ids that are no prompt for this model, or more tokens than it has positions; before any work.
            TokenizerError: stop texts, for a model without a tokenizer.
            BudgetError: the KV budget is below one block.
        """
        ids = self._checked(input_ids, params.max_new_tokens)
        if params.stop:
            self.tokenizer  # noqa: B018  a model without one must fail before the work
        use_torch_threads()
        started = time.perf_counter()
        sequence = self._kv.sequence(ids)
        try:
            with named_failures():
                rows = self._prefill(sequence, ids, on_prefill)
                logits = self._model.last_logits(rows)
                self._kv.publish(sequence, ids)  # before decoding: an interrupt then costs an answer, not the document
                prefilled = time.perf_counter()
                run = _Run(self, sequence, params, on_token)
                run.to_end(logits)
            ended = time.perf_counter()
            restored = sequence.restored
        finally:
            sequence.close()
        first = run.first_token_at or ended
        return Completion(run.token_ids, run.text(), run.finish_reason, len(ids), restored, len(ids) - restored,
                          prefilled - started, first - started, ended - first, run.end_token)

    def _prefill(self, sequence: KVSequence, ids: list[int], on_prefill: Callable[[int, int], None] | None) -> int:
        """Rows of the last chunk."""
        rows = 0
        if on_prefill:
            on_prefill(sequence.length, len(ids))
        for chunk_rows in self._prefill_chunks(sequence, ids):
            rows = chunk_rows
            if on_prefill:
                on_prefill(sequence.length, len(ids))
        return rows

    def _checked(self, ids: Sequence[int], new_tokens: int) -> list[int]:
        """The ids as a list, if they are a prompt that leaves room for new_tokens."""
        if isinstance(ids, Tensor):
            ids = ids.tolist()
        ids, vocab, limit = list(ids), self.config.vocab_size, self.config.max_position_embeddings
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise RequestError(f"token {i} of the prompt is {token!r}; needs an id from 0 to {vocab - 1}")
        if len(ids) + new_tokens > limit:
            raise RequestError(f"{len(ids)} prompt tokens and {new_tokens} new ones exceed the model's {limit} "
                               "positions; shorten the prompt or ask for fewer")
        return ids

    def close(self) -> None:
        """Closes the stores that this decoder opened. A second close does nothing."""
        self._resources.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


class _Run:
    """The tokens of one answer, as they come."""

    def __init__(self, decoder: Decoder, sequence: KVSequence, params: SamplingParams,
                 on_token: Callable[[int], None] | None) -> None:
        self._decoder, self._sequence, self._params, self._on_token = decoder, sequence, params, on_token
        self._sampler = Sampler(params)
        self._ends = frozenset() if params.ignore_eos else decoder.eos_token_ids
        # a stop text of n characters spans at most 4 n byte-level tokens; a few more complete a split character
        self._tail = 4 * max((len(text) for text in params.stop), default=0) + 8
        self._stopped = False
        self.token_ids: list[int] = []
        self.finish_reason = "length"
        self.end_token: int | None = None
        self.first_token_at: float | None = None

    def to_end(self, logits: Tensor) -> None:
        """Draws tokens until something ends the answer."""
        model, blocks = self._decoder._model, self._decoder._blocks
        while self._take(self._sampler(logits)) and len(self.token_ids) < self._params.max_new_tokens:
            logits = model.decode(self.token_ids[-1], self._sequence, blocks)

    def _take(self, token: int) -> bool:
        """Keeps a token; False when it ends the answer."""
        self.first_token_at = self.first_token_at or time.perf_counter()
        if token in self._ends:
            self.end_token, self.finish_reason = token, "stop"
            return False
        self.token_ids.append(token)
        if self._on_token:
            self._on_token(token)
        if self._params.stop and self._stop_at(self._decoder.tokenizer.decode(self.token_ids[-self._tail :])) >= 0:
            self._stopped, self.finish_reason = True, "stop"
            return False
        return True

    def _stop_at(self, text: str) -> int:
        """Where the first stop text begins, or -1."""
        return min((at for at in (text.find(stop) for stop in self._params.stop) if at >= 0), default=-1)

    def text(self) -> str:
        """The answer's text."""
        try:
            text = self._decoder.tokenizer.decode(self.token_ids)
        except TokenizerError:
            return ""
        return text[: self._stop_at(text)] if self._stopped else text


def _rows(input_ids: Any) -> list[Any]:
    if isinstance(input_ids, Tensor):
        if input_ids.ndim not in (1, 2) or input_ids.dtype != torch.int64:
            raise RequestError(f"input_ids: {input_ids.dtype} {tuple(input_ids.shape)}; needs int64 (batch, q_len)")
        return [input_ids.tolist()] if input_ids.ndim == 1 else input_ids.tolist()
    if not isinstance(input_ids, Sequence) or isinstance(input_ids, str | bytes):
        raise RequestError(f"input_ids is a {type(input_ids).__name__}; needs a tensor, a list of ids, or such lists")
    nested = bool(input_ids) and isinstance(input_ids[0], Sequence | Tensor)
    return list(input_ids) if nested else [input_ids]


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = _DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    return found


def _check_served(device: str, hbm_bytes: int | str | None, kv_format: str, policy: str) -> None:
    if str(device) != "cpu":
        raise Unavailable(f"device {device!r}: this build decodes on \"cpu\"")
    if hbm_bytes is not None:
        raise UsageError("hbm_bytes needs a GPU device; leave it out on \"cpu\"")
    if kv_format != "native":
        raise Unavailable(f"kv_format {kv_format!r}: this build serves \"native\"")
    if policy != "exact":
        raise Unavailable(f"policy {policy!r}: this build serves \"exact\"")
