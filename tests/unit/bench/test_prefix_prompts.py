"""Prompts for prefix caches: how long they are, and where they part."""

from __future__ import annotations

import pytest

from machd.bench.prefix.prompts import WORDS, Piece, Pieces, PromptSource


@pytest.mark.parametrize("vocabulary", [WORDS, tuple(range(90))], ids=["words", "ids"])
def test_no_two_texts_of_a_run_begin_alike(vocabulary: tuple[Piece, ...]) -> None:
    """Each opens with a piece of its own, so that a cache of tokens finds nothing of another."""
    source = PromptSource(vocabulary, seed="1")

    texts = [source.text(5) for _ in vocabulary]

    assert {len(text) for text in texts} == {5}
    assert {text.pieces[0] for text in texts} == set(vocabulary)


def test_a_seed_makes_the_same_texts_again() -> None:
    """The same seed asks the same, another one something else."""
    one, again, other = (
        [source.text(8) for _ in range(3)]
        for source in (PromptSource(WORDS, seed=seed) for seed in ("1", "1", "2"))
    )

    assert one == again
    assert one != other


def test_parts_are_put_together_as_they_are_sent() -> None:
    """A longer prompt begins with the shorter one, token by token and word by word."""
    ids = Pieces((3, 0)) + Pieces((5,))
    words = Pieces(("one", "two")) + Pieces(("three",))

    assert (ids.as_sent, len(ids)) == ([3, 0, 5], 3)
    assert words.as_sent == "one two three"
