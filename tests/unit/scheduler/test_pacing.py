"""Prompt tokens of a step: running streams keep their pace during prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import median, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines.fake_engine import FakeEngine
from support.schedulers.sequence_samples import LIMITS, batching_of, only, request_of

from machd.engine.protocol.step import Lane, StepPlan
from machd.scheduler.config import continuous
from machd.scheduler.events import OutputGenerated, SequenceAdmitted
from machd.scheduler.pacing import PREFILL_CHUNK_TOKENS, StepPace
from machd.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class CostModel:
    """Duration of a step: decoding, and for a chunk a fixed part plus one for each token."""

    decode_s: float
    chunk_s: float
    token_s: float
    noise: float = 0.05

    def duration_s(self, plan: StepPlan, random: Random) -> float:
        """Return the duration of one step."""
        seconds_s = self.decode_s if plan.decode else 0.0
        if plan.prefill:
            seconds_s += self.chunk_s + self.token_s * plan.prefill_tokens
        return seconds_s * random.uniform(1 - self.noise, 1 + self.noise)


DEFAULT_MODEL = CostModel(decode_s=0.080, chunk_s=0.050, token_s=0.0025)
"""SmolLM2-135M on two CPU cores at width 8."""


def _measure(pace: StepPace, durations_s: list[float]) -> None:
    for duration_s in durations_s:
        assert pace.prefill_tokens(Lane.BATCH, 8) == 0, "a measurement is asked for"
        pace.observe(Lane.BATCH, 8, prefill_tokens=0, duration_s=duration_s)


def _settle(pace: StepPace, cost_s: Callable[[int], float], *, idle_s: float) -> list[int]:
    """The chunks of 200 steps with prefill on a machine without noise."""
    chunks: list[int] = []
    while len(chunks) < 200:
        tokens = pace.prefill_tokens(Lane.BATCH, 8)
        duration_s = idle_s + (cost_s(tokens) if tokens else 0.0)
        pace.observe(Lane.BATCH, 8, prefill_tokens=tokens, duration_s=duration_s)
        chunks += [tokens] if tokens else []
    return chunks


def test_without_anybody_to_disturb_chunks_are_long() -> None:
    """No row decodes, so the only bound is the delay of an abort."""
    assert StepPace(beside_decode=None).prefill_tokens(None, 0) == PREFILL_CHUNK_TOKENS
    assert StepPace(beside_decode=16).prefill_tokens(None, 0) == PREFILL_CHUNK_TOKENS


def test_a_number_that_is_set_is_kept() -> None:
    """The setting is taken at its word, whatever steps take."""
    pace = StepPace(beside_decode=16)
    for _ in range(50):
        pace.observe(Lane.BATCH, 8, prefill_tokens=16, duration_s=9.0)
        assert pace.prefill_tokens(Lane.BATCH, 8) == 16


def test_a_pace_is_measured_before_it_is_used() -> None:
    """Three steps without prefill, then a small chunk: nothing is known of its cost yet."""
    pace = StepPace(beside_decode=None)
    _measure(pace, [0.08] * 3)
    assert pace.prefill_tokens(Lane.BATCH, 8) == 7
    assert pace.prefill_tokens(Lane.BATCH, 5) == 7, "rounds up to the same number of rows"
    assert pace.prefill_tokens(Lane.BATCH, 9) == 0, "that is another width"
    assert pace.prefill_tokens(Lane.SERIAL, 1) == 0, "and that another lane"


def test_one_slow_step_does_not_spoil_the_measure() -> None:
    """The estimate is a median: a hiccup while measuring moves nothing."""
    chunks = []
    for third_s in (0.08, 8.0):
        pace = StepPace(beside_decode=None, share=0.375)
        _measure(pace, [0.08, 0.08, third_s])
        pace.observe(Lane.BATCH, 8, prefill_tokens=8, duration_s=0.14)
        chunks.append(pace.prefill_tokens(Lane.BATCH, 8))
    assert chunks == [7, 7]


def test_one_slow_step_with_prompt_tokens_does_not_shrink_the_next() -> None:
    """A step in which rows move to longer columns is one of its own."""
    pace = StepPace(beside_decode=None)
    usual = _settle(pace, lambda tokens: tokens / 1000, idle_s=0.1)[-1]
    pace.observe(Lane.BATCH, 8, prefill_tokens=usual, duration_s=3.0)
    assert pace.prefill_tokens(Lane.BATCH, 8) in {0, usual}


@given(chunk_ms=st.floats(0, 30), token_ms=st.floats(0.001, 10))
def test_the_chunk_settles_where_the_step_takes_as_long_as_aimed_at(
    chunk_ms: float, token_ms: float
) -> None:
    """Any affine cost: prompts come to their share of the step or stop at the bounds, and never overshoot."""
    pace = StepPace(beside_decode=None, share=0.375)
    chunks = _settle(pace, lambda tokens: (chunk_ms + token_ms * tokens) / 1000, idle_s=0.1)
    exact = (60.0 - chunk_ms) / token_ms
    assert chunks[-1] == pytest.approx(min(512, max(7, exact)), rel=0.1, abs=1.5)
    assert all(later <= earlier * 2 for earlier, later in pairwise(chunks))
    assert all(later >= earlier for earlier, later in pairwise(chunks))


@pytest.mark.parametrize(
    ("waiting", "lengthened_s"),
    [(1, 0.040), (4, 0.040), (6, 0.060), (8, 0.080), (16, 0.160), (17, 0.170), (90, 0.170)],
)
def test_where_many_prompts_wait_they_get_more_of_a_step(waiting: int, lengthened_s: float) -> None:
    """A prompt weighs as much as one of eight rows, a third of the time is theirs at least, and no step takes over 0.25 s.

    They get there in two steps, for none has over twice the tokens of the longest before it. The chunk that one alone
    would get stays as it was learnt.
    """
    pace = StepPace(beside_decode=None, share=1 / 3)
    _settle(pace, lambda tokens: 0.002 * tokens, idle_s=0.080)
    alone = pace.prefill_tokens(Lane.BATCH, 8)
    for step in range(50):
        tokens = pace.prefill_tokens(Lane.BATCH, 8, waiting=waiting)
        if not tokens:  # the measure is renewed now and then
            pace.observe(Lane.BATCH, 8, duration_s=0.080)
            continue
        assert 0.002 * tokens <= lengthened_s + 0.009
        if step > 1:
            assert 0.002 * tokens == pytest.approx(lengthened_s, abs=0.009)
        pace.observe(Lane.BATCH, 8, prefill_tokens=tokens, duration_s=0.080 + 0.002 * tokens)
    assert pace.prefill_tokens(Lane.BATCH, 8) in {0, *range(alone - 1, alone + 2)}


def test_a_chunk_beyond_the_goal_stays_at_the_smallest() -> None:
    """A prompt whose smallest chunk is too dear still gets in, seven tokens a step."""
    pace = StepPace(beside_decode=None)
    chunks = _settle(pace, lambda _tokens: 1.0, idle_s=0.1)
    assert set(chunks[3:]) == {7}


def test_what_was_learnt_stays_for_the_next_prompt() -> None:
    """The second prompt starts where the first one ended, not at the beginning."""
    pace = StepPace(beside_decode=None, share=0.375)
    chunks = _settle(pace, lambda tokens: tokens / 1000, idle_s=0.1)
    for _ in range(100):
        pace.observe(Lane.BATCH, 8, prefill_tokens=0, duration_s=0.1)
    assert pace.prefill_tokens(Lane.BATCH, 8) == chunks[-1] > 40


def test_a_short_rest_of_a_prompt_teaches_no_longer_chunk() -> None:
    """A cheap chunk that is shorter than allowed does not raise the allowance."""
    pace = StepPace(beside_decode=None)
    _measure(pace, [0.1] * 3)
    for _ in range(10):
        pace.observe(Lane.BATCH, 8, prefill_tokens=1, duration_s=0.1)
    assert pace.prefill_tokens(Lane.BATCH, 8) == 7


def test_the_measure_is_renewed() -> None:
    """After 32 steps with prefill one goes without, so a machine that got slower is noticed."""
    pace = StepPace(beside_decode=None)
    _measure(pace, [0.1] * 3)
    for _ in range(32):
        assert pace.prefill_tokens(Lane.BATCH, 8) > 0
        pace.observe(Lane.BATCH, 8, prefill_tokens=8, duration_s=0.175)
    _measure(pace, [0.1])
    assert pace.prefill_tokens(Lane.BATCH, 8) > 0


def test_a_clock_that_stands_still_stops_nothing() -> None:
    """Steps of no duration are cheap ones."""
    assert _settle(StepPace(beside_decode=None), lambda _tokens: 0.0, idle_s=0.0)[-1] == 512


# The whole scheduler


def _latencies_s(
    model: CostModel, *, prompt_tokens: int, streams: int = 8
) -> tuple[list[float], list[float], int]:
    """Inter-token latencies of streams that run, before and while a long prompt comes in."""
    batching = batching_of(max_b=streams + 1, prefill_chunk_tokens=None)
    scheduler, engine, random = Scheduler(continuous(LIMITS, batching)), FakeEngine(), Random(1)
    scheduler.submit(
        tuple(request_of(f"s{one}", max_tokens=3000, stop_token_ids=()) for one in range(streams)),
        0.0,
    )
    before_s: list[float] = []
    during_s: list[float] = []
    now_s = last_s = 0.0
    is_joined = False
    while not is_joined:
        if len(before_s) == 50 and not during_s:
            scheduler.submit((request_of("long", prompt_tokens=prompt_tokens, arrived_s=now_s),), 0)
        scheduler.admit(0.0)
        plan = scheduler.plan()
        duration_s = model.duration_s(plan, random)
        now_s += duration_s
        events = scheduler.commit(plan, engine.run(plan), now_s, duration_s=duration_s)
        tokens = {one.sequence_id for one in only(OutputGenerated, events)}
        is_joined = "long" in tokens
        if "s0" in tokens:
            (before_s if len(before_s) < 50 else during_s).append(now_s - last_s)
            last_s = now_s
    return before_s[1:], during_s, len(during_s)


@pytest.mark.parametrize(
    ("model", "prompt_tokens", "max_steps"),
    [
        (DEFAULT_MODEL, 900, 240),
        (CostModel(decode_s=0.020, chunk_s=0.004, token_s=0.0001), 3000, 60),
        (CostModel(decode_s=0.050, chunk_s=0.010, token_s=0.001), 900, 60),
    ],
    ids=["default model", "fast accelerator", "in between"],
)
def test_running_streams_keep_their_pace_while_a_long_prompt_comes_in(
    model: CostModel, prompt_tokens: int, max_steps: int
) -> None:
    """The 99th percentile of their latency stays under 2.2 times the idle median, and the prompt gets in."""
    before_s, during_s, steps = _latencies_s(model, prompt_tokens=prompt_tokens)
    p99_s = quantiles(during_s, n=100)[98]
    assert p99_s <= 2.2 * median(before_s)
    assert steps <= max_steps, "as much as the goal allows is used"


# Long prompts


@dataclass(frozen=True)
class _Attending:
    """Seconds of a prompt token, which grow with its context: two cores, 6,000 tokens."""

    token_s: float = 0.0025
    context_s: float = 1.7e-6

    def duration_s(self, plan: StepPlan) -> float:
        """Return the duration of a step."""
        decode_s = 0.08 if plan.decode else 0.0
        return decode_s + sum(
            len(one.token_ids) * (self.token_s + self.context_s * one.start) for one in plan.prefill
        )


def _alone_steps(pace: StepPace, start: int, stop: int) -> list[tuple[int, float]]:
    """Tokens and seconds of the steps of a prompt beside which no row decodes."""
    steps = []
    while start < stop:
        tokens = min(pace.prefill_tokens(None, 0, context_tokens=start), stop - start)
        duration_s = tokens * (0.0025 + 1.7e-6 * start)
        pace.observe(None, 0, prefill_tokens=tokens, duration_s=duration_s, context_tokens=start)
        steps.append((tokens, duration_s))
        start += tokens
    return steps


def test_a_long_prompt_is_computed_in_steps_of_about_a_second() -> None:
    """A chunk alone takes about the target time at any context, since arrivals wait for its end."""
    steps = _alone_steps(StepPace(beside_decode=None), 0, 8000)
    assert steps[0][0] == PREFILL_CHUNK_TOKENS
    assert max(duration_s for _, duration_s in steps) < 2.5
    assert max(duration_s for _, duration_s in steps[8:]) < 1.5
    assert sum(tokens for tokens, _ in steps) == 8000


def test_the_rest_of_a_cached_prompt_does_not_begin_with_a_long_step() -> None:
    """A long context's cost is learnt as it is computed, and leaves short prompts alone."""
    pace = StepPace(beside_decode=None)
    _alone_steps(pace, 0, 5133)
    (tokens, duration_s), *_ = _alone_steps(pace, 5133, 6223)
    assert duration_s < 1.5
    assert tokens < PREFILL_CHUNK_TOKENS
    assert pace.prefill_tokens(None, 0) > 2 * tokens
    assert pace.burst_tokens([]) == pace.prefill_tokens(None, 0)
    assert pace.burst_tokens([], context_tokens=5133) < 2 * tokens


def test_a_machine_that_is_fast_computes_long_prompts_in_long_steps() -> None:
    """One slow step changes nothing; steps that stay slow become shorter, and long again when they are past."""
    pace = StepPace(beside_decode=None)
    for _ in range(20):
        pace.observe(None, 0, prefill_tokens=512, duration_s=0.01)
        assert pace.prefill_tokens(None, 0) == PREFILL_CHUNK_TOKENS
    pace.observe(None, 0, prefill_tokens=512, duration_s=10.0)
    assert pace.prefill_tokens(None, 0) == PREFILL_CHUNK_TOKENS
    for _ in range(4):
        pace.observe(None, 0, prefill_tokens=512, duration_s=10.0)
    assert pace.prefill_tokens(None, 0) == 51
    for _ in range(8):
        tokens = pace.prefill_tokens(None, 0)
        pace.observe(None, 0, prefill_tokens=tokens, duration_s=tokens * 2e-5)
    assert pace.prefill_tokens(None, 0) == PREFILL_CHUNK_TOKENS


@pytest.mark.parametrize("at_token", [0, 600, 3000, 5133, 6000])
def test_a_short_request_beside_a_long_prompt_waits_two_steps_at_most(at_token: int) -> None:
    """It comes right after a step has begun, with a slot free, and is admitted when that ends."""
    cost = _Attending()
    limits = replace(LIMITS, queue_timeout_s=1000.0, request_timeout_s=1000.0)
    scheduler = Scheduler(continuous(limits, batching_of(prefill_chunk_tokens=None)))
    engine = FakeEngine()
    now_s = 0.0
    scheduler.submit((request_of("long", prompt_tokens=6223, max_tokens=4),), now_s)
    came_s, waited_steps, queued_s = None, 0, None
    while queued_s is None:
        events = scheduler.admit(now_s)
        if any(one.sequence_id == "short" for one in only(SequenceAdmitted, events)):
            assert came_s is not None
            queued_s = now_s - came_s
            break
        plan = scheduler.plan()
        duration_s = cost.duration_s(plan)
        assert not plan.is_empty
        if came_s is None and any(one.start + 600 > at_token for one in plan.prefill):
            came_s = now_s + duration_s / 1000
            scheduler.submit((request_of("short", prompt_tokens=33),), came_s)
        waited_steps += came_s is not None
        result = engine.run(plan)
        now_s += duration_s
        scheduler.commit(plan, result, now_s, duration_s=duration_s)
    assert waited_steps <= 2
    assert queued_s < 2.5
