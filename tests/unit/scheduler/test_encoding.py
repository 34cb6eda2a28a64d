"""Images of a prompt are encoded before its tokens are computed, beside the steps of other rows."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import pytest
from support.schedulers.sequence_samples import LIMITS, subscriber_of

from machd.engine.protocol.adapters import NoAdapterRoom
from machd.engine.protocol.media import Media, MediaSpan
from machd.engine.protocol.step import EncodeRow, Lane, StepPlan, StepResult
from machd.request.media import MediaKind
from machd.scheduler.config import single_flight
from machd.scheduler.events import SuspendReason
from machd.scheduler.pacing import PREFILL_SHARE, StepPace
from machd.scheduler.plan import Planner, plan_step
from machd.scheduler.running import RunningSequences
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import Subscriber


def _media(digest: bytes, tokens: int = 4) -> Media:
    return Media(MediaKind.IMAGE, digest, tuple(range(50, 50 + tokens)), {})


_FIRST, _SECOND = _media(b"first"), _media(b"second")


def _sequence(name: str, parts: Items[int | Media]) -> Sequence:
    """A sequence whose prompt is text of so many tokens, and images."""
    keys: list[int] = []
    spans: list[MediaSpan] = []
    for part in parts:
        if isinstance(part, Media):
            spans.append(MediaSpan(len(keys), part))
            keys += part.keys
        else:
            keys += range(part)
    request = replace(subscriber_of(name).request, prompt=tuple(keys), media=tuple(spans))
    return Sequence(Subscriber(request), number=ord(name), submitted_s=0.0)


def _running(*sequences: Sequence) -> RunningSequences:
    config = replace(single_flight(LIMITS), slot_count=len(sequences))
    running = RunningSequences(config, None, NoAdapterRoom())
    for sequence in sequences:
        running.slots.occupy(sequence, Lane.BATCH, now_s=0.0)
    return running


def _plan(running: RunningSequences, pace: StepPace | None = None) -> StepPlan:
    return plan_step(running.slots, pace or StepPace(beside_decode=None), turn=Lane.BATCH)


def _take(running: RunningSequences, plan: StepPlan, *encoded: Media) -> None:
    running.take_prompts(plan, StepResult(encoded=tuple(one.digest for one in encoded)))


def test_a_prompt_waits_at_each_image_until_it_is_encoded() -> None:
    """Text before an image is computed, the image and what lies behind it only once it is encoded."""
    sequence = _sequence("a", [3, _FIRST, 2, _SECOND, 1])
    running = _running(sequence)

    plan = _plan(running)
    assert [len(chunk.token_ids) for chunk in plan.prefill] == [3]
    assert plan.encode == (EncodeRow(0, _FIRST),)
    assert plan.encode_s > 0
    _take(running, plan)
    plan = _plan(running)
    assert (plan.prefill, plan.encode) == ((), (EncodeRow(0, _FIRST),)), "it goes on with the image"
    _take(running, plan, _FIRST)
    plan = _plan(running)
    assert [len(chunk.token_ids) for chunk in plan.prefill] == [4 + 2]
    assert plan.encode == (EncodeRow(0, _SECOND),)
    _take(running, plan, _SECOND)
    (chunk,) = _plan(running).prefill
    assert (len(chunk.token_ids), chunk.is_last) == (5, True)


def test_other_prompts_go_on_while_an_image_is_encoded() -> None:
    """A sequence that waits for its image holds up no other, and two with one image wait together."""
    one, other, text = _sequence("a", [_FIRST, 2]), _sequence("b", [_FIRST, 3]), _sequence("c", [5])
    running = _running(one, other, text)
    pace = StepPace(beside_decode=None)

    plan = _plan(running)

    assert [chunk.slot_index for chunk in plan.prefill] == [2], "a short text goes first"
    _take(running, plan)
    assert _plan(running).encode == (), "what a step without encoding takes is measured first"
    for _ in range(3):
        pace.observe(Lane.BATCH, 1, duration_s=0.2)
    plan = _plan(running, pace)
    assert plan.encode == (EncodeRow(0, _FIRST), EncodeRow(1, _FIRST))
    _take(running, plan, _FIRST)
    assert [chunk.slot_index for chunk in _plan(running).prefill][:2] == [0, 1]


def test_an_image_that_is_reused_is_not_encoded() -> None:
    """A prompt whose prefix was found, the image included, asks for no encoding."""
    sequence = _sequence("a", [3, _FIRST, 2])
    running = _running(sequence)
    sequence.prefilled_tokens = 7
    plan = _plan(running)
    assert plan.encode == ()
    assert len(plan.prefill) == 1


def test_a_suspended_sequence_asks_again() -> None:
    """The embeddings that the engine kept for it may be gone by the time that it runs again."""
    sequence = _sequence("a", [_FIRST, 2])
    running = _running(sequence)
    _take(running, _plan(running), _FIRST)
    assert sequence.next_unencoded is None
    sequence.suspend(SuspendReason.MEMORY)
    assert sequence.next_unencoded == MediaSpan(0, _FIRST)


@pytest.mark.parametrize("rows", [1, 4])
def test_encoding_takes_no_more_of_a_step_than_prompt_tokens_may(rows: int) -> None:
    """The prompts' share, beside what the rows take; nothing before that is measured."""
    pace = StepPace(beside_decode=None, share=0.375)
    assert pace.encode_s(Lane.BATCH, rows) == 0
    for _ in range(3):
        pace.observe(Lane.BATCH, rows, duration_s=0.2)
    assert pace.encode_s(Lane.BATCH, rows) == pytest.approx(0.12)


def test_time_of_encoding_does_not_count_as_decoding() -> None:
    """The pace learns what rows cost from the rest of the step."""
    sequence = _sequence("a", [_FIRST, 2])
    row = _sequence("b", [3])
    running = _running(sequence, row)
    row.prefilled_tokens = 3
    planner = Planner(single_flight(LIMITS))
    for _ in range(3):
        plan = planner.plan(running)
        planner.observe(plan, StepResult(encoding_s=9.0), running, 9.2)
    lengthened_s = PREFILL_SHARE / (1 - PREFILL_SHARE) * 0.2
    assert planner.pace.encode_s(Lane.BATCH, 1) == pytest.approx(lengthened_s)
