"""Text out of tokens: nothing lost, nothing of a stop string let out.

Which stop string is the first one, precisely: the text of the tokens so far is looked at after each
token. At the first token after which it contains a stop string anywhere, the completion is over,
and it is cut where the leftmost stop string that it then contains begins. With one character a
token that is the stop string completed first, and of several completed together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from machd.engine.fake.tokenizer import FakeTokenizer
from machd.reading.text import CompletionText

END_OF_TEXT = 256


class _Pieces:
    """A detokenizer whose token ids index a list of texts, and that keeps a tail to itself."""

    def __init__(self, pieces: Sequence[str], tail: str = "") -> None:
        self._pieces = pieces
        self._tail = tail

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def finish(self) -> str:
        return self._tail


def _expected(pieces: Sequence[str], stop: Sequence[str]) -> str:
    """The definition above, word for word."""
    text = ""
    for piece in pieces:
        text += piece
        starts = [text.index(one) for one in stop if one in text]
        if starts:
            return text[: min(starts)]
    return text


def _said(text: CompletionText, token_ids: Sequence[int]) -> list[str]:
    """Return what comes out, push by push, and at the end."""
    out = []
    for token_id in token_ids:
        out.append(text.push(token_id))
        if text.is_stopped:
            break
    return [*out, text.finish()]


# Two letters make overlaps, repeats and stop strings inside stop strings likely.
_letters = st.text("ab", max_size=6)
_stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(pieces=st.lists(_letters, max_size=12), tail=_letters, stop=_stops)
@example(pieces=["a", "ab"], tail="", stop=["aab", "b"])
@example(pieces=["aaa", "ab"], tail="", stop=["aab"])
@example(pieces=["ab", ""], tail="ab", stop=["bab", "abab"])
@example(pieces=["", "", ""], tail="", stop=["a"])
def test_text_comes_out_up_to_the_first_stop_string(
    pieces: list[str], tail: str, stop: list[str]
) -> None:
    """All pushes and the finish together are the text before the first stop string, or all of it."""
    text = CompletionText(_Pieces(pieces, tail), stop)
    said = "".join(_said(text, range(len(pieces))))
    whole = "".join(pieces) + tail

    assert said == _expected([*pieces, tail], stop)
    assert text.is_stopped == any(one in whole for one in stop)


@given(pieces=st.lists(_letters, max_size=12), stop=_stops)
def test_nothing_of_a_stop_string_leaks(pieces: list[str], stop: list[str]) -> None:
    """At no moment has a character come out that a stop string later swallows."""
    text = CompletionText(_Pieces(pieces), stop)
    final = _expected(pieces, stop)
    said = ""
    for push in _said(text, range(len(pieces))):
        said += push
        assert final.startswith(said)
        assert not any(one in said for one in stop)


@given(pieces=st.lists(_letters, max_size=12), stop=_stops)
def test_no_more_is_held_back_than_could_become_a_stop_string(
    pieces: list[str], stop: list[str]
) -> None:
    """What is kept after a push is the longest end that begins a stop string, and no more."""
    text = CompletionText(_Pieces(pieces), stop)
    whole, said = "", ""
    for index, piece in enumerate(pieces):
        whole += piece
        said += text.push(index)
        if text.is_stopped:
            return
        held = whole[len(said) :]
        ends = [whole[start:] for start in range(len(whole))]
        assert held == next(
            (end for end in ends if any(one.startswith(end) for one in stop)), ""
        ), "the longest end that could still become a stop string"


@given(text=st.text(max_size=30), stop=st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_characters_split_over_tokens_come_out_whole(text: str, stop: list[str]) -> None:
    """With a token a byte, the answer is the text up to the first stop string; no half characters."""
    tokenizer = FakeTokenizer()
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), END_OF_TEXT]

    said = _said(CompletionText(tokenizer.detokenizer(), stop), token_ids)

    assert "".join(said) == _expected(list(text), stop)


def test_a_character_comes_out_with_its_last_byte() -> None:
    """Three bytes of four make nothing certain; the fourth makes the character."""
    text = CompletionText(FakeTokenizer().detokenizer(), [])
    assert [text.push(byte) for byte in "\N{GRINNING FACE}".encode()] == [
        "",
        "",
        "",
        "\N{GRINNING FACE}",
    ]


def test_a_character_cut_off_at_the_end_is_replaced() -> None:
    """Half a character at the end of a completion is told as U+FFFD, never dropped in silence."""
    text = CompletionText(FakeTokenizer().detokenizer(), [])
    assert _said(text, [*b"a", *"é".encode()[:1]]) == ["a", "", "\ufffd"]


@given(data=st.binary(max_size=12))
@example(data=b"\xf0\x9f\xe2\x82\xac")
def test_any_bytes_stream_as_they_decode(data: bytes) -> None:
    """Whatever bytes a model says, streaming them gives the text that decoding them at once gives."""
    tokenizer = FakeTokenizer()
    said = "".join(_said(CompletionText(tokenizer.detokenizer(), []), list(data)))
    assert said == tokenizer.decode(list(data))


def test_text_that_only_looked_like_a_stop_string_comes_out_later() -> None:
    """A false beginning is delayed, not lost."""
    text = CompletionText(_Pieces(["x\n", "\n", "Us", "age"]), ["\n\nUser"])
    assert _said(text, range(4)) == ["x", "", "", "\n\nUsage", ""]


def test_the_end_of_the_text_releases_what_was_held() -> None:
    """A beginning of a stop string at the very end is text."""
    text = CompletionText(_Pieces(["ab", "##"]), ["###"])
    assert _said(text, range(2)) == ["ab", "", "##"]


def test_finish_after_a_stop_string_adds_nothing() -> None:
    """Asking for the rest of a stopped text gives nothing, as often as it is asked."""
    text = CompletionText(_Pieces(["abc"]), ["b"])
    assert text.push(0) == "a"
    assert text.is_stopped
    assert [text.finish(), text.finish()] == ["", ""]


def test_nothing_can_be_pushed_after_a_stop_string() -> None:
    """A token behind the end is a mistake of the caller."""
    text = CompletionText(_Pieces(["b", "c"]), ["b"])
    text.push(0)
    with pytest.raises(AssertionError, match="nothing comes after"):
        text.push(1)


def test_an_empty_stop_string_is_a_mistake_of_the_caller() -> None:
    """It would end every text before it began; requests that carry one are refused earlier."""
    with pytest.raises(AssertionError, match="empty stop string"):
        CompletionText(_Pieces([]), ["a", ""])


def test_stop_string_belongs_to_the_text_when_it_is_shown() -> None:
    """With ``shows_stop`` the text ends behind the stop string, and what follows stays out."""
    text = CompletionText(_Pieces(["on", "e st", "op two"]), ["stop"], shows_stop=True)
    assert "".join(_said(text, range(3))) == "one stop"
    assert text.stopped_by == "stop"


def test_no_stop_string_ends_a_text_before_its_tokens() -> None:
    """Stop strings in the first ``min_tokens`` tokens are text; later ones end it."""
    pieces = ["ab", "ab", "c", "ab", "d"]
    text = CompletionText(_Pieces(pieces), ["ab"], min_tokens=3)
    assert "".join(_said(text, range(len(pieces)))) == "ababc"
