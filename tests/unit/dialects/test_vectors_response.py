"""Answers of many vectors: the same JSON as in one piece, and other clients have their turn while it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from litestar.types import Receive, Scope, Send

from machd.dialects.embeddings.answer import Embedding, EmbeddingList
from machd.dialects.encoding import around_items, vectors_response
from machd.dialects.wire.encoder_usage import EncoderUsage

_DIMENSIONS = 384
_MAX_PART_NUMBERS = 4096
_NAME = 'a "data":[] model \\"data":[]'
_USAGE = EncoderUsage.of(5)


def _embeddings(count: int) -> list[Embedding]:
    return [
        Embedding(index=index, embedding=[index / 7 + place for place in range(_DIMENSIONS)])
        for index in range(count)
    ]


def _list(data: list[Embedding]) -> EmbeddingList:
    return EmbeddingList(data=data, model=_NAME, usage=_USAGE)


async def _sent(embeddings: Sequence[Embedding]) -> list[dict[str, Any]]:
    before, after = around_items(_list([]), "data")
    answer = await vectors_response(before, iter(embeddings), after, dimensions=_DIMENSIONS)
    messages = list[dict[str, Any]]()

    async def send(message: Any) -> None:
        messages.append(message)

    await answer(cast(Scope, {}), cast(Receive, None), cast(Send, send))
    return messages


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 20, 21, 300])
async def test_parts_are_the_json_of_the_whole(count: int) -> None:
    """At every number of items around those of a part, whatever the model is called."""
    embeddings = _embeddings(count)
    start, *bodies = await _sent(embeddings)
    body = b"".join(one["body"] for one in bodies)
    assert body == msgspec.json.encode(_list(embeddings))
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()
    assert [one["more_body"] for one in bodies] == [True] * (len(bodies) - 1) + [False]


async def test_others_have_their_turn_between_parts() -> None:
    """No part has more numbers than take a moment to write, and the event loop goes round between two of them."""
    turns = 0
    is_done = False

    async def take_turns() -> None:
        nonlocal turns
        while not is_done:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(take_turns())
    _, *bodies = await _sent(_embeddings(600))
    is_done = True
    await other
    assert max(one["body"].count(b".") for one in bodies) <= _MAX_PART_NUMBERS
    assert len(bodies) >= 600 * _DIMENSIONS // _MAX_PART_NUMBERS
    assert turns >= 2 * (len(bodies) - 3)
