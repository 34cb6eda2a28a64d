"""Forecasts of when a full queue has room again, held against what happens then."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import median

import pytest
from support.engines.fake_engine import FakeEngine
from support.schedulers.full_queue import (
    FullQueue,
    MakeRequest,
    bench_request,
    median_error,
    on_two_cores,
)
from support.schedulers.sequence_samples import (
    batching_of,
    only,
    request_of,
    running_decode_of,
    sequence_of,
)

from machd.engine.protocol.step import SampledToken, StepPlan, StepResult
from machd.errors import QueueFullError
from machd.scheduler.config import SchedulerConfig, continuous, single_flight
from machd.scheduler.departures import Departures
from machd.scheduler.events import SequenceFinished
from machd.scheduler.pacing import StepPace
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import SequenceRequest
from machd.scheduler.waiting import QueueLimits

_MAX_ERROR = 0.25
_LIMITS = QueueLimits(8, 10**9, queue_timeout_s=120.0, request_timeout_s=600.0)
_PACE = StepPace(beside_decode=None)


def _batched(slots: int) -> SchedulerConfig:
    batching = batching_of(max_b=slots, prefill_chunk_tokens=None, budget_tokens=10**7)
    return continuous(_LIMITS, batching)


def _agents(draw: Random) -> SequenceRequest:
    """Make a request of lengths that differ as much as those of people and agents do."""
    return request_of(
        prompt_tokens=draw.choice([50, 200, 800, 3000]),
        max_tokens=draw.choice([32, 64, 128, 256]),
        stop_token_ids=(),
    )


@pytest.mark.parametrize(
    ("make_config", "make_request"),
    [
        (lambda: single_flight(_LIMITS), bench_request(64, 64)),
        (lambda: _batched(4), bench_request(64, 64)),
        (lambda: _batched(4), bench_request(512, 128)),
        (lambda: _batched(16), bench_request(64, 64)),
        (lambda: _batched(4), _agents),
    ],
    ids=["single", "4 slots", "4 slots, long", "16 slots", "4 slots, mixed"],
)
def test_a_refused_client_is_told_when_the_queue_has_room(
    make_config: Callable[[], SchedulerConfig], make_request: MakeRequest
) -> None:
    """Under the bench's loads, half of the forecasts are off by less than a quarter of the wait."""
    refusals = FullQueue(make_config(), make_request).refusals(60, warm_up=20)
    assert median(one.actual_s for one in refusals) > 1.0
    assert median_error(refusals) < _MAX_ERROR


def test_whole_seconds_are_as_good_where_waits_are_long() -> None:
    """On a model ten times as slow, rounding up costs little."""
    load = FullQueue(_batched(4), bench_request(64, 64), lambda plan: 10 * on_two_cores(plan))
    refusals = load.refusals(60, warm_up=20)
    errors = [abs(one.told_s - one.actual_s) / one.actual_s for one in refusals]
    assert median(errors) < _MAX_ERROR


def test_departures_are_unknown_before_any_step() -> None:
    """Nothing is forecast of a machine that has not computed yet."""
    running = running_decode_of(max_tokens=9)
    assert Departures().seconds_until(1, [running], (), _PACE) == 0.0


def _learnt(*lengths: tuple[int, int]) -> Departures:
    """Departures of a scheduler whose steps take a second, after completions of so many of at most so many tokens."""
    scheduler, engine = Scheduler(single_flight(_LIMITS)), FakeEngine()
    scheduler.submit((request_of("a", max_tokens=99),), 0.0)
    for step in range(4):
        scheduler.admit(float(step))
        plan = scheduler.plan()
        scheduler.commit(plan, engine.run(plan), float(step), duration_s=1.0)
    departures = scheduler._departures
    departures._ended.clear()
    for tokens, max_tokens in lengths:
        ended = sequence_of(max_tokens=max_tokens)
        ended.completion_token_ids = [0] * tokens
        departures.note_end(ended)
    return departures


def test_tokens_of_drafts_count_as_what_they_are() -> None:
    """Steps of a second with nine tokens and with one in turn give five tokens a second."""
    departures = Departures()
    for step in range(40):
        outputs = tuple(SampledToken(0, 1) for _ in range(1 if step % 2 else 9))
        departures.observe(
            StepPlan(),
            StepResult(outputs=outputs),
            [_decoding(0)],
            now_s=step + 1.0,
            duration_s=1.0,
        )
    forecast_s = departures.seconds_until(1, [_decoding(0, max_tokens=100)], (), _PACE)
    assert forecast_s == pytest.approx(20.0, rel=0.15)


def _decoding(made: int, max_tokens: int = 1000, name: str = "a") -> Sequence:
    sequence = running_decode_of(name, max_tokens=max_tokens)
    sequence.prefilled_tokens = sequence.prompt_tokens
    sequence.completion_token_ids = [0] * made
    return sequence


def test_a_completion_is_thought_to_become_as_long_as_others_were() -> None:
    """The median of those that got further than it has; at most what it may have."""
    departures = _learnt((10, 1000), (20, 1000), (30, 1000))
    assert departures.seconds_until(1, [_decoding(0)], (), _PACE) == 20.0
    assert departures.seconds_until(1, [_decoding(5)], (), _PACE) == 15.0
    assert departures.seconds_until(1, [_decoding(25)], (), _PACE) == 5.0
    assert departures.seconds_until(1, [_decoding(5, max_tokens=8)], (), _PACE) == 3.0
    assert departures.seconds_until(1, [_decoding(40, max_tokens=90)], (), _PACE) == 50.0


def test_completions_that_were_cut_off_say_nothing_of_longer_ones() -> None:
    """Where all answers end at their limit, others are thought to."""
    departures = _learnt((10, 10), (10, 10))
    assert departures.seconds_until(1, [_decoding(4, max_tokens=30)], (), _PACE) == 26.0


def test_the_first_of_many_leaves_sooner_than_one_alone() -> None:
    """Lengths are spread over what is likely."""
    departures = _learnt(*((tokens, 1000) for tokens in range(10, 110, 10)))
    alone_s = departures.seconds_until(1, [_decoding(0)], (), _PACE)
    rows = [_decoding(0, name=name) for name in "abcd"]
    first_s = departures.seconds_until(1, rows, (), _PACE)
    all_s = departures.seconds_until(4, rows, (), _PACE)
    assert 0 < first_s < alone_s < all_s


def test_further_departures_wait_for_those_that_follow() -> None:
    """With one slot, the second departure is that of the sequence that waits now."""
    departures = _learnt()
    running, waiting = _decoding(0, max_tokens=10), _decoding(0, max_tokens=30, name="b")
    assert departures.seconds_until(2, [running], [waiting], _PACE) == 40.0
    assert departures.seconds_until(9, [running], [waiting], _PACE) == 40.0


def test_queue_tokens_wait_for_as_many_departures_as_free_them() -> None:
    """A prompt that needs the room of two waiting ones is told of the second departure."""
    limits = QueueLimits(8, 100, queue_timeout_s=120.0, request_timeout_s=600.0)
    scheduler, engine = Scheduler(single_flight(limits)), FakeEngine()
    for name in ("a", "b", "c"):
        request = request_of(name, prompt_tokens=40, max_tokens=20, stop_token_ids=())
        scheduler.submit((request,), 0.0)
        scheduler.admit(0.0)
    for step in range(5):
        scheduler.admit(float(step))
        plan = scheduler.plan()
        scheduler.commit(plan, engine.run(plan), float(step), duration_s=1.0)
    told = {}
    for tokens in (50, 90):
        request = request_of(f"d{tokens}", prompt_tokens=tokens, arrived_s=4.0)
        (refused,) = only(SequenceFinished, scheduler.submit((request,), 4.0))
        assert isinstance(refused.error, QueueFullError)
        told[tokens] = refused.error.retry_after_s
    assert 10 < told[50] < 20 < told[90]


def test_a_waiting_sequence_that_times_out_makes_room_as_well() -> None:
    """No client is told to wait longer than the queue's own timeout lets others wait."""
    limits = QueueLimits(1, 1000, queue_timeout_s=7.0, request_timeout_s=600.0)
    scheduler, engine = Scheduler(single_flight(limits)), FakeEngine()
    scheduler.submit((request_of("a", max_tokens=500, stop_token_ids=()),), 0.0)
    for step in range(5):
        scheduler.admit(float(step))
        plan = scheduler.plan()
        scheduler.commit(plan, engine.run(plan), float(step), duration_s=1.0)
    scheduler.submit((request_of("b", arrived_s=4.0),), 4.0)
    (refused,) = only(SequenceFinished, scheduler.submit((request_of("c", arrived_s=5.0),), 5.0))
    assert isinstance(refused.error, QueueFullError)
    assert refused.error.retry_after_s == 6
