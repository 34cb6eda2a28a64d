"""Texts that several requests have at once are computed for the first of them, and those of earlier requests are kept."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest
from support.engines.serving_encoder import LIMITS, ServingEncoder

from machd.engine.protocol.encoder import EncoderInput
from machd.errors import EngineFaultError
from machd.generations.encodings import Encoded
from machd.served import vector_cache

_KEPT = 100_000


def _firsts(encoded: Encoded) -> list[float]:
    """Return the number of each input: its first token."""
    numbers = array("f", bytes(encoded.values.content))
    return [numbers[place] for place in encoded.places]


async def _answered(serving: ServingEncoder, task: asyncio.Task[Encoded]) -> list[float]:
    await serving.asked()
    serving.served.answer()
    return _firsts(await task)


async def test_a_text_that_is_being_computed_is_not_asked_for_again() -> None:
    """A second request asks for the others alone, and both have all their rows and count all their tokens."""
    serving = ServingEncoder()
    first = serving.encode([5, 1], [6], name="first")
    await serving.asked()
    second = serving.encode([7], [6], [5, 1], name="second")
    await serving.asked()
    third = serving.encode([6], name="third")
    await asyncio.sleep(0.05)
    serving.served.answer(1)
    serving.served.answer(0)
    assert _firsts(await first) == [5.0, 6.0]
    assert _firsts(await second) == [7.0, 6.0, 5.0]
    assert _firsts(await third) == [6.0]
    assert serving.served.asked[1:] == [(EncoderInput((7,)),)]
    assert sorted(one.prompt_tokens for one in serving.records) == [1, 3, 4]


@pytest.mark.parametrize("ends", ["leaves", "fails"])
async def test_a_text_is_asked_for_again_when_the_request_that_asked_ends_without_it(
    ends: str,
) -> None:
    """Another client's leaving or failure is not the request's own."""
    serving = ServingEncoder()
    first = serving.encode([5], name="first")
    await serving.asked()
    second = serving.encode([5], name="second")
    await asyncio.sleep(0.05)
    if ends == "leaves":
        first.cancel()
    else:
        serving.served.fail(EngineFaultError("the engine failed"))
    await serving.asked()
    serving.served.answer()
    assert _firsts(await second) == [5.0]
    with pytest.raises((asyncio.CancelledError, EngineFaultError)):
        await first
    assert len(serving.served.asked) == 2
    assert len(serving.open) == 0


async def test_a_request_that_waits_for_another_ones_text_leaves_it_alone() -> None:
    """Its client's leaving does not drop what the first one waits for."""
    serving = ServingEncoder()
    first = serving.encode([5], name="first")
    await serving.asked()
    second = serving.encode([5], name="second")
    await asyncio.sleep(0.05)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    serving.served.answer()
    assert _firsts(await first) == [5.0]
    assert serving.served.dropped == 0


async def test_kept_texts_are_not_asked_for_again() -> None:
    """The rows are the same bytes, tokens count as before, and hits and misses are counted."""
    serving = ServingEncoder(vectors_bytes=_KEPT)
    assert await _answered(serving, serving.encode([5, 1], [6])) == [5.0, 6.0]
    assert await _answered(serving, serving.encode([6], [7], [5, 1])) == [6.0, 7.0, 5.0]
    assert _firsts(await serving.encode([7], [6], [7])) == [7.0, 6.0, 7.0]
    assert serving.served.asked[1:] == [(EncoderInput((7,)),)]
    assert [one.prompt_tokens for one in serving.records] == [3, 4, 3]
    reading = serving.served.vectors.reading
    assert (reading.hits, reading.misses, reading.entries) == (4, 3, 3)


async def test_a_kept_text_is_answered_while_the_queue_is_full() -> None:
    """It takes no room among those that are computed."""
    serving = ServingEncoder(vectors_bytes=_KEPT)
    await _answered(serving, serving.encode([5] * 50))
    full = serving.encode([6] * 80, name="full")
    await serving.asked()
    assert _firsts(await serving.encode([5] * 50, name="kept")) == [5.0]
    full.cancel()


async def test_nothing_is_kept_unless_the_setting_says_so() -> None:
    """0 bytes is the default."""
    serving = ServingEncoder()
    for _ in range(2):
        await _answered(serving, serving.encode([5]))
    assert len(serving.served.asked) == 2
    assert serving.served.vectors.reading.bytes == 0


async def test_another_load_of_the_model_finds_nothing() -> None:
    """It may have read other weights."""
    serving = ServingEncoder(vectors_bytes=_KEPT)
    await _answered(serving, serving.encode([5]))
    serving.served.load = object()
    await _answered(serving, serving.encode([5]))
    assert len(serving.served.asked) == 2


async def test_clients_find_each_others_texts_only_where_the_setting_says_so() -> None:
    """The time of an answer would tell one client what another has asked."""
    serving = ServingEncoder(vectors_bytes=_KEPT)
    await _answered(serving, serving.encode([5], client="one"))
    await _answered(serving, serving.encode([5], client="other"))
    shared = ServingEncoder(replace(LIMITS, shares_prefixes=True), vectors_bytes=_KEPT)
    await _answered(shared, shared.encode([5], client="one"))
    assert _firsts(await shared.encode([5], client="other")) == [5.0]


async def _second_of_pairs(serving: ServingEncoder) -> list[tuple[EncoderInput, ...]]:
    """Return what is asked when a pair comes whose tokens are those of a text, and one that is divided elsewhere."""
    for second_from in (None, 1, 2):
        task = serving.encode([5, 6, 7], second_from=second_from)
        await asyncio.sleep(0.05)
        if len(serving.served.asked) > (second_from or 0):
            serving.served.answer()
        await task
    return serving.served.asked


async def test_pairs_of_the_same_tokens_are_told_apart() -> None:
    """Where the second text begins is part of an input."""
    asked = await _second_of_pairs(ServingEncoder(vectors_bytes=_KEPT))
    assert [one.second_from for (one,) in asked] == [None, 1, 2]


async def test_the_test_of_pairs_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key without the beginning of the second text gives one pair the scores of another."""
    keys = vector_cache.vector_keys
    monkeypatch.setattr(
        "machd.generations.encodings.vector_keys",
        lambda inputs, namespace: keys([EncoderInput(one.token_ids) for one in inputs], namespace),
    )
    assert len(await _second_of_pairs(ServingEncoder(vectors_bytes=_KEPT))) == 1


async def _asked_of_two_models(*, is_shared: bool) -> int:
    """Return how many questions two models were asked for the same text."""
    first, second = ServingEncoder(vectors_bytes=_KEPT), ServingEncoder(vectors_bytes=_KEPT)
    if is_shared:
        second.served.vectors, second.served.load = first.served.vectors, first.served.load
    for serving in (first, second):
        task = serving.encode([5])
        await asyncio.sleep(0.05)
        if serving.served.asked:
            serving.served.answer()
        await task
    return len(first.served.asked) + len(second.served.asked)


async def test_models_do_not_find_each_others_texts() -> None:
    """Each has a cache of its own."""
    assert await _asked_of_two_models(is_shared=False) == 2


async def test_the_test_of_models_can_fail() -> None:
    """One cache for both, without the model in the key, answers for the wrong one."""
    assert await _asked_of_two_models(is_shared=True) == 1
