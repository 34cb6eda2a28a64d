"""A client's handle: deltas, stop strings, errors, letting go, and the facts at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import pytest
from msgspec import structs
from support.daemon.serving_parts import (
    OpenGeneration,
    admitted,
    finished,
    looked_up,
    token,
    tokens,
)
from support.engines.fake_engine import FakeEngine
from support.schedulers.sequence_samples import (
    LIMITS,
    batching_of,
    outputs_of,
    request_of,
    run_step,
)

from machd.engine.protocol.step import PromptLogprob, RowOutput, SampledToken, ScoredPrompt
from machd.errors import (
    ClientDisconnectedError,
    ClientStalledError,
    DrainDeadlineError,
    EngineFaultError,
    MachdError,
    QueueFullError,
    RequestTimeoutError,
    RowFaultError,
)
from machd.generations.choice import ChoiceDelta
from machd.generations.fanout import SequenceEvent
from machd.generations.generation import GenerationUsage
from machd.generations.record import RequestRecord
from machd.http.pacing import Pacer, merge_deltas
from machd.request.generation import SamplingParams
from machd.scheduler.config import continuous
from machd.scheduler.events import (
    DecodeMode,
    FinishReason,
    OutputGenerated,
)
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import Resumption


async def test_each_choice_gains_its_own_text() -> None:
    """Interleaved events come out as one delta a choice, in order, with the tokens behind them."""
    opened = OpenGeneration("a", "b")
    opened.push(admitted("a"), tokens("a", "Hi"), tokens("b", "Yo"), tokens("a", "!"))
    batches = opened.generation.deltas(idle_s=30)

    first, second = await anext(batches)

    assert (first.index, first.text, first.finish_reason) == (0, "Hi!", None)
    assert bytes(one.token_id for one in first.tokens) == b"Hi!"
    assert (second.index, second.text) == (1, "Yo")


async def test_the_deltas_end_when_every_choice_has_ended() -> None:
    """Each choice's last delta carries its reason, and the iteration stops after the last one."""
    opened = OpenGeneration("a", "b")
    opened.push(tokens("a", "x"), finished("a", FinishReason.LENGTH, completion_tokens=1))
    was_finished = [opened.generation.is_finished]
    opened.push(finished("b", FinishReason.STOP, completion_tokens=1))

    deltas = await opened.read()

    assert [(one.index, one.text, one.finish_reason) for one in deltas] == [
        (0, "x", "length"),
        (1, "", "stop"),
    ]
    was_finished.append(opened.generation.is_finished)
    assert was_finished == [False, True]
    assert opened.aborts == []


async def test_silence_is_told_with_an_empty_batch() -> None:
    """After ``idle_s`` without events an empty delta is yielded, and later events still come."""
    opened = OpenGeneration("a")
    batches = opened.generation.deltas(idle_s=0.01)
    assert await anext(batches) == []
    opened.push(tokens("a", "x"))
    assert [delta.text for delta in await anext(batches)] == ["x"]


async def test_admission_is_waited_for_and_loses_nothing() -> None:
    """Headers can tell the slot; tokens that came along with it are still delivered."""
    opened = OpenGeneration("a", "b")
    opened.push(admitted("a", at_s=7.0), tokens("a", "x"), admitted("b", at_s=8.0))
    assert await opened.generation.admitted() == admitted("a", at_s=7.0)
    assert await opened.generation.admitted() == admitted("a", at_s=7.0)

    opened.push(finished("a", completion_tokens=1), finished("b"))
    assert [delta.text for delta in await opened.read()] == ["x", "", ""]


async def test_a_rejection_is_raised_while_waiting_for_admission() -> None:
    """A request that is turned away fails before a header is sent."""
    opened = OpenGeneration("a")
    opened.push(finished("a", FinishReason.ERROR, QueueFullError("full")))
    with pytest.raises(QueueFullError):
        await opened.generation.admitted()


async def test_a_stop_string_ends_the_choice_and_aborts_its_sequence() -> None:
    """The text stops before it, the engine is told at once, and the other choice goes on."""
    opened = OpenGeneration("a", "b", stop=["END"])
    opened.push(tokens("a", "one E"), tokens("b", "two"))
    batches = opened.generation.deltas(idle_s=30)
    assert [delta.text for delta in await anext(batches)] == ["one ", "two"]

    opened.push(tokens("a", "ND and more"))
    (delta,) = await anext(batches)

    assert (delta.text, delta.finish_reason) == ("", "stop")
    assert bytes(one.token_id for one in delta.tokens) == b"ND"
    assert opened.aborts == [(("a",), None)]
    assert not opened.generation.is_finished


async def test_a_stop_string_freezes_the_token_count() -> None:
    """Tokens generated until the abort arrives are neither delivered nor counted."""
    opened = OpenGeneration("a", stop=["."])
    opened.push(tokens("a", "yes.no"))
    (delta,) = await opened.read()
    assert delta.text == "yes"
    assert opened.generation.usage.completion_tokens == 4

    opened.push(tokens("a", "more"), finished("a", FinishReason.ABORT, completion_tokens=12))
    assert await opened.generation._take() == []
    assert opened.generation.usage.completion_tokens == 4


async def test_what_happens_after_a_stop_string_cannot_spoil_the_answer() -> None:
    """An answer that is complete stays good when its row or its engine fails on the way out."""
    opened = OpenGeneration("a", "b", stop=["."])
    opened.push(tokens("a", "yes."))
    batches = opened.generation.deltas(idle_s=30)
    await anext(batches)

    opened.push(finished("a", FinishReason.ERROR, EngineFaultError("late")), tokens("b", "x"))

    assert [(delta.index, delta.text) for delta in await anext(batches)] == [(1, "x")]


async def test_a_stop_string_in_the_last_step_is_a_stop() -> None:
    """A completion that meets its stop string with its last allowed token ended by the string."""
    opened = OpenGeneration("a", stop=["."])
    opened.push(tokens("a", "no."), finished("a", FinishReason.LENGTH, completion_tokens=3))
    (delta,) = await opened.read()
    assert (delta.text, delta.finish_reason) == ("no", "stop")
    assert opened.generation.usage.completion_tokens == 3


async def test_a_stop_string_completed_by_the_held_back_text_is_a_stop() -> None:
    """Text that only the end makes certain is searched too, and the reason then tells the truth."""
    opened = OpenGeneration("a", stop=["\ufffd"])
    opened.push(
        tokens("a", "x"),
        token("a", 0xE2),
        finished("a", FinishReason.LENGTH, completion_tokens=2),
    )
    (delta,) = await opened.read()
    assert (delta.text, delta.finish_reason) == ("x", "stop")


async def test_the_end_releases_held_back_text() -> None:
    """Text held back for a stop string comes with the last delta."""
    opened = OpenGeneration("a", stop=["###"])
    opened.push(tokens("a", "a##"), finished("a", completion_tokens=4))
    assert [delta.text for delta in await opened.read()] == ["a##"]


async def test_a_failed_choice_fails_the_request() -> None:
    """The client gets the sequence's own error, and closing aborts the other sequences with it."""
    opened = OpenGeneration("a", "b")
    error = RowFaultError("failed")
    opened.push(tokens("a", "x"))
    batches = opened.generation.deltas(idle_s=30)
    await anext(batches)
    opened.push(finished("a", FinishReason.ERROR, error, completion_tokens=1))

    with pytest.raises(RowFaultError) as raised:
        await opened.read()
    opened.generation.close()

    assert raised.value is error
    ((sequence_ids, told),) = opened.aborts
    assert "b" in sequence_ids
    assert told is error
    assert opened.generation.record(110.0).error_code == "row_fault"


async def test_text_that_came_before_an_error_is_delivered() -> None:
    """When text and error are both unread, the client gets the text first, then the error."""
    opened = OpenGeneration("a", "b")
    opened.push(tokens("a", "x"), tokens("b", "y"))
    opened.push(finished("a", FinishReason.ERROR, RowFaultError("failed"), completion_tokens=1))
    seen: list[ChoiceDelta] = []

    async def read() -> None:
        async for batch in opened.generation.deltas(idle_s=30):
            seen.extend(batch)

    with pytest.raises(RowFaultError):
        await read()

    assert {(delta.index, delta.text) for delta in seen} == {(0, "x"), (1, "y")}


async def test_an_error_without_news_yields_nothing() -> None:
    """A row that fails before its first token gives no empty delta, so no head is sent before it."""
    opened = OpenGeneration("a")
    opened.push(admitted("a"), finished("a", FinishReason.ERROR, RowFaultError("failed")))
    seen: list[ChoiceDelta] = []

    async def read() -> None:
        await opened.generation.admitted()
        async for batch in opened.generation.deltas(idle_s=30):
            seen.extend(batch)

    with pytest.raises(RowFaultError):
        await read()
    assert seen == []


async def test_the_server_can_end_a_generation() -> None:
    """``fail`` aborts running sequences; the client gets the unread text, then the error."""
    opened = OpenGeneration("a", "b")
    error = DrainDeadlineError("over")
    opened.push(tokens("a", "x"), finished("a", completion_tokens=1))
    batches = opened.generation.deltas(idle_s=30)
    await anext(batches)
    opened.push(tokens("b", "y"))

    opened.generation.fail(error)

    assert opened.aborts == [(("b",), error)]
    assert [delta.text for delta in await anext(batches)] == ["y"]
    with pytest.raises(DrainDeadlineError):
        await anext(batches)
    assert opened.generation.record(110.0).error_code == "drain_deadline"


async def test_closing_ends_only_what_runs() -> None:
    """Finished sequences are not aborted; the others are, because the client disconnected."""
    opened = OpenGeneration("a", "b", "c", stop=["."])
    opened.push(finished("a"), tokens("b", "."), tokens("c", "x"))
    batches = opened.generation.deltas(idle_s=30)
    await anext(batches)
    opened.aborts.clear()

    opened.generation.close()

    ((sequence_ids, error),) = opened.aborts
    assert sequence_ids == ("c",)
    assert isinstance(error, ClientDisconnectedError)


async def test_closing_twice_is_closing_once() -> None:
    """A second ``close``, as in a ``finally``, does nothing."""
    opened = OpenGeneration("a")
    error = ClientStalledError("asleep")
    opened.generation.close(error)
    opened.generation.close()

    assert opened.aborts == [(("a",), error)]
    assert opened.closed == [opened.generation]
    assert opened.generation.record(110.0).error_code == "client_stalled"


async def test_closing_a_finished_generation_aborts_nothing() -> None:
    """A finished generation has nothing to abort and no error."""
    opened = OpenGeneration("a")
    opened.push(finished("a"))
    await opened.read()
    opened.generation.close()

    assert opened.aborts == []
    assert opened.closed == [opened.generation]
    assert opened.generation.record(110.0).error_code is None


async def test_usage_adds_up_over_choices() -> None:
    """Prompt tokens are told from the start, completion tokens as they come, cached ones at the end.

    The prompt counts once, and so does what was cached of it: the second choice found what the
    first had computed.
    """
    opened = OpenGeneration("a", "b", prompt_tokens=10)
    assert opened.generation.usage == GenerationUsage(10, 0, 0)
    opened.push(tokens("a", "xy"), tokens("b", "z"))
    await anext(opened.generation.deltas(idle_s=30))
    assert opened.generation.usage == GenerationUsage(10, 0, 3)

    opened.push(finished("a", completion_tokens=3, cached_tokens=2))
    opened.push(finished("b", FinishReason.LENGTH, completion_tokens=1, cached_tokens=9))
    await opened.read()
    assert opened.generation.usage == GenerationUsage(10, 2, 4)


async def test_what_is_cached_is_known_before_the_first_token() -> None:
    """A choice that a stop string ends has its cached tokens, too."""
    opened = OpenGeneration("a", stop=["x"], prompt_tokens=10)
    opened.push(admitted("a"), looked_up("a", 8), tokens("a", "yx"))
    deltas = await opened.read()
    assert deltas[-1].finish_reason == "stop"
    assert opened.generation.usage == GenerationUsage(10, 8, 2)
    assert opened.generation.record(110.0).first_cached_tokens == 8


@pytest.mark.parametrize("steps", [1, 2, 4])
async def test_usage_is_the_same_if_the_engine_process_died(steps: int) -> None:
    """Events of two processes that follow one another come to what one would have told."""
    request = request_of(max_tokens=5, sampling=SamplingParams(prompt_logprobs=1))
    opened = OpenGeneration("a")
    read = list[SequenceEvent]()
    for count in (steps, 20):
        generated = tuple(one.token_id for one in outputs_of(SampledToken, read))
        former = Resumption(generated, reused_tokens=3, is_group_started=bool(read))
        scheduler, engine = Scheduler(continuous(LIMITS, batching_of())), FakeEngine()
        events = scheduler.submit((replace(request, resumption=former),), 0.0)
        for _ in range(count):
            events += run_step(scheduler, engine, 0.0)
        read += [one for one in events if isinstance(one, SequenceEvent)]
    opened.push(looked_up("a", 3), read)

    deltas = await opened.read()

    assert len([one for delta in deltas for one in delta.tokens]) == 5
    assert len([one for one in deltas if len(one.tokens) < len(one.outputs)]) == 1
    assert opened.generation.usage == GenerationUsage(4, 3, 5)
    assert opened.stream.completion_tokens == 5


async def test_each_prompt_has_its_own_cached_tokens() -> None:
    """Of two prompts with two choices each, the first choice of either tells."""
    opened = OpenGeneration("a0", "a1", "b0", "b1", prompt_tokens=[10, 20])
    for one, cached in (("a0", 3), ("a1", 9), ("b0", 16), ("b1", 19)):
        opened.push(finished(one, completion_tokens=1, cached_tokens=cached))
    await opened.read()
    assert opened.generation.usage == GenerationUsage(30, 19, 4)
    record = opened.generation.record(110.0)
    assert (record.first_prompt_tokens, record.first_cached_tokens) == (10, 3)


async def test_the_record_holds_the_figures_of_the_request() -> None:
    """Each span runs from the event to the event that its name says."""
    opened = OpenGeneration("a", "b", prompt_tokens=10, arrived_s=100.0)
    opened.push(admitted("a", at_s=101.0), token("a", 97, at_s=103.5), token("a", 98, at_s=104.0))
    opened.push(finished("a", FinishReason.LENGTH, completion_tokens=2, cached_tokens=1))
    opened.push(admitted("b", at_s=105.0), token("b", 97, at_s=106.0), finished("b"))
    await opened.read()

    assert opened.generation.record(110.0) == RequestRecord(
        generation_id="gen",
        request_id="req",
        endpoint="chat_completions",
        decode_mode=DecodeMode.SINGLE,
        prompt_tokens=10,
        first_prompt_tokens=10,
        cached_tokens=1,
        completion_tokens=2,
        queue_s=1.0,
        prefill_s=2.5,
        ttft_s=3.5,
        decode_s=2.5,
        duration_s=10.0,
        finish_reason="length",
        error_code=None,
        client="anonymous",
        first_cached_tokens=1,
    )


async def test_token_that_ends_the_text_is_timed() -> None:
    """The prompt ends with the first token and decoding with the last, also where that gives no text."""
    opened = OpenGeneration("a", "b", arrived_s=100.0)
    opened.push(admitted("a", at_s=101.0))
    opened.push(structs.replace(finished("a", completion_tokens=1), stop_token=SampledToken(0, 9)))
    await anext(opened.generation.deltas(idle_s=30))
    timing = opened.generation.usage.timing
    assert (timing.queue_s, timing.prefill_s, timing.decode_s) == (1.0, 2.0, 0.0)
    assert opened.generation.record(110.0).ttft_s == 3.0

    opened.push(admitted("b", at_s=101.0), token("b", 97, at_s=104.0))
    ended = finished("b", completion_tokens=2)
    opened.push(structs.replace(ended, stop_token=SampledToken(0, 9), at_s=107.0))
    await opened.read()
    assert opened.generation.usage.timing.decode_s == 4.0


async def test_the_record_of_a_request_that_never_ran() -> None:
    """Without a slot there is no mode and no span but the waiting, which lasted to the end."""
    opened = OpenGeneration("a", arrived_s=100.0)
    opened.push(finished("a", FinishReason.ERROR, QueueFullError("full")))
    with pytest.raises(QueueFullError):
        await opened.read()
    opened.generation.close()

    record = opened.generation.record(104.0)
    assert (record.decode_mode, record.queue_s, record.duration_s) == (None, 4.0, 4.0)
    assert (record.prefill_s, record.ttft_s, record.decode_s) == (None, None, None)
    assert (record.finish_reason, record.error_code) == ("reject", "queue_full")


async def test_the_record_is_right_at_any_time() -> None:
    """A clock may begin at zero: a time of 0.0 is a time like any other."""
    opened = OpenGeneration("a", arrived_s=0.0)
    opened.push(admitted("a", at_s=0.0), token("a", 97, at_s=0.0), token("a", 97, at_s=1.0))
    await anext(opened.generation.deltas(idle_s=30))

    record = opened.generation.record(2.0)
    assert (record.queue_s, record.prefill_s, record.ttft_s, record.decode_s) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("error", "finish_reason"),
    [
        (QueueFullError("full"), "reject"),
        (ClientDisconnectedError("gone"), "abort"),
        (RequestTimeoutError("long"), "abort"),
        (EngineFaultError("broken"), "error"),
        (RowFaultError("broken"), "error"),
    ],
    ids=lambda one: one.code if isinstance(one, MachdError) else one,
)
async def test_the_record_tells_how_a_request_ended(error: MachdError, finish_reason: str) -> None:
    """Turned away, ended early and failed are three different ends."""
    opened = OpenGeneration("a")
    opened.generation.close(error)

    record = opened.generation.record(110.0)
    assert (record.finish_reason, record.error_code) == (finish_reason, error.code)


async def test_output_that_is_no_token_comes_once_with_the_choices_first_delta() -> None:
    """It comes before any text, by itself if need be; a requeued sequence's second one is dropped."""
    opened = OpenGeneration("a", "b")
    first = ScoredPrompt(0, (PromptLogprob(1, 65, -1.0, 1),))
    again = ScoredPrompt(0, (PromptLogprob(1, 65, -1.1, 1),))
    empty = ScoredPrompt(1, ())
    batches = opened.generation.deltas(idle_s=30)

    opened.push(OutputGenerated("a", first, 102.0))
    assert await anext(batches) == [ChoiceDelta(0, "", (first,), None)]
    opened.push(OutputGenerated("a", again, 102.0), OutputGenerated("b", empty, 102.0))
    opened.push(tokens("a", "x"), tokens("b", "y"))
    deltas = await anext(batches)

    x, y = (SampledToken(0, ord(one)) for one in "xy")
    assert [(one.text, one.outputs) for one in deltas] == [("x", (x,)), ("y", (empty, y))]
    assert [one.tokens for one in deltas] == [(x,), (y,)]
    assert opened.stream.completion_tokens == 2
    assert opened.generation.first_token_s == 102.0


@dataclass(frozen=True)
class _Vector:
    """An output of a kind that nothing knows."""

    slot_index: int
    values: tuple[float, ...]


async def test_output_of_an_unknown_kind_reaches_the_delta_of_every_subscriber() -> None:
    """The scheduler, the stream, the generation and the pacing hand it on beside the tokens, unread."""
    vector = cast(RowOutput, _Vector(0, (0.5, -0.5)))
    scheduler, engine = Scheduler(continuous(LIMITS, batching_of(coalesce=True))), FakeEngine()
    greedy = SamplingParams(temperature=0.0)
    opened = OpenGeneration("a", "b")
    for name in "ab":
        scheduler.submit((request_of(name, max_tokens=2, sampling=greedy),), 0.0)
    for step in range(2):
        opened.push([one for one in scheduler.admit(0.0) if isinstance(one, SequenceEvent)])
        plan = scheduler.plan()
        result = engine.run(plan)
        if not step:
            result = replace(result, outputs=(vector, *result.outputs))
        opened.push(scheduler.commit(plan, result, 0.0, duration_s=0.0))

    pacer = Pacer(9)
    deltas = [*pacer.due(await opened.read()), *pacer.rest()]

    merged = [merge_deltas([one for one in deltas if one.index == index]) for index in (0, 1)]
    tokens = [SampledToken(0, ord(one)) for one in merged[0].text]
    assert [one.outputs for one in merged] == [(vector, *tokens)] * 2
    assert opened.generation.usage == GenerationUsage(4, 0, 4)
    assert opened.stream.completion_tokens == 4


async def test_stop_token_comes_with_the_last_delta() -> None:
    """The token that ended a text is told, unless a stop text had ended it before."""
    stop_token = SampledToken(0, 256)
    ends = [
        structs.replace(finished(one, completion_tokens=2), stop_token=stop_token)
        for one in ("a", "b")
    ]
    opened = OpenGeneration("a", "b", stop=["y"])
    opened.push(tokens("a", "x"), tokens("b", "y"), *ends)

    deltas = await opened.read()

    assert [(one.text, one.stop_token) for one in deltas] == [("x", stop_token), ("", None)]
