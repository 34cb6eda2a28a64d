"""Keys of images in a prompt."""

from __future__ import annotations

from machd.engine.protocol.media import FIRST_MEDIA_KEY, Media, MediaSpan, token_ids_of
from machd.request.media import MediaKind


def _media(digest: bytes, tokens: int = 4) -> Media:
    return Media(MediaKind.IMAGE, digest, tuple(range(50, 50 + tokens)), {})


def test_keys_are_above_every_token_id() -> None:
    """No key can be taken for a token."""
    assert min(_media(b"a", 500).keys) >= FIRST_MEDIA_KEY


def test_keys_follow_from_the_content() -> None:
    """The same content has the same keys; another differs in the first key already."""
    assert _media(b"a").keys == _media(b"a").keys
    assert _media(b"a").keys[0] != _media(b"b").keys[0]
    assert len(set(_media(b"a", 500).keys)) == 500


def test_token_ids_stand_where_keys_were() -> None:
    """Any stretch of a prompt gives the model's own tokens, also one that begins inside an image."""
    first, second = _media(b"a"), _media(b"b", 2)
    keys = (1, 2, *first.keys, 3, *second.keys, 4)
    spans = (MediaSpan(2, first), MediaSpan(7, second))
    whole = [1, 2, 50, 51, 52, 53, 3, 50, 51, 4]
    assert token_ids_of(keys, spans) == whole
    for start in range(len(keys)):
        for stop in range(start + 1, len(keys) + 1):
            assert token_ids_of(keys[start:stop], spans, start) == whole[start:stop]
