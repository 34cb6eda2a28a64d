"""Prompt lookup proposes the tokens that followed the same n-gram earlier in the text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from machd.engine.protocol.step import ProposerKind
from machd.engine.speculation.ngram import NgramProposer, NgramRow
from machd.engine.step.ports import Proposer, RowProposer
from machd.request.generation import SamplingParams

tokens = st.lists(st.integers(0, 6), max_size=60)


def row_of(prompt: Sequence[int], said: Sequence[int] = ()) -> NgramRow:
    """A row that has said something."""
    row = NgramProposer().open(tuple(prompt), SamplingParams())
    row.extend(said)
    return row


def passes_to_say(prompt: Sequence[int], answer: Sequence[int], max_tokens: int = 8) -> int:
    """Return how many passes an answer takes when right drafts are accepted."""
    row = row_of(prompt)
    said = passes = 0
    while said < len(answer):
        proposed = row.propose(max_tokens)
        right = 0
        while right < len(proposed) and list(answer[said : said + right + 1]) == list(
            proposed[: right + 1]
        ):
            right += 1
        row.extend(answer[said : said + right + 1])
        said += right + 1
        passes += 1
    return passes


def prose(count: int, seed: int = 0) -> list[int]:
    """Tokens of which some are frequent and most are rare, as words are."""
    random = Random(seed)
    return [min(int(random.paretovariate(0.5)), 40_000) for _ in range(count)]


def test_it_is_the_proposer_it_says_it_is() -> None:
    """It has the protocol's shape, and its kind is the setting's word."""
    proposer: Proposer = NgramProposer()
    row: RowProposer = proposer.open((1, 2, 3), SamplingParams())
    assert proposer.kind is ProposerKind.NGRAM
    assert row.propose(4) == ()
    row.close()
    proposer.close()


def test_the_tokens_after_the_same_ngram_are_proposed() -> None:
    """In the prompt, and in what the row has said itself."""
    assert row_of([1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 3, 4, 5]).propose(3) == (6, 7, 8)
    assert row_of([], [1, 2, 3, 4, 5, 9, 1, 2, 3, 4]).propose(2) == (5, 9)


def test_nothing_is_proposed_after_a_new_ngram() -> None:
    """Nothing is proposed for an empty text, one token, or tokens never seen together."""
    assert row_of([]).propose(5) == ()
    assert row_of([1]).propose(5) == ()
    assert row_of([1, 2, 3, 4], [2, 4]).propose(5) == ()


def test_the_most_words_in_common_win() -> None:
    """A later place with the same two words gives way to one with the same four."""
    prompt = [1, 2, 3, 4, 10, 0, 8, 3, 4, 20, 0]
    assert row_of(prompt, [1, 2, 3, 4]).propose(1) == (10,)


def test_of_equal_places_the_latest_wins() -> None:
    """The latest of several equal matches is the likeliest to repeat."""
    assert row_of([3, 4, 10, 0, 3, 4, 20, 0], [3, 4]).propose(1) == (20,)


def test_a_proposal_after_a_short_match_is_short() -> None:
    """A match of two tokens is mostly chance: of eight drafts allowed, three are proposed."""
    prompt = list(range(30))
    assert row_of(prompt, [5, 6]).propose(8) == (7, 8, 9)
    assert row_of(prompt, [3, 4, 5, 6]).propose(8) == (7, 8, 9, 10, 11, 12, 13, 14)


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    """A copy that reaches the end of what is known copies itself."""
    assert row_of([7, 1, 2, 3], [1, 2, 3, 1, 2, 3]).propose(7) == (1, 2, 3, 1, 2, 3, 1)
    assert row_of([5, 5, 5, 5, 5, 5]).propose(8) == (5,) * 8


def test_a_copy_stays_with_its_source() -> None:
    """Once it was right it goes on there, though the same words come again later in the text."""
    first = [1, 2, 3, 4, 5, 6, 50, 51]
    second = [4, 5, 6, 60, 61]
    row = row_of([*first, 0, *second, 0], [1, 2, 3, 4])
    assert row.propose(2) == (5, 6)
    row.extend([5, 6])
    assert row.propose(2) == (50, 51)


def test_it_goes_on_behind_a_changed_word() -> None:
    """One word after the changed one is enough to be back in the text that was copied."""
    text = list(range(100, 140))
    row = row_of(text, text[:4])
    row.propose(4)
    row.extend([*text[4:12], 7])
    assert row.propose(4) == ()  # nothing is known of the new word
    row.extend([text[13]])
    assert row.propose(4) == tuple(text[14:18])


def test_an_inserted_or_left_out_word_is_no_end() -> None:
    """The copy is taken up where the row is, wherever that is near the place it was left."""
    text = list(range(100, 140))
    for changed in ([7, text[12]], [text[14]], [7, 8, 9, text[12]]):
        row = row_of(text, text[:4])
        row.propose(4)
        row.extend([*text[4:12], *changed])
        place = text.index(changed[-1])
        assert row.propose(3) == tuple(text[place + 1 : place + 4])


def test_quoting_takes_one_pass_for_eight_drafts_and_a_token() -> None:
    """A text given back costs little more than a ninth of its passes, an edited one a third."""
    text = prose(900)
    assert passes_to_say([0, *text, 0], text) <= 900 / 9 + 20
    edited = [token if i % 12 else 41_000 + i for i, token in enumerate(text)]
    assert passes_to_say([0, *text, 0], edited) <= 900 / 3


def test_free_text_has_no_drafts() -> None:
    """Without repeated tokens there are no drafts."""
    row = row_of(range(1000))
    for token in range(2000, 2200):
        assert row.propose(8) == ()
        row.extend([token])


@given(tokens, tokens, st.integers(1, 12), st.lists(st.booleans(), max_size=60))
def test_drafts_are_copies_of_the_text(
    prompt: list[int], said: list[int], max_tokens: int, asked: list[bool]
) -> None:
    """Whatever was asked before, drafts follow an earlier place with the same last token."""
    row = row_of(prompt)
    text = list(prompt)
    for i, token in enumerate(said):
        if i < len(asked) and asked[i]:
            row.propose(max_tokens)
        row.extend([token])
        text.append(token)
    proposed = row.propose(max_tokens)
    assert len(proposed) <= max_tokens
    if proposed:
        places = [i for i in range(1, len(text)) if text[i - 1] == text[-1]]
        whole = text + list(proposed)
        assert any(whole[place : place + len(proposed)] == list(proposed) for place in places)


@given(tokens, tokens)
def test_a_pair_seen_before_is_always_found(prompt: list[int], said: list[int]) -> None:
    """There is a proposal if the last two tokens occur earlier, and asking again repeats it."""
    row = row_of(prompt, said)
    text = prompt + said
    pairs = list(pairwise(text))
    proposed = row.propose(4)
    assert bool(proposed) == (len(pairs) > 1 and pairs[-1] in pairs[:-1])
    assert row.propose(4) == proposed


@given(tokens, tokens, st.integers(1, 8))
def test_how_tokens_come_does_not_matter(prompt: list[int], said: list[int], step: int) -> None:
    """One by one or several at a time, the same text gives the same drafts."""
    one = row_of(prompt, said)
    several = row_of(prompt)
    for start in range(0, len(said), step):
        several.extend(said[start : start + step])
    assert one.propose(8) == several.propose(8)


def test_what_it_holds_is_bounded_by_the_text() -> None:
    """Eight bytes a token and at most a pair in the index each; nothing after it is closed."""
    row = row_of(prose(5000))
    assert row.kv_bytes < 5000 * 5
    row.propose(8)
    row.extend(prose(5000, seed=1))
    row.propose(8)
    assert 10_000 * 8 <= row.kv_bytes <= 10_000 * (8 + 144)
    row.close()
    assert row.kv_bytes == 0
    assert row.propose(8) == ()


def test_a_frequent_pair_costs_no_more_looks_than_another() -> None:
    """Of a hundred places of a pair only the latest are compared."""
    frequent = [token for i in range(100) for token in (3, 4, 1000 + i)]
    row = row_of([1, 2, 3, 4, 77, *frequent], [1, 2, 3, 4])
    assert row.propose(1) == (1099,)


def test_predicted_text_is_proposed_from_its_beginning() -> None:
    """A client's prediction is proposed first, and followed for as long as it is right."""
    predicted = (11, 12, 13, 14, 15, 16, 17, 18, 19)
    row = NgramProposer().open((1, 2, 3), SamplingParams(predicted_token_ids=predicted))
    assert row.propose(4) == predicted[:4]
    row.extend(predicted[:7])
    assert row.propose(2) == predicted[7:]
    row.extend((99, 98))
    assert row.propose(2) == ()
