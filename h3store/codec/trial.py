"""Choice of a spec by trial. Owns the candidates and the rule between them; refuses to read tensors: callers hand in a
few chunks spread over the tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from h3store.codec.chunk import Buffer, encode_chunk
from h3store.codec.spec import Delta, Filter, Spec, default_spec

__all__ = ["choose_spec"]

# A candidate must beat a faster one by this part of the sample's bytes: less is not worth the decoding time.
_WORTH = 1 / 200


def _candidates(dtype: str, row_bytes: int, chunk_bytes: int, with_base: bool) -> Iterator[Spec]:
    """Specs to try, fastest to decode first; raw leads."""
    plain = default_spec(dtype, row_bytes)
    yield replace(plain, filter=Filter.RAW)
    deltas = [Delta.NONE]
    if 0 < plain.row_bytes < chunk_bytes:
        deltas.append(Delta.ROW)
    if with_base:
        deltas.append(Delta.BASE)
    for delta in deltas:
        # Differences of bit patterns are no floats: exponent nibbles mean nothing there.
        if plain.filter == Filter.EXPNIBBLE and delta == Delta.NONE:
            yield replace(plain, delta=delta)
        yield replace(plain, filter=Filter.ZSTD, delta=delta)
        if plain.elem_bytes > 1:
            yield replace(plain, filter=Filter.BYTEPLANE, delta=delta)


def choose_spec(sample_chunks: Sequence[Buffer], dtype: str, row_bytes: int,
                base_chunks: Sequence[Buffer] | None = None) -> Spec:
    """Returns the spec that stores a sample in the fewest bytes; of near equals (0.5 % of the sample) the faster.

    Args:
        sample_chunks: a few chunks spread over the tensor, 1 to MAX_CHUNK_BYTES bytes each; encoded once per candidate,
            so their sum bounds the time (about 20 ms per MiB). Empty: the type's default spec.
        dtype: a torch dtype's name.
        row_bytes: bytes of one row of the tensor, for delta along rows; 0: no rows.
        base_chunks: the base tensor's bytes at the same places, for delta to a base.
    """
    chunks = list(sample_chunks)
    if not chunks:
        return default_spec(dtype, row_bytes)
    bases: Sequence[Buffer | None] = base_chunks if base_chunks is not None else [None] * len(chunks)
    sizes = [chunk.nbytes if isinstance(chunk, np.ndarray) else len(chunk) for chunk in chunks]
    margin = sum(sizes) * _WORTH
    best: tuple[int, Spec] | None = None
    for spec in _candidates(dtype, row_bytes, max(sizes), base_chunks is not None):
        stored = sum(len(encode_chunk(c, spec, b)[1]) for c, b in zip(chunks, bases, strict=True))
        if best is None or stored < best[0] - margin:
            best = stored, spec
    assert best is not None
    # An all-zero sample says nothing about what will be written later.
    if best[1].filter == Filter.RAW and best[0] == 0:
        return default_spec(dtype, row_bytes)
    return best[1]
