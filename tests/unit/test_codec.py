"""Specs, element types, single chunks, and the choice of a spec by trial."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h3store import errors
from h3store._ffi import check, ffi, lib
from h3store.codec import (
    CHUNK_DTYPE,
    DTYPES,
    MAX_CHUNK_BYTES,
    Delta,
    Filter,
    Spec,
    choose_spec,
    decode_chunk,
    default_spec,
    dtype_info,
    encode_chunk,
)

CHUNK = 65536
FLOATS = ["bfloat16", "float16", "float32", "float64"]


def weights(dtype: str, count: int, seed: int = 0) -> np.ndarray:
    """Bytes of normal(0, 0.02) weights."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02
    return values.to(getattr(torch, dtype)).view(torch.uint8).numpy()


def test_every_torch_dtype_with_its_bytes_in_it_has_an_entry() -> None:
    quantised = {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}
    names = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert names - quantised == set(DTYPES)
    for name, info in DTYPES.items():
        dtype = getattr(torch, name)
        assert info.item_bytes == dtype.itemsize, name
        assert info.elem_bytes == dtype.itemsize // (2 if dtype.is_complex else 1), name


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponent_bits_are_those_of_the_type(dtype: str) -> None:
    bits = {"bfloat16": 8, "float16": 5, "float32": 8, "float64": 11}
    assert dtype_info(dtype).exp_bits == bits[dtype]
    assert dtype_info("torch." + dtype) == dtype_info(dtype)


def test_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(errors.UsageError, match="qint8"):
        dtype_info("qint8")


def test_a_table_entry_is_what_the_format_page_says() -> None:
    layout = [("offset", "<u8"), ("check", "<u8"), ("stored_bytes", "<u4"), ("filter", "u1"), ("delta", "u1"),
              ("check_kind", "u1"), ("reserved", "u1")]
    assert np.dtype(layout) == CHUNK_DTYPE and CHUNK_DTYPE.itemsize == 24


def test_spec_survives_its_list_form_and_refuses_nonsense() -> None:
    spec = Spec(4, 256, Filter.BYTEPLANE, Delta.ROW, 8, 2)
    assert Spec.from_list(spec.to_list()) == spec
    native = spec.to_native()
    assert [native.elem_bytes, native.row_bytes, native.filter, native.delta, native.exp_bits, native.level] == \
        spec.to_list()
    for numbers in ([3, 0, 0, 0, 0, 1], [2, 3, 0, 0, 0, 1], [2, 0, 5, 0, 0, 1], [2, 0, 0, 3, 0, 1], [2, 0, 0, 1, 0, 1],
                    [2, 0, 0, 0, 16, 1], [2, 0, 0, 0, 0, 4], [2, 2**32, 0, 0, 0, 1], [2, 0, 0, 0, 0],
                    [-1, 0, 0, 0, 0, 1]):
        with pytest.raises(ValueError):
            Spec.from_list(numbers)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_default_spec_round_trips_every_dtype(dtype: str) -> None:
    raw = np.random.default_rng(3).integers(0, 256, CHUNK, np.uint8)
    spec = default_spec(dtype, 512)
    entry, stored = encode_chunk(raw, spec)
    np.testing.assert_array_equal(decode_chunk(entry, stored, spec, CHUNK), raw)


@pytest.mark.parametrize(("dtype", "filter_", "least"), [
    ("bfloat16", Filter.EXPNIBBLE, 1.49), ("bfloat16", Filter.BYTEPLANE, 1.44), ("bfloat16", Filter.ZSTD, 1.25),
    ("float32", Filter.EXPNIBBLE, 1.19), ("float32", Filter.BYTEPLANE, 1.17), ("float16", Filter.EXPNIBBLE, 1.15),
    ("float64", Filter.BYTEPLANE, 1.05)])
def test_ratio_on_normal_weights(dtype: str, filter_: Filter, least: float) -> None:
    raw = weights(dtype, 4 * CHUNK)
    spec = Spec(dtype_info(dtype).elem_bytes, 0, filter_, Delta.NONE, dtype_info(dtype).exp_bits)
    stored = sum(len(encode_chunk(raw[at:at + CHUNK], spec)[1]) for at in range(0, len(raw), CHUNK))
    assert len(raw) / stored >= least


def test_zero_and_noise_fall_to_zero_and_raw() -> None:
    noise = np.random.default_rng(1).integers(0, 256, CHUNK, np.uint8)
    for filter_ in set(Filter) - {Filter.PATCH}:
        spec = Spec(2, 64, filter_, Delta.ROW, 0)
        entry, stored = encode_chunk(np.zeros(CHUNK, np.uint8), spec)
        assert (entry["filter"], entry["delta"], stored) == (Filter.ZERO, Delta.NONE, b"")
        entry, stored = encode_chunk(noise, spec)
        assert (entry["filter"], entry["delta"], stored) == (Filter.RAW, Delta.NONE, noise.tobytes())


def test_float16_nibbles_become_byte_planes() -> None:
    entry, _ = encode_chunk(weights("float16", CHUNK // 2), Spec(2, 0, Filter.EXPNIBBLE, Delta.NONE, 5))
    assert entry["filter"] == Filter.BYTEPLANE


def test_half_pruned_and_special_values_keep_the_gain() -> None:
    """Zeros, infinities and NaNs are far from the other exponents: they must be escapes, not the reference."""
    values = (torch.randn(CHUNK // 2, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    values[::2] = 0
    values[1::1001] = float("inf")
    values[2::1001] = float("nan")
    raw, spec = values.view(torch.uint8).numpy(), default_spec("bfloat16")
    entry, stored = encode_chunk(raw, spec)
    assert entry["filter"] == Filter.EXPNIBBLE and len(raw) / len(stored) > 1.4
    np.testing.assert_array_equal(decode_chunk(entry, stored, spec, len(raw)), raw)


@pytest.mark.parametrize("delta", [Delta.ROW, Delta.BASE])
def test_delta_wins_where_neighbours_are_near(delta: Delta) -> None:
    rng = np.random.default_rng(5)
    base = rng.integers(0, 2**32, CHUNK // 4, np.uint32)
    near = base + rng.integers(0, 9, CHUNK // 4).astype(np.uint32) - 4
    if delta == Delta.ROW:
        near = np.cumsum(rng.integers(0, 5, (256, 64)), axis=0).astype(np.uint32) * 100_003
    plain, with_delta = (Spec(4, 256, Filter.BYTEPLANE, d) for d in (Delta.NONE, delta))
    entry, stored = encode_chunk(near, with_delta, base)
    assert entry["delta"] == delta
    assert len(stored) < 0.5 * len(encode_chunk(near, plain)[1])
    np.testing.assert_array_equal(decode_chunk(entry, stored, with_delta, CHUNK, base).view(np.uint32), near.ravel())


def test_delta_to_a_base_without_a_base() -> None:
    raw, spec = weights("bfloat16", CHUNK // 2), Spec(2, 0, Filter.BYTEPLANE, Delta.BASE, 8)
    entry, stored = encode_chunk(raw, spec)
    assert entry["delta"] == Delta.NONE
    entry, stored = encode_chunk(raw, spec, raw)
    with pytest.raises(errors.CorruptBlockError):
        decode_chunk(entry, stored, spec, CHUNK)
    with pytest.raises(errors.CorruptBlockError):
        decode_chunk(entry, stored, spec, CHUNK, weights("bfloat16", CHUNK // 2, seed=9))


def test_choice_by_trial() -> None:
    rng = np.random.default_rng(2)
    bf16 = weights("bfloat16", CHUNK)
    samples = [bf16[:CHUNK], bf16[CHUNK:]]
    assert choose_spec(samples, "bfloat16", 1024) == Spec(2, 1024, Filter.EXPNIBBLE, Delta.NONE, 8)
    touched = bf16.copy()
    touched[::500] += 1
    assert choose_spec([touched[:CHUNK], touched[CHUNK:]], "bfloat16", 0, samples).delta == Delta.BASE
    assert choose_spec([np.arange(CHUNK // 8)], "int64", 8).delta == Delta.ROW
    noise = rng.integers(0, 256, CHUNK, np.uint8)
    assert choose_spec([noise], "uint8", 256).filter == Filter.RAW
    assert choose_spec([noise], "bfloat16", 256).filter == Filter.RAW
    assert choose_spec([b"abcdefgh" * 4096], "uint8", 0).filter == Filter.ZSTD
    assert choose_spec([np.zeros(CHUNK, np.uint8)], "bfloat16", 0) == default_spec("bfloat16")
    assert choose_spec([], "float32", 0) == default_spec("float32")


def test_sizes_out_of_range_are_refused() -> None:
    spec = default_spec("uint8")
    with pytest.raises(errors.NativeError, match="0 bytes"):
        encode_chunk(b"", spec)
    with pytest.raises(errors.NativeError):
        encode_chunk(np.zeros(MAX_CHUNK_BYTES + 1, np.uint8), spec)
    entry, stored = encode_chunk(b"x" * 5000, spec)
    with pytest.raises(errors.CorruptArchiveError):
        decode_chunk(entry, stored[:-1], spec, 5000)


def test_allocation_failure_of_a_codec_is_one_error() -> None:
    out = ffi.new("h3_codec **")
    lib.h3_fault_arm(lib.H3_FAULT_ALLOC, 1, 1, 12)
    try:
        with pytest.raises(errors.NativeError, match="memory"):
            check(lib.h3_codec_create(out), "codec")
        assert lib.h3_fault_fired(lib.H3_FAULT_ALLOC) == 1
    finally:
        lib.h3_fault_arm(lib.H3_FAULT_ALLOC, 0, 0, 0)


def test_every_status_maps_into_the_error_tree() -> None:
    codes = {name: getattr(lib, name) for name in dir(lib) if name.startswith("H3_E_")}
    assert len(codes) >= 11
    for name, code in codes.items():
        with pytest.raises(errors.H3Error, match=r"^thing: ") as caught:
            check(code, "thing")
        assert "unknown" not in str(caught.value), name
    check(0, "thing")
    with pytest.raises(errors.NativeError, match="unknown status"):
        check(-5, "thing")
