"""Every body of the hostile corpus is refused, and nothing but machd's own error comes out."""

from __future__ import annotations

import pytest
from support.clients.hostile_bodies import HOSTILE_CHAT_BODIES

from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError

_BY_NAME = [
    pytest.param(body, statuses, id=name.replace(" ", "-"))
    for name, body, statuses in HOSTILE_CHAT_BODIES
]


def test_corpus_is_large_and_its_names_are_unique() -> None:
    """A failing case can be told by its name, and every right answer is a refusal."""
    names = [name for name, _, _ in HOSTILE_CHAT_BODIES]
    assert len(names) >= 80
    assert len(set(names)) == len(names)
    assert all(400 <= one < 500 for _, _, statuses in HOSTILE_CHAT_BODIES for one in statuses)


@pytest.mark.parametrize(("body", "statuses"), _BY_NAME)
def test_hostile_body_is_refused(body: bytes, statuses: frozenset[int]) -> None:
    """What is wrong in itself is a 400; what only a server can judge passes or is a 400."""
    refusal: InvalidRequestError | None = None
    try:
        decode_body(body, ChatCompletionRequest).checked().conversation()
    except InvalidRequestError as error:
        refusal = error
    if refusal is None:
        assert statuses & {404, 413}, "nothing but decoding would have refused it"
    else:
        assert refusal.http_status in statuses
        assert len(refusal.message) < 300
