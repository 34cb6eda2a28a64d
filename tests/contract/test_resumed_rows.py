"""A suspended sequence goes on from its tokens as if nothing had happened, whatever it asked for, on every engine; so does one whose engine died."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.engines.constrained_rows import grammar_of, schema_grammar
from support.engines.fake_engine import FakeEngine
from support.every_run import sampled
from support.schedulers.sequence_samples import LIMITS, EagerPace, batching_of, outputs_of, run_step

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import (
    DecodeRow,
    PrefillChunk,
    SampledToken,
    ScoredPrompt,
    StepPlan,
    StepResult,
)
from machd.errors import EngineFaultError
from machd.request.constraint import ConstraintKind
from machd.request.generation import SamplingParams, Thinking
from machd.scheduler.config import DraftPolicy, SchedulerConfig, continuous, single_flight
from machd.scheduler.events import (
    OutputGenerated,
    PromptLookedUp,
    SequenceAdmitted,
    SequenceFinished,
    SequenceResumed,
    SequenceStarted,
    SuspendReason,
)
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import Resumption, SequenceRequest
from machd.scheduler.suspensions import MemoryYield

_MAX_TOKENS = 24
_ROWS = 16
_STEPS = st.sets(st.integers(0, 45), max_size=6)
_NAME = {"type": "string", "minLength": 7, "maxLength": 9}
_SCHEMA = {"type": "object", "properties": {"name": _NAME}, "required": ["name"]}
_BATCHED = continuous(LIMITS, batching_of(max_b=_ROWS, prefill_chunk_tokens=8))


@dataclass
class _Answer:
    """The events of one sequence.

    Attributes:
        counts: Of the events that are told once.
    """

    tokens: list[SampledToken] = field(default_factory=list)
    scored: list[ScoredPrompt] = field(default_factory=list)
    finished: tuple[object, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    resumed: list[SequenceResumed] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its tokens, without what was told of them."""
        return tuple(one.token_id for one in self.tokens)

    def hear(self, event: object) -> None:
        """Take an event in."""
        match event:
            case OutputGenerated(_, SampledToken() as token):
                self.tokens.append(token)
            case OutputGenerated(_, ScoredPrompt() as scored):
                self.scored.append(scored)
            case SequenceResumed():
                self.resumed.append(event)
            case SequenceFinished():
                stop = event.stop_token and event.stop_token.token_id
                self.finished = event.reason, event.error, event.completion_tokens, stop
            case _:
                name = type(event).__name__
                # Before its first token a sequence is told of each slot.
                is_again = isinstance(event, SequenceAdmitted) and not self.tokens
                self.counts[name] = 1 if is_again else self.counts.get(name, 0) + 1

    @property
    def said(self) -> tuple[object, ...]:
        """All that has to be as if nothing had happened; the slot may be another one."""
        tokens = [structs.replace(one, slot_index=0) for one in self.tokens]
        scores = [one.logprobs for one in self.scored[-1:]]
        return tokens, scores, self.finished, self.counts


_Process = tuple[Scheduler, Engine]


_TOLD = (
    SequenceAdmitted, SequenceResumed, SequenceStarted, OutputGenerated, SequenceFinished,
)  # fmt: skip


def _answers(
    engine: Engine,
    scheduler: Scheduler,
    requests: Sequence[SequenceRequest],
    suspended: Collection[int] = (),
    reason: SuspendReason = SuspendReason.CONFIG,
    restart: Callable[[], _Process] | None = None,
) -> dict[str, _Answer]:
    """Run requests to their ends, and suspend what runs before some of the steps: all, or the youngest for memory.

    With ``restart`` the scheduler and the engine are thrown away instead, with what every second step had said, and
    all that is open goes on in others.
    """
    answers = {one.sequence_id: _Answer() for one in requests}
    for one in requests:
        scheduler.submit((one,), 0.0)
    step = 0
    while scheduler.running_count + scheduler.waiting_count or not scheduler.plan().is_empty:
        if step in suspended and restart is not None:
            if step % 2:
                run_step(scheduler, engine, 0.0)
            scheduler, engine = restart()
            _submit_again(scheduler, requests, answers, are_suspects=step % 3 == 0)
        elif step in suspended:
            _suspend(scheduler, engine, reason)
        for event in run_step(scheduler, engine, 0.0):
            if isinstance(event, _TOLD):
                answers[event.sequence_id].hear(event)
        scheduler.check_invariants()
        step += 1
        assert step < 2000, "it comes to an end"
    return answers


def _submit_again(
    scheduler: Scheduler,
    requests: Sequence[SequenceRequest],
    answers: dict[str, _Answer],
    *,
    are_suspects: bool,
) -> None:
    for one in requests:
        answer = answers[one.sequence_id]
        if not answer.finished:
            former = Resumption(answer.token_ids, is_group_started=True, is_suspect=are_suspects)
            scheduler.submit((replace(one, resumption=former),), 0.0)


def _suspend(scheduler: Scheduler, engine: Engine, reason: SuspendReason) -> None:
    if reason is SuspendReason.CONFIG:
        scheduler.suspend()
    elif reason is SuspendReason.FAULT:
        if not any(one.is_suspect for one in scheduler._running):  # it would be to blame
            scheduler.survive(EngineFaultError("planted"), 0.0)
            engine.reset()
    elif scheduler.active_loops > 1:
        while scheduler.yield_memory(1, 0.0)[0] is MemoryYield.BLOCKS:
            pass


@pytest.fixture(
    name="engine_kind", params=["fake", "mlx", pytest.param("ahead", marks=pytest.mark.long)]
)
def _engine_kind(request: pytest.FixtureRequest) -> str:
    """MLX as it is on the CPU, and looking ahead as on a GPU, there with a real tokenizer."""
    kind: str = request.param
    return kind


def _mlx_engine(engine_kind: str, request: pytest.FixtureRequest) -> Engine:
    from support.engines.tiny_engines import native_llama  # noqa: PLC0415 - imports mlx

    from machd.engine.assembly import make_engine  # noqa: PLC0415 - the same

    looks_ahead = engine_kind == "ahead"
    model = request.getfixturevalue("short_model") if looks_ahead else native_llama()
    return make_engine(model, max_rows=_ROWS, looks_ahead=looks_ahead)


@pytest.fixture(name="engine")
def _engine(engine_kind: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine with no rows."""
    engine = FakeEngine() if engine_kind == "fake" else _mlx_engine(engine_kind, request)
    yield engine
    engine.close()


@pytest.fixture(name="successor")
def _successor(engine_kind: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Another engine of the same kind, as a new engine process has it."""
    engine = FakeEngine() if engine_kind == "fake" else _mlx_engine(engine_kind, request)
    yield engine
    engine.close()


def _kinds(engine: Engine) -> dict[str, SamplingParams]:
    """Each thing that depends on what a row said before."""
    ends = tuple(sorted(engine.model.eos_token_ids))
    word = grammar_of(engine, ConstraintKind.REGEX, "(yes|no), ([a-z]{2,8} ){3,9}never")
    closing = tuple(engine.tokenizer.encode("</think>", add_special_tokens=False))
    thinking = Thinking((), closing, is_open=True, budget_tokens=7)
    return {
        "greedy": SamplingParams(temperature=0.0),
        "seeded": SamplingParams(temperature=1.0, seed=5),
        "penalised": SamplingParams(
            temperature=1.0,
            seed=6,
            repetition_penalty=1.3,
            frequency_penalty=0.7,
            presence_penalty=0.4,
        ),
        "biased": SamplingParams(temperature=1.0, seed=4, logit_bias=((70, 4.0), (71, -9.0))),
        "held open": SamplingParams(temperature=1.2, seed=7, min_tokens=9, end_token_ids=ends),
        "logprobs": SamplingParams(temperature=0.0, top_logprobs=3),
        "scored": SamplingParams(temperature=0.0, prompt_logprobs=2),
        "schema": SamplingParams(temperature=1.0, seed=8, grammar=schema_grammar(engine, _SCHEMA)),
        "regex": SamplingParams(temperature=1.0, seed=9, grammar=word),
        "scripted": SamplingParams(temperature=0.0, forced_token_ids=(65, 66, 67, 68)),
        "thoughts": SamplingParams(temperature=0.0, thinking=thinking, grammar=word),
    }


def _requests(
    engine: Engine, kinds: Collection[str], max_tokens: int = _MAX_TOKENS
) -> list[SequenceRequest]:
    made = _kinds(engine)
    return [
        SequenceRequest(
            sequence_id=name,
            group_id=name,
            prompt=tuple(40 + (place * 7 + at) % 60 for at in range(5 + 4 * place)),
            sampling=made[name],
            max_tokens=max_tokens,
            stop_token_ids=engine.model.eos_token_ids,
            arrived_s=0.0,
        )
        for place, name in enumerate(made)
        if name in kinds
    ]


_ALL = (
    "greedy", "seeded", "penalised", "biased", "held open", "logprobs", "scored", "schema", "regex", "scripted", "thoughts",
)  # fmt: skip


def _on_each_engine(kinds: Collection[str]) -> pytest.MarkDecorator:
    """Each kind of row on each engine; every run has all on the fake engine, and on MLX those that draw and follow."""
    cases = list(product(("fake", "mlx", "ahead"), kinds))
    every_run = [*(one for one in cases if one[0] == "fake"), ("mlx", "seeded"), ("mlx", "regex")]
    return pytest.mark.parametrize(
        ("engine_kind", "kind"), sampled(cases, every_run), indirect=["engine_kind"]
    )


@_on_each_engine([one for one in _ALL if one != "biased"])  # a bias has no state
def test_a_sequence_suspended_after_any_token_ends_as_if_it_never_had_been(
    engine: Engine, kind: str
) -> None:
    """Same tokens, log-probabilities and end; each event that is told once is told once."""
    requests = _requests(engine, [kind])
    (undisturbed,) = _answers(engine, Scheduler(_BATCHED), requests).values()
    length = len(undisturbed.tokens)
    assert length > 3, "there is something to suspend"
    resumed = list[SequenceResumed]()
    stride = 1 if isinstance(engine, FakeEngine) else 4
    for suspended in [*range(2, length + 9, stride), range(3, 60, 5)]:
        steps = {suspended} if isinstance(suspended, int) else set(suspended)
        (answer,) = _answers(engine, Scheduler(_BATCHED), requests, steps).values()
        assert answer.said == undisturbed.said, suspended
        resumed += answer.resumed
    assert resumed, "it was resumed behind tokens"


@_on_each_engine(_ALL)
def test_a_request_whose_engine_died_after_any_token_ends_as_if_it_never_had(
    engine: Engine, successor: Engine, kind: str
) -> None:
    """Another engine adds the same tokens, log-probabilities and end, and tells again only that it has a slot."""
    (request,) = _requests(engine, [kind])
    (undisturbed,) = _answers(engine, Scheduler(_BATCHED), [request]).values()
    tokens, length = undisturbed.tokens, len(undisturbed.tokens)
    is_fake = isinstance(engine, FakeEngine)
    for count in range(length) if is_fake else sorted({0, 1, length // 2, length - 1}):
        former = Resumption(undisturbed.token_ids[:count], is_group_started=True)
        again = replace(request, resumption=former)
        (answer,) = _answers(successor, Scheduler(_BATCHED), [again]).values()
        assert [*tokens[:count], *answer.tokens] == tokens, count
        assert answer.finished == undisturbed.finished, count
        if count:
            (resumed,) = answer.resumed
            assert (resumed.reason, resumed.completion_tokens) == (SuspendReason.RESTART, count)
            assert not answer.counts
            assert not answer.scored
        else:
            assert answer.said == undisturbed.said, (
                "before the first token it is told of everything"
            )


def test_sequences_suspended_together_end_as_if_they_never_had_been(engine: Engine) -> None:
    """Rows of every kind in one batch are suspended before, amid and behind their first tokens, and at last two times in a row."""
    requests = _requests(engine, _ALL)
    undisturbed = _answers(engine, Scheduler(_BATCHED), requests)
    answers = _answers(engine, Scheduler(_BATCHED), requests, {3, 9, 18, 19})
    assert all(answers[name].resumed for name in ("greedy", "seeded", "schema", "regex"))
    for name, answer in answers.items():
        assert answer.said == undisturbed[name].said, name


def test_requests_together_go_on_in_another_engine_process(
    engine: Engine, successor: Engine
) -> None:
    """Rows of every kind, three choices of one request among them, through processes that die one after another."""
    requests = _requests(engine, _ALL)
    choice = next(one for one in requests if one.sequence_id == "seeded")
    requests += [
        replace(choice, sequence_id=f"choice {seed}", group_id="choices", sampling=sampling)
        for seed in range(3)
        for sampling in [replace(choice.sampling, seed=seed, top_logprobs=1)]
    ]
    undisturbed = _answers(engine, Scheduler(_BATCHED), requests)
    engines = [engine, successor]

    def restart() -> _Process:
        engines.reverse()
        engines[0].reset(max_rows=_ROWS)
        return Scheduler(_BATCHED), engines[0]

    answers = _answers(engine, Scheduler(_BATCHED), requests, {4, 9, 13, 14}, restart=restart)
    assert any(answer.resumed for answer in answers.values())
    for name, answer in answers.items():
        assert answer.said == undisturbed[name].said, name


@given(steps=_STEPS, reason=st.sampled_from(SuspendReason), chunk_tokens=st.integers(3, 70))
def test_sequences_of_every_kind_together_are_resumed_as_they_were(
    steps: set[int], reason: SuspendReason, chunk_tokens: int
) -> None:
    """Whenever, for whatever reason, however their texts are cut into chunks, with a prefix cache and drafts: on the fake engine."""

    def process() -> _Process:
        engine = FakeEngine()
        engine.draft_script = lambda position, limit: (min(3, limit), min(position % 4, 3, limit))
        return Scheduler(_drafting(chunk_tokens), _prefixes()), engine

    scheduler, engine = process()
    requests = _requests(engine, _ALL)
    undisturbed = _answers(FakeEngine(), Scheduler(_BATCHED), requests)
    restart = process if reason is SuspendReason.RESTART else None
    answers = _answers(engine, scheduler, requests, steps, reason, restart)
    for name, answer in answers.items():
        assert answer.said == undisturbed[name].said, name


def _drafting(chunk_tokens: int) -> SchedulerConfig:
    batching = batching_of(max_b=_ROWS, prefill_chunk_tokens=chunk_tokens)
    drafts = DraftPolicy(max_draft_tokens=3, is_batched=True)
    config = continuous(LIMITS, batching, drafts)
    return replace(config, pace=EagerPace(beside_decode=chunk_tokens, alone=chunk_tokens))


def _prefixes() -> PrefixCache:
    return PrefixCache(PrefixConfig(b"fake", 8, BlockCosts(10)), PrefixLimits(max_bytes=1_000_000))


def test_what_was_computed_is_found_again_and_told_once() -> None:
    """With a prefix cache a resumed row begins with its own blocks; usage keeps what the prompt found at first."""
    engine, scheduler = FakeEngine(), Scheduler(_BATCHED, _prefixes())
    (request,) = _requests(engine, ["regex"])
    scheduler.submit((request,), 0.0)
    events = [event for _ in range(12) for event in run_step(scheduler, engine, 0.0)]
    scheduler.suspend()
    before = scheduler.prefix_reading
    run_step(scheduler, engine, 0.0)
    scheduler.admit(0.0)
    (chunk,) = scheduler.plan().prefill
    assert chunk.resumed_tokens > 0
    assert chunk.reused is not None, "its blocks are there"
    assert (
        len(chunk.reused.token_ids) + len(chunk.token_ids)
        == len(request.prompt) + chunk.resumed_tokens
    )
    while scheduler.running_count + scheduler.waiting_count:
        events += run_step(scheduler, engine, 0.0)
    after = scheduler.prefix_reading
    assert before is not None
    assert after is not None
    assert (after.queries, after.hits) == (before.queries, before.hits), "of prompts"
    (looked_up,) = (one for one in events if isinstance(one, PromptLookedUp))
    assert looked_up.diagnosis.cached_tokens == 0
    (finished,) = (one for one in events if isinstance(one, SequenceFinished))
    assert finished.cached_tokens == 0


def test_rows_of_another_lane_go_on_alike(engine: Engine) -> None:
    """Half in a batch, half one at a time: what a change of mode does."""
    requests = _requests(engine, ["greedy", "seeded", "penalised", "schema"])
    undisturbed = _answers(engine, Scheduler(_BATCHED), requests)
    scheduler = Scheduler(_BATCHED)
    answers = {one.sequence_id: list[int]() for one in requests}
    for one in requests:
        scheduler.submit((one,), 0.0)
    for step in range(500):
        if step == 9:
            scheduler.hold_admission()
            scheduler.suspend()
        elif step == 10:
            assert scheduler.is_at_rest, "within two steps"
            engine.reset(max_rows=1)
            assert scheduler.apply_config(single_flight(LIMITS), 0.0) == []
        events = run_step(scheduler, engine, 0.0)
        for name, said in answers.items():
            said += [one.token_id for one in outputs_of(SampledToken, events, name)]
    for name, answer in undisturbed.items():
        assert answers[name] == [one.token_id for one in answer.tokens]


class _Planted(FakeEngine):
    """An engine that opens resumed rows wrongly."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def _spoilt(self, chunk: PrefillChunk) -> PrefillChunk:
        if not chunk.resumed_tokens:
            return chunk
        match self.fault:
            case "a draw at the wrong position":
                return replace(chunk, resumed_tokens=chunk.resumed_tokens - 1)
            case "a matcher that restarts":
                return replace(chunk, resumed_tokens=0)
            case _:
                return chunk

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan whose chunks say less of what the rows had said, or tell another first token."""
        spoilt = tuple(map(self._spoilt, plan.prefill))
        result = super().run(replace(plan, prefill=spoilt))
        if not any(one.resumed_tokens and one.is_last for one in plan.prefill):
            return result
        match self.fault:
            case "a token sent twice":
                before = plan.prefill[-1].token_ids[-1]
                token = structs.replace(result.tokens[0], token_id=before)
                return replace(result, outputs=(token,))
            case "a token lost":
                behind = super().run(StepPlan(decode=(DecodeRow(plan.prefill[-1].slot_index),)))
                return replace(result, outputs=behind.outputs)
            case _:
                return result


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("a draw at the wrong position", "seeded"),
        ("a matcher that restarts", "regex"),
        ("a token sent twice", "seeded"),
        ("a token lost", "seeded"),
    ],
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_fault_at_the_seam_is_noticed(fault: str, kind: str, *, is_restarted: bool) -> None:
    """The comparison above fails for an engine that does not go on where it, or another one, was."""
    requests = _requests(FakeEngine(), [kind])
    (undisturbed,) = _answers(FakeEngine(), Scheduler(_BATCHED), requests).values()
    restart = (lambda: (Scheduler(_BATCHED), _Planted(fault))) if is_restarted else None
    (answer,) = _answers(
        _Planted(fault), Scheduler(_BATCHED), requests, {9}, restart=restart
    ).values()
    assert answer.resumed
    assert answer.said != undisturbed.said


@pytest.mark.parametrize("is_restarted", [False, True])
def test_prompt_lookup_goes_on_over_what_was_said(*, is_restarted: bool) -> None:
    """Drafts of a resumed row come from prompt and completion; its tokens are as without."""
    from support.engines.tiny_engines import native_llama  # noqa: PLC0415 - imports mlx

    from machd.engine.assembly import make_engine  # noqa: PLC0415 - the same
    from machd.engine.speculation.ngram import NgramProposer  # noqa: PLC0415 - the same

    engine = make_engine(native_llama(), max_rows=_ROWS, proposer=NgramProposer())
    try:
        requests = _requests(engine, ["greedy", "seeded", "schema"])
        undisturbed = _answers(engine, Scheduler(_BATCHED), requests)

        def restart() -> _Process:
            engine.reset(max_rows=_ROWS)
            return Scheduler(_drafting(8)), engine

        answers = _answers(
            engine,
            Scheduler(_drafting(8)),
            requests,
            {6, 11, 12},
            restart=restart if is_restarted else None,
        )
        for name, answer in answers.items():
            assert answer.said == undisturbed[name].said
    finally:
        engine.close()
