"""The front of serving: limits, seeds, the set of open generations, draining."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Never

import pytest
from support.clocks.manual_clock import ManualClock
from support.daemon.engine_thread import ScriptedScheduling
from support.daemon.serving_parts import admitted, finished, identity_of, token, tokens
from support.engines.fake_engine import FakeEngine

from machd.engine.fake.tokenizer import VOCABULARY_TOKENS, FakeTokenizer
from machd.engine.protocol.engine import ModelDescription
from machd.engine_process.inbox import Abort, Message, Submit
from machd.engine_process.loop import EngineLoop
from machd.errors import (
    ContextLengthExceededError,
    DrainDeadlineError,
    DrainingError,
    EngineFaultError,
    InvalidRequestError,
    KeyLimitError,
    ModelFormatError,
    NotReadyError,
    QueueFullError,
    UnsupportedParameterError,
)
from machd.generations.fanout import MAX_PENDING_EVENTS, Fanout
from machd.generations.generation import Generation
from machd.generations.open_generations import GenerationLimits, OpenGenerations
from machd.generations.record import RequestRecord
from machd.generations.service import GenerationService
from machd.link.snapshot import LoopSnapshot
from machd.link.state import ServedState
from machd.process.lifecycle import Lifecycle, State
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.conversation import Conversation
from machd.request.generation import WHOLE_ROOM, GenerationOptions, Grammar, SamplingParams
from machd.request.media import MEDIA_KEY, MediaKind, MediaSource
from machd.scheduler.events import FinishReason
from machd.scheduler.subscriber import Priority, SequenceRequest
from machd.served.open_work import ModelSuspendedError
from machd.served.served_model import ServedModel
from machd.settings.model import Settings

CONTEXT_TOKENS = 100
OPTIONS = GenerationOptions(max_tokens=5)


class _Records:
    def __init__(self) -> None:
        self.seen: list[RequestRecord] = []

    def on_request(self, record: RequestRecord) -> None:
        self.seen.append(record)


async def _never() -> None:
    raise AssertionError("no model is suspended")


class _Serving:
    """A service whose engine thread is never started: what it would be told lies in the inbox."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.clock = ManualClock()
        self.records = _Records()
        self.lifecycle = Lifecycle()
        self.fanout = Fanout(asyncio.get_running_loop())
        self.loop = EngineLoop(
            load=FakeEngine,
            scheduling=ScriptedScheduling(),
            settings=Settings(),
            publish=self.fanout.publish,
            clock=self.clock,
        )
        self.served = ServedModel(self.loop, Settings, self.lifecycle.check_accepting)
        self.open = OpenGenerations(
            lifecycle=self.lifecycle,
            limits=GenerationLimits(max_tokens_default=50, max_n=3, max_queue=4),
            clock=self.clock,
            observers=[self.records],
        )
        self.service = GenerationService(
            served=self.served, fanout=self.fanout, open_=self.open, until_ready=_never
        )
        if is_ready:
            engine = FakeEngine(context_tokens=CONTEXT_TOKENS)
            self.loop.state = ServedState.of(engine.model, None)
            self.loop.front = engine
            self.loop._snapshots.newest = LoopSnapshot(
                slot_count=2
            )  # as the thread would have noted it
            self.lifecycle.become(State.READY)

    def messages(self) -> list[Message]:
        """Return what the engine thread would find."""
        return self.loop.inbox.drain(wait_s=0)

    def submitted(
        self, options: GenerationOptions, *prompts: int, client: str = "anonymous"
    ) -> tuple[SequenceRequest, ...]:
        """The sequences of a request with prompts of these lengths."""
        number = len(self.open)
        self.service.open(
            [(1,) * one for one in prompts],
            options,
            replace(identity_of(f"gen{number}"), client=client),
            prompt_param="prompt",
        )
        (message,) = self.messages()
        assert isinstance(message, Submit)
        return message.requests


@pytest.fixture(name="serving")
async def _serving() -> _Serving:
    return _Serving()


async def test_every_choice_of_every_prompt_becomes_a_sequence(serving: _Serving) -> None:
    """``n`` completions of each prompt, prompt by prompt, under ids of the generation's own."""
    requests = serving.submitted(replace(OPTIONS, n=2), 3, 4)

    assert [len(request.prompt) for request in requests] == [3, 3, 4, 4]
    assert [request.sequence_id for request in requests] == [f"gen0/{index}" for index in range(4)]
    assert {request.arrived_s for request in requests} == {100.0}
    assert len(serving.fanout) == 4


async def test_a_tokenizer_that_fails_leaves_nothing_open(
    serving: _Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that could not begin has no stream that waits for ever."""

    def fails(_tokenizer: FakeTokenizer, **_keeps: object) -> Never:
        raise RuntimeError("planted")

    monkeypatch.setattr(FakeTokenizer, "detokenizer", fails)
    with pytest.raises(RuntimeError, match="planted"):
        serving.service.open([(1,)], OPTIONS, identity_of("gen"), prompt_param="prompt")
    assert len(serving.fanout) == len(serving.open) == 0
    assert not serving.messages()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [((), "holds no token"), ((1, VOCABULARY_TOKENS), f"spells token {VOCABULARY_TOKENS}")],
    ids=["no token", "a token that the model lacks"],
)
async def test_prompt_that_the_engine_cannot_compute_is_refused(
    serving: _Serving, prompt: tuple[int, ...], words: str
) -> None:
    """An empty prompt, or one beyond the model's vocabulary, is its sender's error and goes no further."""
    with pytest.raises(InvalidRequestError, match=words) as refused:
        serving.service.open([(1,), prompt], OPTIONS, identity_of("gen"), prompt_param="messages")
    assert refused.value.param == "messages"
    assert not serving.messages()
    assert len(serving.open) == 0


async def test_options_reach_the_sampler_unchanged(serving: _Serving) -> None:
    """The row has the sampling parameters of the options, with a seed; no request forces tokens."""
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.6,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=((4, 1.5),),
        top_logprobs=2,
    )
    (request,) = serving.submitted(GenerationOptions(sampling, seed=11, max_tokens=1), 3)
    assert request.sampling == replace(sampling, seed=11)


async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    serving: _Serving,
) -> None:
    """Where nothing is clamped, the message tells the context and what was needed."""
    serving.open.set_limits(
        GenerationLimits(max_tokens_default=50, max_n=3, max_queue=4, clamps_max_tokens=False)
    )
    with pytest.raises(ContextLengthExceededError) as refusal:
        serving.submitted(replace(OPTIONS, max_tokens=41), 60)

    assert refusal.value.param == "max_tokens"
    for number in ("100", "101", "60", "41"):
        assert number in refusal.value.message
    assert serving.messages() == []
    assert len(serving.open) == 0
    assert len(serving.fanout) == 0


@pytest.mark.parametrize("prompt_tokens", [100, 101, 500])
async def test_a_prompt_without_room_for_a_token_is_refused(
    serving: _Serving, prompt_tokens: int
) -> None:
    """Without ``max_tokens`` an answer needs room for one token."""
    with pytest.raises(ContextLengthExceededError) as refusal:
        serving.submitted(GenerationOptions(), prompt_tokens)
    assert "100 tokens" in refusal.value.message
    assert f"needs {prompt_tokens + 1} " in refusal.value.message


async def test_one_prompt_too_long_refuses_the_request(serving: _Serving) -> None:
    """All or none: no sequence of a refused request is ever started."""
    with pytest.raises(ContextLengthExceededError):
        serving.submitted(OPTIONS, 3, 100)
    assert serving.messages() == []


@pytest.mark.parametrize(
    ("asked", "prompt_tokens", "max_tokens"),
    [
        (None, 10, 50),
        (None, 60, 40),
        (None, 99, 1),
        (40, 60, 40),
        (90, 10, 90),
        (1, 99, 1),
        (91, 10, 90),
        (32_000, 99, 1),
        (WHOLE_ROOM, 10, 90),
    ],
)
async def test_completion_gets_the_tokens_that_fit(
    serving: _Serving, asked: int | None, prompt_tokens: int, max_tokens: int
) -> None:
    """The default, and a number that is larger than the room left, are clamped to the room."""
    (request,) = serving.submitted(GenerationOptions(max_tokens=asked), prompt_tokens)
    assert request.max_tokens == max_tokens


async def test_completion_is_clamped_to_the_kv_budget(serving: _Serving) -> None:
    """The KV budget bounds a completion; a prompt beyond it is left to admission to refuse."""
    cache = serving.served.model.cache
    serving.loop._snapshots.newest = LoopSnapshot(
        slot_count=2, kv_budget_bytes=cache.bytes_per_sequence + 30 * cache.bytes_per_token
    )
    options = GenerationOptions(max_tokens=80)
    (request,) = serving.submitted(options, 10)
    assert request.max_tokens == 20
    (request,) = serving.submitted(options, 40)
    assert request.max_tokens == 1


async def test_sampler_learns_the_end_tokens_that_min_tokens_holds_back(serving: _Serving) -> None:
    """Tokens that end the completion reach the sampler only where they are held back."""
    options = replace(OPTIONS, stop_token_ids=(7,))
    (plain,) = serving.submitted(options, 3)
    (held,) = serving.submitted(replace(options, sampling=SamplingParams(min_tokens=2)), 3)
    assert plain.sampling.end_token_ids == ()
    assert held.sampling.end_token_ids == tuple(sorted(held.stop_token_ids))
    assert 7 in held.stop_token_ids


async def test_completion_of_end_tokens_alone_cannot_be_held_open(serving: _Serving) -> None:
    """``min_tokens`` and ``allowed_token_ids`` that leave no token to choose are refused."""
    sampling = SamplingParams(allowed_token_ids=(7,), min_tokens=2)
    options = replace(OPTIONS, sampling=sampling, stop_token_ids=(7,))
    with pytest.raises(InvalidRequestError) as refusal:
        serving.submitted(options, 3)
    assert refusal.value.param == "min_tokens"


async def test_more_completions_than_allowed_are_refused(serving: _Serving) -> None:
    """``n`` up to ``limits.max_n`` is served, one more is a 400 about ``n``."""
    assert len(serving.submitted(replace(OPTIONS, n=3), 3)) == 3
    with pytest.raises(InvalidRequestError, match=r"limits\.max_n is 3") as refusal:
        serving.submitted(replace(OPTIONS, n=4), 3)
    assert refusal.value.param == "n"


async def test_a_request_that_could_never_be_queued_is_refused_for_good(serving: _Serving) -> None:
    """More sequences than slots and queue hold together are a 400, which clients do not retry, not a 429."""
    assert len(serving.submitted(replace(OPTIONS, n=2), 3, 3, 3)) == 6
    with pytest.raises(InvalidRequestError) as refusal:
        serving.submitted(replace(OPTIONS, n=3), 3, 3, 3)
    assert "9" in refusal.value.message
    assert "6" in refusal.value.message
    assert serving.messages() == []


async def test_a_given_seed_reproduces_and_its_choices_differ(serving: _Serving) -> None:
    """The same seed gives the same seeds, and no two choices of a prompt share one."""
    options = replace(OPTIONS, n=3, seed=42)
    first = [request.sampling.seed for request in serving.submitted(options, 3)]
    second = [request.sampling.seed for request in serving.submitted(options, 3)]

    assert first == second
    assert len(set(first)) == 3
    assert first[0] == 42


async def test_without_a_seed_every_request_draws_its_own(serving: _Serving) -> None:
    """Two requests that ask for no seed do not give the same answer."""
    seeds = [
        request.sampling.seed
        for _ in range(4)
        for request in serving.submitted(replace(OPTIONS, n=3), 3)
    ]
    assert len(set(seeds)) == 12


async def test_greedy_choices_are_equal_so_that_they_can_share(serving: _Serving) -> None:
    """Nothing is drawn at temperature 0: two identical requests differ in nothing that decodes."""
    greedy = replace(OPTIONS, n=2, sampling=SamplingParams(temperature=0.0))
    requests = [
        request
        for options in (greedy, replace(greedy, seed=42))
        for request in serving.submitted(options, 3)
    ]
    assert len({(request.prompt, request.sampling) for request in requests}) == 1


async def test_the_scheduler_learns_who_asks_and_how_urgently(serving: _Serving) -> None:
    """A sequence carries its request's id and its priority."""
    (plain,) = serving.submitted(OPTIONS, 3)
    (urgent,) = serving.submitted(replace(OPTIONS, priority="interactive"), 3)

    assert plain.request_id == "req"
    assert (plain.priority, urgent.priority) == (Priority.NORMAL, Priority.INTERACTIVE)


async def test_clients_and_salts_keep_prompts_apart(serving: _Serving) -> None:
    """Neither a decode nor a block is shared with another client, nor with another salt."""
    requests = [
        serving.submitted(replace(OPTIONS, cache_salt=salt), 3, client=client)[0]
        for client, salt in (("a", None), ("a", "b"), ("a", "c"), ("b", None), ("a", "b"))
    ]
    for name in ("namespace", "cache_namespace"):
        seen = [getattr(one, name) for one in requests]
        assert len(set(seen[:-1])) == 4
        assert seen[-1] == seen[1]


async def test_shared_prompts_are_kept_apart_by_salt_alone(serving: _Serving) -> None:
    """``cache.namespace`` is shared from one request to the next; decodes stay a client's own."""

    def namespaces(client: str, salt: str | None) -> SequenceRequest:
        (request,) = serving.submitted(replace(OPTIONS, cache_salt=salt), 3, client=client)
        return request

    before = namespaces("a", None)
    serving.open.set_limits(
        GenerationLimits(max_tokens_default=50, max_n=3, max_queue=4, shares_prefixes=True)
    )
    one, other, salted = namespaces("a", None), namespaces("b", None), namespaces("b", "s")
    assert one.cache_namespace == other.cache_namespace
    assert len({before.cache_namespace, one.cache_namespace, salted.cache_namespace}) == 3
    assert len({one.namespace, other.namespace, salted.namespace}) == 3


async def test_a_salt_is_in_no_repr() -> None:
    """What is logged of options by mistake tells no secret."""
    assert "s3cret" not in repr(replace(OPTIONS, cache_salt="s3cret"))


async def test_an_operator_s_requests_do_not_count_for_the_client(serving: _Serving) -> None:
    """They are let in beyond the client's limits, and leave it what it has."""
    serving.open.set_limits(
        GenerationLimits(
            max_tokens_default=50,
            max_n=3,
            max_queue=4,
            max_requests_per_key=1,
            max_tokens_per_minute_per_key=10,
        )
    )
    mine = replace(identity_of("mine"), is_limited=False)
    opened = [
        serving.service.open(
            [(1,) * 50],
            OPTIONS,
            replace(mine, generation_id=f"mine{number}"),
            prompt_param="prompt",
        )
        for number in range(3)
    ]
    for one in opened:
        serving.fanout.publish([admitted(f"{one.identity.generation_id}/0")])
    await asyncio.sleep(0)
    for one in opened:
        one.close()
    serving.messages()
    serving.submitted(OPTIONS, 3)
    with pytest.raises(KeyLimitError):
        serving.submitted(OPTIONS, 3)


async def test_stop_tokens_are_the_models_and_the_clients(serving: _Serving) -> None:
    """The end of text ends unless it is ignored; the client's own stop tokens always do."""
    (plain,) = serving.submitted(OPTIONS, 3)
    (own,) = serving.submitted(replace(OPTIONS, stop_token_ids=(7,)), 3)
    (ignoring,) = serving.submitted(replace(OPTIONS, stop_token_ids=(7,), ignore_eos=True), 3)

    assert plain.stop_token_ids == {256}
    assert own.stop_token_ids == {7, 256}
    assert ignoring.stop_token_ids == {7}


@pytest.mark.parametrize(
    ("state", "error_class"),
    [(State.DRAINING, DrainingError), (State.FAILED, EngineFaultError)],
)
async def test_no_work_is_taken_unless_ready(
    serving: _Serving, state: State, error_class: type[Exception]
) -> None:
    """The state decides before anything else is looked at."""
    serving.lifecycle.become(state)
    with pytest.raises(error_class):
        serving.submitted(OPTIONS, 3)
    assert serving.messages() == []


async def test_nothing_is_told_of_a_model_that_is_not_there() -> None:
    """While loading, and after a load that failed, the model's description is a 503."""
    serving = _Serving(is_ready=False)
    with pytest.raises(NotReadyError):
        _ = serving.served.model
    serving.loop.loaded.set_exception(ModelFormatError("corrupt"))
    with pytest.raises(NotReadyError):
        _ = serving.served.tokenizer
    serving.lifecycle.become(State.FAILED)
    with pytest.raises(EngineFaultError):
        _ = serving.served.front


async def test_a_closed_generation_is_forgotten_and_recorded(serving: _Serving) -> None:
    """Letting go aborts the sequences, frees their stream, and tells the observers once."""
    generation = serving.service.open(
        [(1, 2)], replace(OPTIONS, n=2), identity_of("g"), prompt_param="prompt"
    )
    assert len(serving.open) == 1
    serving.messages()
    serving.clock.advance(5)

    generation.close()
    generation.close()

    (abort,) = serving.messages()
    assert isinstance(abort, Abort)
    assert abort.sequence_ids == ("g/0", "g/1")
    assert (len(serving.open), len(serving.fanout)) == (0, 0)
    (record,) = serving.records.seen
    assert (record.prompt_tokens, record.duration_s) == (2, 905.0)
    assert record.finish_reason == "abort"


async def test_prompt_tokens_count_each_prompt_once(serving: _Serving) -> None:
    """Usage adds the prompts, not their choices, as OpenAI counts."""
    generation = serving.service.open(
        [(1,) * 3, (1,) * 4], replace(OPTIONS, n=2), identity_of("g"), prompt_param="prompt"
    )
    assert generation.usage.prompt_tokens == 7
    generation.close()


async def test_tokeniser_work_runs_beside_the_event_loop(serving: _Serving) -> None:
    """Its result and its errors come back; the thread is not the event loop's."""

    def name_of(*, suffix: str) -> str:
        return threading.current_thread().name + suffix

    assert (await serving.service.in_worker(name_of, suffix="!")).startswith("machd-tokeniser")
    with pytest.raises(ZeroDivisionError):
        await serving.service.in_worker(lambda: 1 // 0)
    serving.open.close()


async def test_time_without_a_model_is_no_preparation(
    serving: _Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that is asked of a suspended model is asked again once it is ready, with all the time there is."""
    monkeypatch.setattr("machd.generations.open_generations._PREPARATION_LIMIT_S", 0.2)
    constraint = Constraint(ConstraintKind.REGEX, "a", "p")
    happened: list[str] = []

    class _Suspended:
        def is_separate(self, _constraint: Constraint) -> bool:
            return False

        def compile(
            self, constraint: Constraint, *, is_wanted: Callable[[], bool] = lambda: True
        ) -> Grammar:
            del is_wanted
            happened.append("asked")
            if len(happened) == 1:
                raise ModelSuspendedError
            return Grammar(constraint.source, constraint)

    async def until_ready() -> None:
        happened.append("ready")
        await asyncio.sleep(0.3)

    monkeypatch.setattr(ServedModel, "grammars", _Suspended())
    service = GenerationService(
        served=serving.served, fanout=serving.fanout, open_=serving.open, until_ready=until_ready
    )

    grammar = await service.compile(constraint, client="a")

    assert grammar.constraint is constraint
    assert happened == ["asked", "ready", "asked"]


async def test_draining_an_idle_service_is_done_at_once(serving: _Serving) -> None:
    """With nothing open there is nothing to wait for, whatever the timeout."""
    assert await serving.open.drain(60.0)


async def test_draining_waits_for_the_open_generations(serving: _Serving) -> None:
    """It ends with the last one, without touching any."""
    generations = [
        serving.service.open([(1,)], OPTIONS, identity_of(f"g{number}"), prompt_param="prompt")
        for number in range(2)
    ]
    serving.messages()
    draining = asyncio.create_task(serving.open.drain(60.0))
    for generation in generations:
        await asyncio.sleep(0)
        assert not draining.done()
        serving.fanout.publish(
            [finished(one, FinishReason.STOP) for one in generation.sequence_ids]
        )
        async for _ in generation.deltas(idle_s=30):
            pass
        generation.close()

    assert await asyncio.wait_for(draining, 10)
    assert serving.messages() == []


async def test_draining_ends_what_outlasts_the_deadline(serving: _Serving) -> None:
    """After the timeout every open generation fails with the deadline's error and is aborted."""
    generation = serving.service.open([(1,)], OPTIONS, identity_of("g"), prompt_param="prompt")
    serving.messages()

    assert not await serving.open.drain(0.01)

    with pytest.raises(DrainDeadlineError, match=r"limits\.drain_timeout_s"):
        await generation.admitted()
    (abort,) = serving.messages()
    assert isinstance(abort, Abort)
    assert abort.sequence_ids == ("g/0",)
    assert isinstance(abort.error, DrainDeadlineError)


async def test_a_service_drains_again_after_new_work(serving: _Serving) -> None:
    """A drain that was cancelled or resumed leaves no stale mark behind."""
    serving.service.open([(1,)], OPTIONS, identity_of("a"), prompt_param="prompt").close()
    assert await serving.open.drain(60.0)
    open_one = serving.service.open([(1,)], OPTIONS, identity_of("b"), prompt_param="prompt")
    assert not await serving.open.drain(0.01)
    open_one.close()
    assert await serving.open.drain(60.0)


# Images and videos


def _looking(images: int) -> Conversation:
    parts = [
        {"type": "image", MEDIA_KEY: MediaSource(MediaKind.IMAGE, f"part {index}", content=b"x")}
        for index in range(images)
    ]
    return Conversation([{"role": "user", "content": parts}])


async def test_a_text_model_refuses_images_by_the_field_of_the_first(serving: _Serving) -> None:
    """The message says that the model is the reason, and what to serve or to send instead."""
    with pytest.raises(UnsupportedParameterError, match=r"takes text only.*or send text") as caught:
        await serving.service.prepare(_looking(2))
    assert caught.value.param == "part 0"
    assert (await serving.service.prepare(Conversation([{"role": "user", "content": "a"}]))).prompt


async def test_a_vision_model_takes_images_up_to_their_limit(
    serving: _Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``vision.max_images`` counts those of the whole request and can change while it runs."""
    monkeypatch.setattr(ModelDescription, "vision", object(), raising=False)
    # The fake engine has no processor, so a request within the limit comes as far as that.
    with pytest.raises(AssertionError, match="the model takes images"):
        await serving.service.prepare(_looking(8))
    with pytest.raises(InvalidRequestError, match=r"9 images .* vision\.max_images is 8") as caught:
        await serving.service.prepare(_looking(9))
    assert caught.value.param == "part 8"
    serving.open.set_limits(
        GenerationLimits(max_tokens_default=50, max_n=3, max_queue=4, max_images=0)
    )
    with pytest.raises(InvalidRequestError) as caught:
        await serving.service.prepare(_looking(1))
    assert caught.value.param == "part 0"


# What one client may have


def _key_limits(requests: int | None = None, tokens: int | None = None) -> GenerationLimits:
    return GenerationLimits(
        max_tokens_default=50,
        max_n=3,
        max_queue=4,
        max_requests_per_key=requests,
        max_tokens_per_minute_per_key=tokens,
    )


def _open(
    serving: _Serving, generation_id: str, *, client: str = "alice", prompt: int = 3
) -> Generation:
    return serving.service.open(
        [(1,) * prompt],
        OPTIONS,
        replace(identity_of(generation_id), client=client),
        prompt_param="prompt",
    )


async def test_a_client_s_generations_are_counted_until_they_close(serving: _Serving) -> None:
    """Beyond the limit 429; one that closes makes room, once, however often it is closed."""
    serving.open.set_limits(_key_limits(requests=1))
    first = _open(serving, "one")
    with pytest.raises(KeyLimitError):
        _open(serving, "two")
    _open(serving, "other", client="bob")
    assert len(serving.open) == len(serving.fanout) == 2

    first.close()
    first.close()
    _open(serving, "three")
    with pytest.raises(KeyLimitError):
        _open(serving, "four")


async def test_tokens_are_charged_as_they_come(serving: _Serving) -> None:
    """The prompt with its slot, each completion token as it is made, what was only asked for never."""
    serving.open.set_limits(_key_limits(tokens=6))
    generation = _open(serving, "gen")
    serving.service.check_client("alice")

    serving.fanout.publish([admitted("gen/0"), *tokens("gen/0", "ab")])
    await anext(generation.deltas(idle_s=5))
    serving.service.check_client("alice")
    serving.fanout.publish([token("gen/0", ord("c"))])
    await anext(generation.deltas(idle_s=5))
    with pytest.raises(KeyLimitError) as refused:
        serving.service.check_client("alice")
    assert refused.value.retry_after_s == 1

    generation.close()
    serving.clock.advance(60)
    _open(serving, "next")


async def test_what_nobody_reads_is_charged(serving: _Serving) -> None:
    """A client that lets the engine work and never looks pays for all that was made for it."""
    serving.open.set_limits(_key_limits(tokens=60))
    unread = _open(serving, "unread")
    made = MAX_PENDING_EVENTS + 97  # some beyond what a stream keeps
    serving.fanout.publish([admitted("unread/0"), *(token("unread/0", 97) for _ in range(made))])
    await asyncio.sleep(0)
    unread.close()

    with pytest.raises(KeyLimitError) as refused:
        serving.service.check_client("alice")
    assert refused.value.retry_after_s == 3 + made - 60 + 1


async def test_what_was_made_beyond_a_stop_text_is_charged(serving: _Serving) -> None:
    """A slow reader finds its stop text late, and pays for what the engine made until then."""
    serving.open.set_limits(_key_limits(tokens=60))
    options = replace(OPTIONS, stop=("b",))
    identity = replace(identity_of("gen"), client="alice")
    generation = serving.service.open([(1,)], options, identity, prompt_param="prompt")
    serving.fanout.publish([admitted("gen/0"), *tokens("gen/0", "ab" + "c" * 97)])
    await anext(generation.deltas(idle_s=5))
    generation.close()

    assert generation.usage.completion_tokens == 2
    with pytest.raises(KeyLimitError) as refused:
        serving.service.check_client("alice")
    assert refused.value.retry_after_s == 100 - 60 + 1


async def test_a_prompt_costs_nothing_before_it_has_a_slot(serving: _Serving) -> None:
    """Whoever is turned away, or leaves while it waits, has used nothing, however often it comes."""
    serving.open.set_limits(_key_limits(tokens=60))
    for number in range(5):
        rejected = _open(serving, f"full{number}", prompt=90)
        full = finished(f"full{number}/0", FinishReason.ERROR, QueueFullError("full"))
        serving.fanout.publish([full])
        with pytest.raises(QueueFullError):
            await rejected.admitted()
        rejected.close()
        _open(serving, f"left{number}", prompt=90).close()
    serving.service.check_client("alice")

    _open(serving, "late", prompt=90)
    serving.fanout.publish([admitted("late/0")])
    await asyncio.sleep(0)
    (late,) = serving.open.all
    late.close()
    with pytest.raises(KeyLimitError) as refused:
        serving.service.check_client("alice")
    assert refused.value.retry_after_s == 90 - 60 + 1


async def test_each_prompt_is_charged_once(serving: _Serving) -> None:
    """However many completions it gets, and however many of them have a slot."""
    serving.open.set_limits(_key_limits(tokens=10))
    generation = serving.service.open(
        [(1,) * 5, (1,) * 10],
        replace(OPTIONS, n=2),
        replace(identity_of("gen"), client="alice"),
        prompt_param="prompt",
    )
    serving.fanout.publish([admitted(f"gen/{number}") for number in range(4)])
    await generation.admitted()
    generation.close()

    with pytest.raises(KeyLimitError) as refused:
        serving.service.check_client("alice")
    assert refused.value.retry_after_s == (15 - 10) * 60 // 10 + 1


async def test_a_request_that_is_refused_is_not_charged(serving: _Serving) -> None:
    """One that could not begin costs nothing, whatever its prompt."""
    serving.open.set_limits(_key_limits(requests=1, tokens=10))
    for _ in range(3):
        with pytest.raises(ContextLengthExceededError):
            _open(serving, "long", prompt=CONTEXT_TOKENS + 1)
    _open(serving, "short")


async def test_a_change_of_limits_forgets_nothing(serving: _Serving) -> None:
    """Generations that are open and tokens that were used count against new limits."""
    serving.open.set_limits(_key_limits(requests=5, tokens=50))
    generation = _open(serving, "gen", prompt=50)
    serving.fanout.publish([admitted("gen/0")])
    await generation.admitted()

    serving.open.set_limits(_key_limits(requests=5, tokens=40))
    with pytest.raises(KeyLimitError):
        serving.service.check_client("alice")
    serving.open.set_limits(_key_limits(requests=1, tokens=None))
    with pytest.raises(KeyLimitError):
        serving.service.check_client("alice")
    serving.open.set_limits(_key_limits())
    serving.service.check_client("alice")
