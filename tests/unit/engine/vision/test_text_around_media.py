"""The text that a processor writes around an image's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from machd.engine.vision.processor_child import without_text

_SPECIAL = {900: "<image>", 901: "</image>"}


class _Letters:
    """A tokenizer of letters and two special tokens; ``x`` is never tokenised."""

    added_tokens_decoder = _SPECIAL
    all_special_ids = tuple(_SPECIAL)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, token_ids))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(one) for one in text if one != "x"]


@pytest.mark.parametrize(
    ("token_ids", "split"),
    [
        ([10, 900, 32, 901, 10, 10], ("\n", [900, 32, 901], "\n\n")),
        ([900, 901], ("", [900, 901], "")),
        ([65, -1, -1], ("A", [-1, -1], "")),
        ([65, 66], ("", [65, 66], "")),
        ([ord("x"), 900], ("", [ord("x"), 900], "")),
    ],
    ids=["around", "none", "negative ids", "no special token", "text that gives other tokens"],
)
def test_text_is_split_off_at_special_tokens(
    token_ids: list[int], split: tuple[str, list[int], str]
) -> None:
    """Text is what lies outside the first and the last special token, if tokenising it gives the same tokens."""
    assert without_text(_Letters(), token_ids) == split
