"""Coalescing: identical requests, their events, and subscribers that leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engines.fake_engine import FakeEngine, FakeFaults, lettered
from support.schedulers.sequence_samples import (
    LIMITS,
    LateFirstToken,
    batching_of,
    only,
    outputs_of,
    request_of,
    run_step,
)

from machd.engine.protocol.step import SampledToken, ScoredPrompt
from machd.errors import (
    ClientDisconnectedError,
    EngineFaultError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
    RowFaultError,
)
from machd.request.generation import SamplingParams
from machd.scheduler.coalesce import key_of
from machd.scheduler.config import continuous
from machd.scheduler.events import (
    Event,
    FinishReason,
    OutputGenerated,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
)
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import Priority, SequenceRequest

GREEDY = SamplingParams(temperature=0.0)


def _request(
    sequence_id: str,
    *,
    group_id: str = "",
    max_tokens: int = 6,
    arrived_s: float = 0.0,
    priority: Priority = Priority.NORMAL,
) -> SequenceRequest:
    return request_of(
        sequence_id,
        group_id=group_id,
        max_tokens=max_tokens,
        arrived_s=arrived_s,
        priority=priority,
        sampling=GREEDY,
        stop_token_ids=(),
    )


def _scheduler(*, max_b: int = 2, is_on: bool = True, max_queue: int = 8) -> Scheduler:
    limits = replace(LIMITS, max_queue=max_queue)
    return Scheduler(continuous(limits, batching_of(max_b=max_b, coalesce=is_on)))


def _running(steps: int = 3) -> tuple[Scheduler, FakeEngine]:
    """A sequence "a" that has run for some steps, a token a step."""
    scheduler, engine = _scheduler(), FakeEngine()
    scheduler.submit((_request("a"),), 0.0)
    for _ in range(steps):
        run_step(scheduler, engine, 0.0)
    return scheduler, engine


def _run_to_end(scheduler: Scheduler, engine: FakeEngine) -> list[Event]:
    events: list[Event] = []
    while scheduler.running_count + scheduler.waiting_count or not scheduler.plan().is_empty:
        events += run_step(scheduler, engine, now_s=0.0)
        scheduler.check_invariants()
    return events


def _tokens(events: list[Event], sequence_id: str) -> list[int]:
    return [one.token_id for one in outputs_of(SampledToken, events, sequence_id)]


def _ends(events: list[Event]) -> dict[str, SequenceFinished]:
    return {one.sequence_id: one for one in only(SequenceFinished, events)}


def _script(count: int) -> list[int]:
    return [lettered((0, 1, 2, 3), GREEDY, position) for position in range(count)]


# Who shares


@pytest.mark.parametrize(
    ("change", "is_shared"),
    [
        ({"seed": 7}, True),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, True),
        ({"temperature": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": ((1, 1.0),)}, False),
        ({"top_logprobs": 0}, False),
    ],
)
def test_a_greedy_sequence_ignores_what_shapes_the_draw(
    change: dict[str, object], *, is_shared: bool
) -> None:
    """At temperature 0 only what moves the logits, or what is told of them, tells two apart."""
    one = request_of(sampling=GREEDY)
    other = request_of("b", sampling=replace(GREEDY, **change))  # type: ignore[arg-type]  # by name
    assert (key_of(one) == key_of(other)) == is_shared


@pytest.mark.parametrize(
    ("change", "is_shared"),
    [
        ({}, True),
        ({"sampling": SamplingParams(seed=2)}, False),
        ({"prompt": (0, 1, 2)}, False),
        ({"max_tokens": 5}, False),
        ({"stop_token_ids": frozenset({1})}, False),
        ({"namespace": "other"}, False),
        ({"priority": Priority.BATCH, "arrived_s": 9.0, "group_id": "g", "request_id": "r"}, True),
    ],
)
def test_random_sequences_share_only_when_they_draw_alike(
    change: dict[str, object], *, is_shared: bool
) -> None:
    """Seed, prompt, limits and namespace must agree; client and time need not."""
    one = request_of(sampling=SamplingParams(seed=1))
    other = replace(one, sequence_id="b", **change)  # type: ignore[arg-type]  # by name
    assert (key_of(one) == key_of(other)) == is_shared


def test_identical_requests_do_not_share_when_coalescing_is_off() -> None:
    """Identical sequences then take a slot each, and no token is kept."""
    scheduler = _scheduler(is_on=False)
    scheduler.submit((_request("a"), _request("b")), 0.0)
    events = run_step(scheduler, FakeEngine(), 0.0)
    assert scheduler.active_loops == 2
    assert [one.coalesced_with for one in only(SequenceAdmitted, events)] == [None, None]
    assert not any(sequence.tokens for sequence in scheduler._running.slots)


# What each is told


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_subscriber_of_a_running_sequence_gets_a_replay(steps: int) -> None:
    """Admitted at once under the leader's request id, replayed, then token for token alongside."""
    scheduler, engine = _running(steps)
    joined = scheduler.submit((_request("b"),), 7.0)

    admitted = only(SequenceAdmitted, joined)[0]
    assert joined[0] == admitted
    assert (admitted.sequence_id, admitted.slot_index, admitted.at_s) == ("b", 0, 7.0)
    assert (admitted.active_loops, admitted.fanout) == (1, 2), "two read one sequence"
    assert (admitted.request_id, admitted.coalesced_with) == ("req-b", "req-a")
    assert _tokens(joined, "b") == _script(steps)
    assert (scheduler.running_count, scheduler.active_loops) == (2, 1)
    assert scheduler.kv_reserved_bytes == 10 * 10

    events = joined + _run_to_end(scheduler, engine)
    assert _tokens(events, "b") == _script(6)
    ends = _ends(events)
    assert {(one.reason, one.completion_tokens) for one in ends.values()} == {
        (FinishReason.LENGTH, 6)
    }
    assert set(ends) == {"a", "b"}


def test_subscriber_that_joins_during_prefill_misses_nothing() -> None:
    """Before the first token there is nothing to replay, however late that token comes."""
    scheduler, engine = _scheduler(), LateFirstToken()
    scheduler.submit((_request("a"),), 0.0)
    run_step(scheduler, engine, 0.0)
    joined = scheduler.submit((_request("b"),), 0.0)
    assert [type(one) for one in joined] == [SequenceAdmitted]
    assert _tokens(_run_to_end(scheduler, engine), "b") == _script(6)


def test_subscriber_of_a_waiting_sequence_is_admitted_with_it() -> None:
    """It has the leader's place in the queue and needs neither room nor tokens of its own."""
    scheduler, engine = _scheduler(max_b=1, max_queue=1), FakeEngine()
    scheduler.submit((request_of("x"),), 0.0)
    run_step(scheduler, engine, 0.0)
    assert scheduler.submit((_request("a"),), 0.0) == [SequenceQueued("a", 0)]
    assert scheduler.submit((_request("b"),), 0.0) == [SequenceQueued("b", 0)]
    (refused,) = only(SequenceFinished, scheduler.submit((request_of("y", prompt_tokens=5),), 0.0))
    assert isinstance(refused.error, QueueFullError)
    assert scheduler.waiting_count == 2

    events = _run_to_end(scheduler, engine)
    admitted = {one.sequence_id: one.coalesced_with for one in only(SequenceAdmitted, events)}
    assert admitted == {"a": None, "b": "req-a"}
    assert _tokens(events, "a") == _tokens(events, "b") == _script(6)


def test_siblings_share_without_a_word() -> None:
    """The greedy choices of one request are one sequence; none of them has another request to name."""
    scheduler, engine = _scheduler(), FakeEngine()
    queued = scheduler.submit(tuple(_request(f"a/{one}", group_id="a") for one in range(3)), 0.0)
    assert len(queued) == 3
    events = _run_to_end(scheduler, engine)
    assert [one.coalesced_with for one in only(SequenceAdmitted, events)] == [None] * 3
    assert {one.active_loops for one in only(SequenceAdmitted, events)} == {1}
    assert len(_ends(events)) == 3


def test_a_refused_request_leaves_nothing_to_join() -> None:
    """A request after a refused one is judged afresh."""
    scheduler = _scheduler(max_b=1, max_queue=0)
    scheduler.submit((request_of("x"),), 0.0)
    scheduler.admit(0.0)
    assert len(_ends(scheduler.submit((_request("a"), _request("b")), 0.0))) == 2
    assert len(_ends(scheduler.submit((_request("c"),), 0.0))) == 1
    scheduler.check_invariants()


def test_finished_sequence_takes_no_subscriber() -> None:
    """The same request after the end is computed anew."""
    scheduler, engine = _running()
    _run_to_end(scheduler, engine)
    assert only(SequenceQueued, scheduler.submit((_request("b"),), 0.0))
    assert _tokens(_run_to_end(scheduler, engine), "b") == _script(6)


def test_an_urgent_follower_pulls_the_decode_forward() -> None:
    """A batch request that an interactive one shares is served with the interactive ones."""
    scheduler, engine = _scheduler(max_b=1), FakeEngine()
    scheduler.submit((_request("a", priority=Priority.BATCH),), 0.0)
    scheduler.submit((request_of("normal"),), 0.0)
    scheduler.submit((_request("b", priority=Priority.INTERACTIVE),), 0.0)
    assert [
        one.sequence_id for one in only(SequenceAdmitted, run_step(scheduler, engine, 0.0))
    ] == ["a", "b"]


# Who may leave


@pytest.mark.parametrize("leaver", ["a", "b"])
def test_a_subscriber_that_leaves_ends_alone(leaver: str) -> None:
    """Leader or follower: it alone ends, the slot stays, and the other has every token."""
    scheduler, engine = _running()
    events = scheduler.submit((_request("b"),), 0.0)
    error = ClientDisconnectedError("gone")
    (end,) = only(SequenceFinished, scheduler.abort((leaver,), error, 1.0))
    assert (end.sequence_id, end.completion_tokens, end.error) == (leaver, 3, error)
    assert scheduler.plan().release == ()
    assert (scheduler.running_count, scheduler.active_loops) == (1, 1)

    events += _run_to_end(scheduler, engine)
    other = "b" if leaver == "a" else "a"
    assert set(_ends(events)) == {other}
    assert _tokens(events, other)[-3:] == _script(6)[-3:]


def test_next_subscriber_joins_the_first_one_left() -> None:
    """When the leader has left, a newcomer is told the new leader's request, and replayed in full."""
    scheduler, _ = _running()
    scheduler.submit((_request("b"),), 0.0)
    scheduler.abort(("a",), None, 0.0)
    joined = scheduler.submit((_request("c"),), 0.0)
    assert [one.coalesced_with for one in only(SequenceAdmitted, joined)] == ["req-b"]
    assert _tokens(joined, "c") == _script(3)


def test_the_last_subscriber_frees_the_slot() -> None:
    """A sequence ends with its last subscriber, first or not."""
    scheduler, _ = _running()
    scheduler.submit((_request("b"),), 0.0)
    assert len(scheduler.abort(("a", "b"), None, 0.0)) == 2
    assert (scheduler.active_loops, scheduler.kv_reserved_bytes) == (0, 0)
    assert scheduler.plan().release == (0,)
    scheduler.check_invariants()


def test_a_waiting_leader_hands_its_place_on() -> None:
    """The follower goes on waiting, with the work, and is admitted."""
    scheduler, engine = _scheduler(max_b=1), FakeEngine()
    scheduler.submit((request_of("x"),), 0.0)
    run_step(scheduler, engine, 0.0)
    for name in "ab":
        scheduler.submit((_request(name),), 0.0)
    scheduler.abort(("a",), None, 0.0)
    scheduler.check_invariants()
    events = _run_to_end(scheduler, engine)
    assert [one.sequence_id for one in only(SequenceAdmitted, events)] == ["b"]


def test_timeouts_are_each_subscribers_own() -> None:
    """A subscriber that times out ends alone; later ones go on."""
    scheduler, _ = _running()
    scheduler.submit((_request("b", arrived_s=50.0),), 50.0)
    (end,) = only(SequenceFinished, scheduler.admit(LIMITS.request_timeout_s))
    assert (end.sequence_id, type(end.error)) == ("a", RequestTimeoutError)
    assert scheduler.running_count == 1

    scheduler = _scheduler(max_b=1)
    scheduler.submit((request_of("x", arrived_s=9.0),), 9.0)
    scheduler.admit(9.0)
    scheduler.submit((_request("a"),), 9.0)
    scheduler.submit((_request("b", arrived_s=9.0),), 9.0)
    (end,) = only(SequenceFinished, scheduler.admit(LIMITS.queue_timeout_s))
    assert (end.sequence_id, type(end.error)) == ("a", QueueTimeoutError)
    assert scheduler.waiting_count == 1


def test_faults_end_every_subscriber() -> None:
    """A row's fault is each subscriber's, an engine fault as well."""
    scheduler = _scheduler()
    engine = FakeEngine(faults=FakeFaults(row_errors={(0, 2): ValueError("planted")}))
    for name in "ab":
        scheduler.submit((_request(name),), 0.0)
    ends = _ends(_run_to_end(scheduler, engine))
    assert {type(one.error) for one in ends.values()} == {RowFaultError}
    assert set(ends) == {"a", "b"}

    scheduler, _ = _running()
    scheduler.submit((_request("b"),), 0.0)
    ends = _ends(scheduler.fail(EngineFaultError("broken"), 0.0))
    assert {type(one.error) for one in ends.values()} == {EngineFaultError}
    assert set(ends) == {"a", "b"}


def test_siblings_of_one_that_is_answered_at_once_wait_patiently() -> None:
    """A request's time in the queue ends with its first sequence, also for those that share."""
    scheduler, engine = _scheduler(max_b=1), FakeEngine()
    scheduler.submit((_request("a", max_tokens=4000),), 0.0)
    run_step(scheduler, engine, 0.0)
    twin = _request("g0", group_id="g", max_tokens=4000)
    others = [replace(_request(name, group_id="g"), prompt=(8, 9)) for name in ("g1", "g2")]
    events = scheduler.submit((twin, *others), 0.0)
    assert [one.sequence_id for one in only(SequenceAdmitted, events)] == ["g0"]
    late_s = LIMITS.queue_timeout_s + 0.5
    assert not _ends(run_step(scheduler, engine, late_s))


@pytest.mark.parametrize("subscribers", [1, 2])
def test_request_that_missed_too_much_gets_its_own_sequence(subscribers: int) -> None:
    """All completions of a request count, and later requests join the new sequence."""
    scheduler, engine = _scheduler(max_b=2), FakeEngine()
    scheduler.submit((_request("a", max_tokens=5000),), 0.0)
    while scheduler._open["a"].completion_tokens * subscribers < 4096:
        run_step(scheduler, engine, 0.0)
    late = [_request(f"b{number}", group_id="b", max_tokens=5000) for number in range(subscribers)]
    events = scheduler.submit(tuple(late), 0.0)
    assert not only(OutputGenerated, events), "nothing is replayed"
    assert scheduler.waiting_count == subscribers
    scheduler.check_invariants()
    scheduler.submit((_request("c", max_tokens=5000),), 0.0)
    assert scheduler._open["c"] is scheduler._open["b0"]
    scheduler.check_invariants()


def test_an_index_that_lost_a_decode_is_noticed() -> None:
    """The coalescing index and the books of queue and slots are checked against each other."""
    scheduler, _ = _running()
    scheduler._index._sequences.clear()
    with pytest.raises(AssertionError, match="coalescing index"):
        scheduler.check_invariants()


def test_scored_prompts_are_not_shared() -> None:
    """Identical sequences that ask for their prompt's log-probabilities compute and are told their own."""
    scheduler, engine = _scheduler(), FakeEngine()
    scored = replace(_request("a"), sampling=replace(GREEDY, prompt_logprobs=0))
    scheduler.submit((scored,), 0.0)
    events = run_step(scheduler, engine, 1.0)
    scheduler.submit((replace(scored, sequence_id="b", group_id="b"),), 1.0)
    events += [event for _ in range(8) for event in run_step(scheduler, engine, 2.0)]

    assert [len(outputs_of(ScoredPrompt, events, one)) for one in "ab"] == [1, 1]
    assert [one.fanout for one in only(SequenceAdmitted, events)] == [1, 1]
