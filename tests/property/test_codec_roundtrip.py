"""Any bytes, any spec: what is decoded equals what was encoded, and a damaged chunk never decodes to something else."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from h3store import errors
from h3store.codec import Delta, Filter, Spec, decode_chunk, encode_chunk

EXP_BITS = {1: (0, 4), 2: (0, 5, 8), 4: (0, 8), 8: (0, 11)}


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    elem = draw(st.sampled_from([1, 2, 4, 8]))
    filter_ = draw(st.sampled_from(sorted(set(Filter) - {Filter.PATCH})))
    return Spec(elem, elem * draw(st.integers(1, 300)), filter_, draw(st.sampled_from(Delta)),
                draw(st.sampled_from(EXP_BITS[elem])), draw(st.integers(0, 3)))


@st.composite
def contents(draw: st.DrawFn) -> np.ndarray:
    """Short arbitrary bytes, or long ones made of a few drawn values with drawn damage: floats, runs, noise."""
    if draw(st.booleans()):
        return np.frombuffer(draw(st.binary(min_size=1, max_size=400)), np.uint8)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(1, 20_000))
    alphabet = rng.integers(0, 256, draw(st.integers(1, 256)), np.uint8)
    data = alphabet[rng.integers(0, len(alphabet), size)]
    if draw(st.booleans()):
        floats = rng.normal(0, 10.0 ** draw(st.integers(-30, 30)), size).astype(np.float32)
        data = floats.view(np.uint8)[2 * draw(st.integers(0, 1))::draw(st.integers(1, 3))][:size].copy()
    if draw(st.booleans()):
        data[rng.integers(0, size, size // 10 + 1) % len(data)] = 0
    return np.ascontiguousarray(data)


@settings(max_examples=400, deadline=None)
@given(contents(), specs(), st.booleans())
def test_round_trip(raw: np.ndarray, spec: Spec, with_base: bool) -> None:
    base = np.roll(raw, 3) if with_base else None
    entry, stored = encode_chunk(raw, spec, base)
    assert len(stored) <= len(raw)
    assert int(entry["stored_bytes"]) == len(stored)
    np.testing.assert_array_equal(decode_chunk(entry, stored, spec, len(raw), base), raw)


@settings(max_examples=400, deadline=None)
@given(contents(), specs(), st.data())
def test_damage_is_detected_or_harmless(raw: np.ndarray, spec: Spec, data: st.DataObject) -> None:
    entry, stored = encode_chunk(raw, spec)
    if not stored:
        return
    damaged = bytearray(stored)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    entry = entry.copy()
    if data.draw(st.booleans()):
        entry["filter"] = data.draw(st.integers(0, 6))
        entry["delta"] = data.draw(st.integers(0, 3))
    try:
        out = decode_chunk(entry, bytes(damaged), spec, len(raw))
    except errors.CorruptBlockError:
        return
    np.testing.assert_array_equal(out, raw)
