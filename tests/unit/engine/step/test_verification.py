"""Drafts are accepted exactly as far as they equal the row's own draws, in every distribution.

The distribution of the tokens is compared with the model's own by chi-square, and verifiers that are
wrong on purpose fail that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from machd.engine.fake.tokenizer import END_OF_TEXT, VOCABULARY_TOKENS, FakeTokenizer
from machd.engine.grammar.grammar import LlguidanceCompiler
from machd.engine.grammar.matcher import matcher_for
from machd.engine.protocol.step import SampledToken
from machd.engine.sampling.sampler import Sampler
from machd.engine.sampling.sampling_state import SamplingState
from machd.engine.step import verification
from machd.engine.step.verification import Span, Verdict, span_of
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import Grammar, SamplingParams

_SYMBOLS = 4
_SAID = 3
_ROWS = 4000
_LIKELY = 3
"""After token 0, in the model made up below."""
_FALSE_ALARM_Z = 4.7534
"""A right verifier fails one check of a million. Seeds are fixed, so it never does or always."""

_RIGHT_VERIFY = verification.verify
_FloatArray = NDArray[np.float64]


def _verdicts(
    drafts: Sequence[Span],
    rows: Sequence[SamplingState],
    slots: Sequence[int],
    logits: mx.array,
    vocabulary_tokens: int = VOCABULARY_TOKENS,
) -> list[Verdict]:
    """Sample every position of every row's draft, and verify each."""
    places = [
        (slot, one)
        for slot, row, draft in zip(slots, rows, drafts, strict=True)
        for one in (row, *draft.ahead_states)
    ]
    states = [one for _, one in places]
    selection = _sampler(states, vocabulary_tokens).sample(states, logits)
    chosen = iter(selection.read([slot for slot, _ in places]))
    return [
        verification.verify(draft, [next(chosen) for _ in range(draft.length)]) for draft in drafts
    ]


def _sampler(states: Sequence[SamplingState], vocabulary_tokens: int) -> Sampler:
    return Sampler([one.params for one in states], vocabulary_tokens)


def _after(row: SamplingState, draft: Span, verdict: Verdict) -> SamplingState:
    """Return a row's state behind the tokens that it has said."""
    last = verdict.tokens[-1]
    assert last is not None
    return (row, *draft.ahead_states)[verdict.accepted_tokens].after([last.token_id])


# --- distributions ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chain:
    """A made-up model whose next token depends on the last one alone."""

    logits: NDArray[np.float32]
    params: SamplingParams

    def probabilities(self) -> _FloatArray:
        """Return the probability of every text of three tokens after token 0."""
        scaled = self.logits.astype(np.float64) / self.params.temperature
        weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        each = weights / weights.sum(axis=1, keepdims=True)
        texts = product(range(_SYMBOLS), repeat=_SAID)
        return np.array([each[0, a] * each[a, b] * each[b, c] for a, b, c in texts])

    def after(self, tokens: Sequence[int]) -> mx.array:
        """Logits [tokens, vocabulary] that follow each token."""
        return mx.array(self.logits[np.array(tokens, dtype=np.int64)])

    def said(self, seeds: Sequence[int]) -> list[list[int]]:
        """Return what rows say without drafts."""
        states = [SamplingState(replace(self.params, seed=seed)) for seed in seeds]
        sampler = _sampler(states, _SYMBOLS)
        last = [0] * len(seeds)
        texts: list[list[int]] = [[] for _ in seeds]
        for _ in range(_SAID):
            token_ids = sampler.sample(states, self.after(last)).token_ids.tolist()
            assert isinstance(token_ids, list)
            last = [int(str(one)) for one in token_ids]
            states = [state.after([one]) for state, one in zip(states, last, strict=True)]
            for text, token_id in zip(texts, last, strict=True):
                text.append(token_id)
        return texts

    def said_with(self, seeds: Sequence[int], proposed: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return what rows say if somebody proposes so for them, in as many passes as that takes."""
        rows = [SamplingState(replace(self.params, seed=seed)) for seed in seeds]
        texts: list[list[int]] = [[] for _ in seeds]
        while waiting := [row for row, text in enumerate(texts) if len(text) < _SAID]:
            drafts = [
                span_of(rows[row], proposed[row][len(texts[row]) :], _SAID - 1 - len(texts[row]))
                for row in waiting
            ]
            read = [
                token_id
                for row, draft in zip(waiting, drafts, strict=True)
                for token_id in ((texts[row] or [0])[-1], *draft.ahead_ids)
            ]
            states = [rows[row] for row in waiting]
            found = _verdicts(drafts, states, waiting, self.after(read), _SYMBOLS)
            for row, draft, verdict in zip(waiting, drafts, found, strict=True):
                texts[row] += [token.token_id for token in verdict.tokens if token is not None]
                rows[row] = _after(rows[row], draft, verdict)
        return texts


def _chain(temperature: float) -> _Chain:
    random = np.random.default_rng(5)
    logits = random.normal(scale=0.5, size=(_SYMBOLS, _SYMBOLS)).astype(np.float32)
    return _Chain(logits, SamplingParams(temperature=temperature))


def _chi_square(texts: Sequence[Sequence[int]], probabilities: _FloatArray) -> float:
    """Return how far counts of texts are from what is expected, relative to the limit for a right one."""
    counts = np.zeros(len(probabilities))
    for a, b, c in texts:
        counts[(a * _SYMBOLS + b) * _SYMBOLS + c] += 1
    expected = probabilities * len(texts)
    assert expected.min() > 5, "every text is likely enough to be counted by itself"
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Wilson and Hilferty's approximation of the quantile.
    freedom = len(probabilities) - 1
    spread = 2 / (9 * freedom)
    return statistic / (freedom * (1 - spread + _FALSE_ALARM_Z * math.sqrt(spread)) ** 3)


_SEEDS = list(range(_ROWS))
_TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.8])


@_TEMPERATURES
@pytest.mark.parametrize("proposer", ["another seed", "the same seed", "always 1"])
def test_what_is_said_has_the_models_distribution(temperature: float, proposer: str) -> None:
    """Drafts of another seed, of the same seed and bad ones change neither distribution nor text."""
    chain = _chain(temperature)
    plain = chain.said(_SEEDS)
    proposed = {
        "another seed": chain.said([_ROWS + seed for seed in _SEEDS]),
        "the same seed": plain,
        "always 1": [[1] * _SAID for _ in _SEEDS],
    }[proposer]

    texts = chain.said_with(_SEEDS, proposed)

    assert _chi_square(texts, chain.probabilities()) < 1
    assert texts == plain


_WrongVerify = Callable[[Span, Sequence[SampledToken | None]], Verdict]


def _accepting(is_right: Callable[[int, int, int], bool]) -> _WrongVerify:
    """Make a verifier that also accepts drafts for which ``is_right(slot, place, draft)`` is true."""

    def wrong(draft: Span, chosen: Sequence[SampledToken | None]) -> Verdict:
        taken = list(chosen)
        for place, proposed in enumerate(draft.ahead_ids):
            token = taken[place]
            if token is not None and is_right(token.slot_index, place, proposed):
                taken[place] = structs.replace(token, token_id=proposed)
        return _RIGHT_VERIFY(draft, taken)

    return wrong


@pytest.mark.parametrize(
    "wrong",
    [
        _accepting(lambda _slot, _place, _proposed: True),
        _accepting(lambda _slot, place, proposed: place == 0 and proposed == _LIKELY),
        _accepting(lambda slot, _place, _proposed: slot % 4 == 0),
    ],
    ids=["accepts all", "accepts the most likely", "accepts one in four too many"],
)
def test_a_wrong_verifier_has_another_distribution(
    wrong: _WrongVerify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check notices a verifier that accepts all or some drafts that were not drawn."""
    chain = _chain(1.0)
    assert int(np.argmax(chain.logits[0])) == _LIKELY
    monkeypatch.setattr(verification, "verify", wrong)

    # Drafts that the model samples have its distribution, so these are of another one.
    proposed = [[_LIKELY] * _SAID for _ in _SEEDS]
    assert _chi_square(chain.said_with(_SEEDS, proposed), chain.probabilities()) > 1


# --- drafts -----------------------------------------------------------------------------------


def _sampling(params: SamplingParams, prompt: Sequence[int] = (1,)) -> SamplingState:
    return SamplingState.for_prompt(params, prompt, VOCABULARY_TOKENS, matcher_for(params))


def _grammar(pattern: str) -> Grammar:
    compiler = LlguidanceCompiler(FakeTokenizer(), VOCABULARY_TOKENS, frozenset({END_OF_TEXT}))
    return compiler.compile(Constraint(ConstraintKind.REGEX, pattern, "test"))


def test_a_draft_has_a_state_behind_each_token() -> None:
    """Each state is of its own position and has counted the tokens before it; the row's stays."""
    row = _sampling(SamplingParams(presence_penalty=1.0)).after((7,))

    draft = span_of(row, (5, 5, 6, 8), 3)

    assert draft.ahead_ids == (5, 5, 6)
    assert [one.position for one in draft.ahead_states] == [2, 3, 4]
    counted = [one.counts for one in draft.ahead_states]
    assert [None if one is None else one[5].item() for one in counted] == [1, 2, 2]
    assert row.position == 1
    assert row.counts is not None
    assert row.counts[5].item() == 0
    assert draft.first(1) == Span((5,), draft.ahead_states[:1])
    assert span_of(row, (), 3).ahead_ids == span_of(row, (5,), 0).ahead_ids == ()


def test_a_draft_ends_before_what_a_grammar_rules_out() -> None:
    """Drafts that the grammar rules out are not computed, and do not advance the row's matcher."""
    row = _sampling(SamplingParams(grammar=_grammar("[ab]{5}")))
    draft = span_of(row, tuple(b"abcab"), 5)
    assert bytes(draft.ahead_ids) == b"ab"
    assert row.matcher is not None
    assert row.matcher.allows(ord("a"))
    assert not row.matcher.allows(ord("c"))
    last = draft.ahead_states[-1].matcher
    assert last is not None
    assert last is not row.matcher


def test_a_draft_goes_on_where_a_grammar_leaves_no_choice() -> None:
    """Its tokens are forced, whatever is proposed; a proposal counts on only as long as it agrees."""
    row = _sampling(SamplingParams(grammar=_grammar("[ab]-long-[ab]{5}")))
    assert bytes(span_of(row, tuple(b"a-long-bb"), 9).ahead_ids) == b"a-long-bb"
    assert bytes(span_of(row, tuple(b"axx"), 9).ahead_ids) == b"a-long-"
    assert bytes(span_of(row, tuple(b"a"), 4).ahead_ids) == b"a-lo"
    assert span_of(row, (), 9).ahead_ids == ()


# --- verdicts ---------------------------------------------------------------------------------


def _favouring(*token_ids: int) -> mx.array:
    """Logits [positions, vocabulary] of which each has one that is far the best."""
    return mx.where(
        mx.arange(VOCABULARY_TOKENS)[None] == mx.array(token_ids)[:, None], 9.0, 0.0
    ).astype(mx.float32)


_GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("proposed", "said"),
    [
        ((4, 5, 6), [4, 5, 6, 7]),
        ((4, 5, 9), [4, 5, 6]),
        ((4, 9, 6), [4, 5]),
        ((9, 5, 6), [4]),
        ((), [4]),
    ],
)
def test_draft_tokens_count_up_to_the_first_wrong_one(
    proposed: tuple[int, ...], said: list[int]
) -> None:
    """Then comes the token that was sampled in its place, and the state behind that."""
    row = _sampling(_GREEDY)
    draft = span_of(row, proposed, 9)
    logits = _favouring(*(4, 5, 6, 7)[: len(proposed) + 1])

    (verdict,) = _verdicts([draft], [row], [3], logits)

    assert verdict.tokens == tuple(SampledToken(3, one) for one in said)
    assert verdict.accepted_tokens == len(said) - 1
    assert _after(row, draft, verdict).position == len(said)
    assert verdict.is_finite


def test_rows_of_a_pass_are_judged_by_their_own_positions() -> None:
    """Rows of one pass have different numbers of drafts; log-probabilities come with every token."""
    asked = replace(_GREEDY, top_logprobs=1)
    rows = [_sampling(_GREEDY), _sampling(asked), _sampling(SamplingParams(seed=3))]
    drafts = [
        span_of(row, proposed, 4) for row, proposed in zip(rows, ((4,), (5, 6), ()), strict=True)
    ]

    verdicts = _verdicts(drafts, rows, [7, 8, 9], _favouring(4, 1, 5, 2, 3, 6))

    assert [one.accepted_tokens for one in verdicts] == [1, 1, 0]
    said = [[token.token_id for token in one.tokens if token] for one in verdicts]
    assert said[:2] == [[4, 1], [5, 2]]
    assert [token.slot_index for one in verdicts for token in one.tokens if token] == [
        7,
        7,
        8,
        8,
        9,
    ]
    assert [token.logprob is not None for token in verdicts[1].tokens if token] == [True, True]
    assert all(token.logprob is None for token in verdicts[0].tokens if token)


@pytest.mark.parametrize(
    ("at", "said", "is_finite"),
    [(0, [None], True), (1, [4, None], True), (2, [4, 5], False), (3, [4, 5], False)],
)
def test_what_is_no_number_is_told(at: int, said: list[int | None], *, is_finite: bool) -> None:
    """Where it would have been said, as a token that is missing; behind that, as a spot."""
    row = _sampling(_GREEDY)
    logits = _favouring(4, 5, 6, 7)
    logits[at] = mx.nan

    (verdict,) = _verdicts([span_of(row, (4, 9, 6), 9)], [row], [0], logits)

    assert [token and token.token_id for token in verdict.tokens] == said
    assert verdict.is_finite is is_finite or at < 2
