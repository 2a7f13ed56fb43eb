"""XXH64 and XXH3 against an independent implementation."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import xxhash

from h3store._ffi import ffi, lib

# Every length class and every number of stripes of XXH3's first three blocks, with both ends of each.
LENGTHS = [*range(700), *(64 * n + d for n in range(11, 50) for d in (-1, 0, 1)), 4095, 4096, 65536, 65537, 1 << 17]
SEEDS = [0, 1, 2**64 - 1]
Hash = tuple[Callable[[object, int], int], Callable[[bytes], int]]
HASHES: dict[str, Hash] = {
    "xxh3": (lib.h3_xxh3, xxhash.xxh3_64_intdigest),
    **{f"xxh64-{seed}": (lambda data, size, seed=seed: lib.h3_xxh64(data, size, seed),
                         lambda data, seed=seed: xxhash.xxh64_intdigest(data, seed)) for seed in SEEDS}}


@pytest.mark.parametrize("name", HASHES)
def test_equals_the_reference_at_every_length_class(name: str) -> None:
    ours, reference = HASHES[name]
    data = random.Random(7).randbytes(1 << 17)
    for length in LENGTHS:
        part = data[:length]
        assert ours(ffi.from_buffer(part), length) == reference(part), length


@pytest.mark.parametrize("name", HASHES)
def test_reads_unaligned_memory(name: str) -> None:
    ours, reference = HASHES[name]
    data = random.Random(8).randbytes(5000)
    for skew in range(1, 65):
        part = data[skew:]
        assert ours(ffi.from_buffer(data) + skew, len(part)) == reference(part)


@pytest.mark.parametrize("byte", [0, 255])
def test_extreme_bytes_and_one_bit_of_difference(byte: int) -> None:
    for length in (1, 3, 8, 16, 128, 240, 241, 1024, 65536):
        data = bytearray([byte] * length)
        values = {lib.h3_xxh3(ffi.from_buffer(data), length)}
        assert values == {xxhash.xxh3_64_intdigest(data)}
        for at in {0, length // 2, length - 1}:
            data[at] ^= 4
            values.add(lib.h3_xxh3(ffi.from_buffer(data), length))
            data[at] ^= 4
        assert len(values) == len({0, length // 2, length - 1}) + 1
