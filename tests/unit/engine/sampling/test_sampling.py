"""The vectorised sampler against plain references, row by row."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machd.engine.protocol.step import SampledToken
from machd.engine.sampling import gumbel_noise as noise_module
from machd.engine.sampling.sampler import Sampler
from machd.engine.sampling.sampling_state import SamplingState
from machd.request.generation import SamplingParams

VOCABULARY = 64
Floats = npt.NDArray[np.float32]
GREEDY_PARAMS = SamplingParams(temperature=0.0)


def logits_of(rows: int, seed: int = 0) -> Floats:
    """Random logits, [rows, VOCABULARY]."""
    generator = np.random.default_rng(seed)
    return generator.normal(0, 3, (rows, VOCABULARY)).astype(np.float32)


def choose(params: list[SamplingParams], logits: Floats, steps: int = 1) -> list[list[int]]:
    """Token ids that a fresh batch of rows gets in each of some steps on the same logits."""
    sampler = Sampler(params, VOCABULARY)
    states = [SamplingState.for_prompt(one, (1, 2, 3), VOCABULARY) for one in params]
    chosen: list[list[int]] = []
    for _ in range(steps):
        selection = sampler.sample(states, mx.array(logits))
        chosen.append([int(one) for one in np.array(selection.token_ids)])
        states = [state.after([one]) for state, one in zip(states, chosen[-1], strict=True)]
    return chosen


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 20, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([(), ((5, 4.0), (9, -100.0))]),
    allowed_token_ids=st.sampled_from([(), (5, 9, 11)]),
    min_tokens=st.sampled_from([0, 2]),
    end_token_ids=st.just((5, 7)),
    seed=st.integers(-(2**63), 2**63 - 1),
    top_logprobs=st.sampled_from([None, 0, 3]),
    logprob_token_ids=st.sampled_from([(), (5,), (63, 0, 9)]),
)


@settings(deadline=None, max_examples=60)
@given(batch=st.lists(params_strategy, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_row_is_chosen_as_if_it_were_alone(batch: list[SamplingParams], seed: int) -> None:
    """Whatever mix of parameters shares the batch, each row gets the tokens that it gets alone."""
    logits = logits_of(len(batch), seed)

    together = choose(batch, logits, steps=3)
    alone = [choose([one], logits[i : i + 1], steps=3) for i, one in enumerate(batch)]

    for step, tokens in enumerate(together):
        assert tokens == [row[step][0] for row in alone]


def test_a_shared_draw_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse of isolation: a draw that ignores the seed makes seeded rows equal."""
    hot = [SamplingParams(temperature=1.5, seed=seed) for seed in range(8)]
    logits = np.repeat(logits_of(1), 8, axis=0)
    assert len(set(choose(hot, logits)[0])) > 1

    monkeypatch.setattr(noise_module, "draw_key", lambda _seed, _position: (1, 2))

    assert len(set(choose(hot, logits)[0])) == 1


def reference_distribution(params: SamplingParams, logits: Floats) -> Floats:
    """Temperature, then top_k, top_p and min_p, written out one token at a time."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights)
    allowed = order[: params.top_k] if params.top_k else order
    kept, mass = [], 0.0
    total = weights[allowed].sum()
    for token in allowed:
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    result = np.zeros(VOCABULARY)
    for token in kept:
        if weights[token] >= params.min_p * weights.max():
            result[token] = weights[token]
    return np.asarray(result / result.sum(), dtype=np.float32)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.6, top_k=20, top_p=0.8, min_p=0.05),
    ],
    ids=["plain", "cold", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_reference_distribution(params: SamplingParams) -> None:
    """Over 4,000 seeds the counts fit the distribution (chi-square), and nothing else is drawn."""
    draws = 4000
    logits = logits_of(1, seed=5)
    expected = reference_distribution(params, logits[0])

    rows = [replace(params, seed=seed) for seed in range(draws)]
    counts = Counter(choose(rows, np.repeat(logits, draws, axis=0))[0])

    assert set(counts) <= set(np.flatnonzero(expected))
    common = [int(token) for token in np.flatnonzero(expected * draws >= 5)]
    statistic = sum((counts[t] - expected[t] * draws) ** 2 / (expected[t] * draws) for t in common)
    # Mean k-1, variance 2(k-1): six standard deviations are never reached by a correct sampler.
    freedom = max(1, len(common) - 1)
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)


def test_penalties_and_bias_follow_their_formulas() -> None:
    """Repetition over prompt and completion, presence and frequency over the completion alone."""
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.5,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        logit_bias=((10, 2.5),),
    )
    logits = logits_of(1, seed=9)
    counts = np.zeros(VOCABULARY, dtype=np.float32)
    seen = {1, 2, 3}
    expected = []
    for _ in range(12):
        row = logits[0].copy()
        row[10] += np.float32(2.5)
        for token in seen:
            row[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
        row -= 0.3 * counts + 0.7 * (counts > 0)
        token = int(row.argmax())
        expected.append(token)
        counts[token] += 1
        seen.add(token)

    assert [tokens[0] for tokens in choose([params], logits, steps=12)] == expected
    assert len(set(expected)) > 1


def test_logprobs_are_the_models_own() -> None:
    """Log-probabilities ignore penalties, bias and temperature, and come best first."""
    params = SamplingParams(
        temperature=0.0, logit_bias=((7, 100.0),), presence_penalty=2.0, top_logprobs=4
    )
    logits = logits_of(2, seed=3)
    rows = [SamplingParams(temperature=0.0), params]
    states = [SamplingState.for_prompt(one, (1,), VOCABULARY) for one in rows]

    first, second = Sampler(rows, VOCABULARY).sample(states, mx.array(logits)).read([0, 1])

    reference = logits[1].astype(np.float64)
    reference = reference - np.log(np.exp(reference).sum())
    assert first is not None
    assert first.logprob is None
    assert second is not None
    assert second.token_id == 7
    assert second.logprob == pytest.approx(reference[7], abs=1e-5)
    best = np.argsort(-reference)[:4]
    assert [entry.token_id for entry in second.top_logprobs] == best.tolist()
    assert [entry.logprob for entry in second.top_logprobs] == pytest.approx(
        reference[best], abs=1e-5
    )


def test_named_logprobs_are_the_models_own_in_the_order_asked() -> None:
    """Log-probabilities of named tokens ignore penalties, bias and temperature; rows that name none get none."""
    rows = [
        GREEDY_PARAMS,
        SamplingParams(logit_bias=((7, 100.0),), seed=1, logprob_token_ids=(7, 3)),
        SamplingParams(temperature=0.0, presence_penalty=2.0, logprob_token_ids=(0, 63, 5, 2)),
    ]
    logits = logits_of(3, seed=5)
    states = [SamplingState.for_prompt(one, (1,), VOCABULARY) for one in rows]

    tokens = Sampler(rows, VOCABULARY).sample(states, mx.array(logits)).read([0, 1, 2])

    reference = logits.astype(np.float64)
    reference -= np.log(np.exp(reference).sum(axis=-1, keepdims=True))
    for row, (token, params) in enumerate(zip(tokens, rows, strict=True)):
        assert token is not None
        asked = list(params.logprob_token_ids)
        assert token.named_logprobs == pytest.approx(reference[row][asked], abs=1e-5)
        assert token.logprob is None


def test_a_forced_row_says_what_it_is_told_and_no_other_row_does() -> None:
    """Forced tokens come in order, then the model's choice; neighbours and logprobs are untouched."""
    logits = logits_of(3)
    free = [GREEDY_PARAMS, SamplingParams(temperature=1.0, seed=4), GREEDY_PARAMS]
    forced = [free[0], replace(free[1], forced_token_ids=(63, 0)), free[2]]

    unforced_steps = choose(free, logits, steps=3)
    steps = choose(forced, logits, steps=3)

    assert [step[1] for step in steps] == [63, 0, unforced_steps[2][1]]
    assert [(step[0], step[2]) for step in steps] == [(one[0], one[2]) for one in unforced_steps]


def test_a_poisoned_row_is_named_and_the_others_go_on() -> None:
    """A row whose logits hold a NaN yields no token; its neighbours' tokens are untouched."""
    logits = logits_of(3)
    clean = choose([SamplingParams(temperature=0.0)] * 3, logits)[0]
    logits[1, 20] = np.nan
    states = [SamplingState(GREEDY_PARAMS)] * 3
    sampler = Sampler([GREEDY_PARAMS] * 3, VOCABULARY)

    tokens = sampler.sample(states, mx.array(logits)).read([4, 5, 6])

    assert tokens == [SampledToken(4, clean[0]), None, SampledToken(6, clean[2])]


def test_a_row_keeps_its_state_when_the_batch_is_built_anew() -> None:
    """Positions and penalties follow a row into another batch, so joins and leaves change nothing."""
    params = [
        SamplingParams(temperature=1.2, seed=1, frequency_penalty=0.8),
        SamplingParams(temperature=0.9, seed=2),
    ]
    logits = logits_of(2, seed=4)
    undisturbed = [tokens[0] for tokens in choose(params[:1], logits[:1], steps=6)]

    states = [SamplingState.for_prompt(one, (1, 2, 3), VOCABULARY) for one in params]
    tokens = []
    for rows in ([0], [0, 1], [1, 0], [0]):
        sampler = Sampler([params[row] for row in rows], VOCABULARY)
        selection = sampler.sample([states[row] for row in rows], mx.array(logits[rows]))
        chosen = [int(one) for one in np.array(selection.token_ids)]
        for row, token_id in zip(rows, chosen, strict=True):
            states[row] = states[row].after([token_id])
        tokens.append(chosen[rows.index(0)])

    assert tokens == undisturbed[:4]


def test_draw_moves_only_where_rounding_decides_between_two_tokens() -> None:
    """Logits of a usual vocabulary, each rounded otherwise by up to 1e-6, give 200 rows the same tokens."""
    rows, vocabulary = 200, 49152
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 3, vocabulary).astype(np.float32)
    rounded = logits + np.linspace(-1e-6, 1e-6, vocabulary, dtype=np.float32)
    params = [SamplingParams(seed=seed) for seed in range(rows)]
    states = [SamplingState(one) for one in params]
    chosen = [
        Sampler(params, vocabulary)
        .sample(states, mx.array(np.broadcast_to(one, (rows, vocabulary))))
        .token_ids.tolist()
        for one in (logits, rounded)
    ]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("min_p", [0.0, 0.5])
def test_row_whose_logits_are_no_numbers_has_no_usable_token(min_p: float) -> None:
    """A NaN is told, and the token stays inside the vocabulary: its count is written before it is read."""
    params = SamplingParams(min_p=min_p, presence_penalty=1.0)
    logits = logits_of(2)
    logits[0] = np.nan
    states = [SamplingState.for_prompt(params, (1, 2), VOCABULARY) for _ in range(2)]
    selection = Sampler([params] * 2, VOCABULARY).sample(states, mx.array(logits))
    assert np.array(selection.usable).tolist() == [False, True]
    assert int(np.array(selection.token_ids).max()) < VOCABULARY


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-9])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Dividing by next to nothing would overflow; the answer is the likeliest token."""
    logits = logits_of(1, seed=8)
    greedy = choose([SamplingParams(temperature=0.0)], logits)

    assert choose([SamplingParams(temperature=temperature, seed=4)], logits) == greedy


@settings(deadline=None, max_examples=40)
@given(temperature=st.sampled_from([0.0, 1.5]), seed=st.integers(0, 1000))
def test_only_allowed_tokens_are_chosen(temperature: float, seed: int) -> None:
    """A row with ``allowed_token_ids`` has no other token, whatever its biases; its neighbour is free."""
    held = SamplingParams(
        temperature=temperature, seed=seed, allowed_token_ids=(3, 8), logit_bias=((20, 100.0),)
    )
    free = SamplingParams(temperature=temperature, seed=seed, logit_bias=((20, 100.0),))
    for chosen in choose([held, free], logits_of(2, seed), steps=4):
        assert chosen[0] in (3, 8)
        assert chosen[1] == 20


def test_end_tokens_wait_for_min_tokens() -> None:
    """The likeliest token is not chosen while it would end a completion that has to go on."""
    logits = logits_of(2)
    likeliest = int(logits[0].argmax())
    logits[1] = logits[0]
    held = SamplingParams(temperature=0.0, min_tokens=2, end_token_ids=(likeliest,))
    chosen = choose([held, GREEDY_PARAMS], logits, steps=4)
    assert [row[0] == likeliest for row in chosen] == [False, False, True, True]
    assert [row[1] == likeliest for row in chosen] == [True] * 4
