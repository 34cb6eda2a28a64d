"""Vectors of earlier texts: the bound in bytes holds for the memory that they really take, and the last used stay."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from machd.engine.protocol.encoder import EncoderInput
from machd.served.vector_cache import VectorCache, vector_keys

_LIMIT_BYTES = 1_000_000
_ROW = memoryview(bytes(1536))


def _cache(limit_bytes: int = _LIMIT_BYTES) -> VectorCache:
    cache = VectorCache()
    cache.hold(load="weights", limit_bytes=limit_bytes)
    return cache


def _key(number: int) -> bytes:
    return vector_keys([EncoderInput((number,))], "")[0]


@pytest.mark.parametrize("row_bytes", [4, 64, 1536, 16384])
def test_memory_stays_within_the_bound(row_bytes: int) -> None:
    """What Python allocates for keys, numbers and order is no more than the limit, and most of it is used."""
    row = memoryview(bytes(row_bytes))
    tracemalloc.start()
    cache = _cache()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(8 * _LIMIT_BYTES // (row_bytes + 256)):
        cache.keep(_key(number), row)
        assert cache.reading.bytes <= _LIMIT_BYTES
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.5 * _LIMIT_BYTES < taken <= _LIMIT_BYTES


def test_the_least_recently_used_leave_first() -> None:
    """A look-up counts as use."""
    cache = _cache(10 * (len(_ROW) + 320))
    for number in range(10):
        cache.keep(_key(number), _ROW)
    assert cache.find(_key(0)) is not None
    cache.keep(_key(10), _ROW)
    assert cache.find(_key(0)) is not None
    assert cache.find(_key(1)) is None


def test_a_smaller_bound_evicts_at_once() -> None:
    """As another value of the setting in a running daemon has it."""
    cache = _cache()
    for number in range(100):
        cache.keep(_key(number), _ROW)
    cache.hold(load="weights", limit_bytes=20_000)
    assert cache.reading.bytes <= 20_000
    assert cache.reading.entries == 10
    cache.hold(load="weights", limit_bytes=0)
    assert (cache.reading.bytes, cache.reading.entries) == (0, 0)


def test_a_row_that_is_larger_than_the_bound_evicts_no_others() -> None:
    """It is not kept."""
    cache = _cache(5000)
    cache.keep(_key(0), _ROW)
    cache.keep(_key(1), memoryview(bytes(6000)))
    assert cache.find(_key(0)) == bytes(_ROW)
    assert cache.find(_key(1)) is None


def test_kept_numbers_are_a_copy() -> None:
    """They do not hold the memory of the pass that they came from."""
    content = bytearray(8)
    cache = _cache()
    cache.keep(_key(0), memoryview(content))
    content[0] = 1
    assert cache.find(_key(0)) == bytes(8)


def test_keys_differ_wherever_inputs_do() -> None:
    """Tokens, their order and number, the beginning of a pair's second text, and the namespace."""
    random = Random(7)
    inputs = {
        EncoderInput(
            tuple(random.randrange(4) for _ in range(length)), random.choice((None, *range(length)))
        )
        for length in (1, 2, 3, 4, 5)
        for _ in range(400)
    }
    keys = [key for namespace in ("", "a", "b") for key in vector_keys([*inputs], namespace)]
    assert len(set(keys)) == 3 * len(inputs)
    assert vector_keys([*inputs], "a") == vector_keys([*inputs], "a")
