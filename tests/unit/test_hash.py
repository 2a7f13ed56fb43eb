"""XXH64 against an independent implementation."""

from __future__ import annotations

import random

import pytest
import xxhash

from h3store._ffi import ffi, lib


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_equals_the_reference_at_every_length_class(seed: int) -> None:
    data = random.Random(7).randbytes(1 << 17)
    lengths = [*range(200), 4095, 4096, 65536, 65537, 1 << 17]
    for length in lengths:
        part = data[:length]
        assert lib.h3_xxh64(ffi.from_buffer(part), length, seed) == xxhash.xxh64_intdigest(part, seed), length


def test_reads_unaligned_memory() -> None:
    data = random.Random(8).randbytes(5000)
    for skew in range(1, 33):
        part = data[skew:]
        pointer = ffi.from_buffer(data) + skew
        assert lib.h3_xxh64(pointer, len(part), 0) == xxhash.xxh64_intdigest(part)
