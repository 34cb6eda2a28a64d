"""A Hypothesis machine of the serving loop: it plays any history on a scripted engine, and keeps a plain record.

The record says what the scheduler may emit, and what slots, queue and KV budget must come to.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from msgspec import structs

from machd.engine.protocol.slab_size import slab_rows
from machd.engine.protocol.step import (
    DecodeRow,
    Lane,
    PrefillChunk,
    RowOutput,
    SampledToken,
    ScoredPrompt,
    StepPlan,
    StepResult,
)
from machd.errors import (
    ClientDisconnectedError,
    EngineFaultError,
    KvBudgetExceededError,
    KvBudgetSpentError,
    MachdError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
    RowFaultError,
)
from machd.request.constraint import ConstraintKind
from machd.request.generation import Grammar, SamplingParams
from machd.scheduler.admission import Batching, KvBudget, KvPolicy
from machd.scheduler.coalesce import CoalescingKey, is_shareable, key_of
from machd.scheduler.config import (
    NO_DRAFTS,
    DraftPolicy,
    SchedulerConfig,
    continuous,
    single_flight,
)
from machd.scheduler.draft_reading import DraftReading
from machd.scheduler.events import (
    DecodeMode,
    DecodeModeChanged,
    EngineFaulted,
    Event,
    FinishReason,
    InvariantBroken,
    OutputGenerated,
    PromptLookedUp,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
    SequenceResumed,
    SequenceStarted,
    StepCompleted,
)
from machd.scheduler.pacing import PREFILL_SHARE
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import Priority, Resumption, SequenceRequest
from machd.scheduler.waiting import QueueLimits
from support.clocks.manual_clock import ManualClock
from support.engines.constrained_rows import grammar_of
from support.engines.fake_engine import FakeEngine, FakeFaults, lettered
from support.engines.scripted_drafts import drafts_by
from support.schedulers.sequence_samples import END_OF_TEXT, LateFirstToken, drafting_eagerly

LIMITS = QueueLimits(max_queue=5, max_queue_tokens=40, queue_timeout_s=10.0, request_timeout_s=25.0)
OTHER_LIMITS = (
    LIMITS,
    QueueLimits(max_queue=1, max_queue_tokens=5, queue_timeout_s=10.0, request_timeout_s=25.0),
    QueueLimits(max_queue=9, max_queue_tokens=90, queue_timeout_s=5.0, request_timeout_s=12.0),
)
STOP_TOKENS = frozenset([*b"ae", END_OF_TEXT])
"""The scripted engine says letters, so about one token in thirteen ends a sequence."""

GRAMMAR = grammar_of(FakeEngine(), ConstraintKind.REGEX, "[f-z]{2}(much|hourly)[0-9]{2}")
"""With tokens of its own choice, forced tokens behind them, and an end."""

DELAY_S = {Priority.INTERACTIVE: 0.0, Priority.NORMAL: 15.0, Priority.BATCH: 60.0}
REFUSALS = (QueueFullError, KvBudgetExceededError, KvBudgetSpentError)
PER_SEQUENCE_BYTES = 3


@dataclass
class Record:
    """The machine's record of one sequence."""

    number: int
    request: SequenceRequest
    work: int = -1  # the number of the one whose sequence it reads
    is_queued: bool = False
    admitted: SequenceAdmitted | None = None
    is_suspended: bool = False
    has_run: bool = False
    has_resumed: bool = False
    started: SequenceStarted | None = None
    tokens: list[int] = field(default_factory=list)
    scored: ScoredPrompt | None = None
    finished: SequenceFinished | None = None

    @property
    def is_waiting(self) -> bool:
        """Accepted, and without a slot, and not ended."""
        has_slot = self.admitted is not None and not self.is_suspended
        return self.is_queued and not has_slot and self.finished is None

    @property
    def is_running(self) -> bool:
        """Admitted, not suspended and not ended."""
        return self.admitted is not None and not self.is_suspended and self.finished is None

    @property
    def reserved_tokens(self) -> int:
        """Reserved positions of its sequence."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def due_s(self) -> float:
        """Its own place in the queue."""
        return self.request.arrived_s + DELAY_S[self.request.priority]


SIZES = st.tuples(
    st.sampled_from([1, 2, 3, 9, 12]),  # prompt tokens; few kinds, so that duplicates are common
    st.sampled_from([0, 1, 8, 12]),
    st.sampled_from([0.0, 0.0, 1.0]),  # temperature
    st.sampled_from([0, 0, 1]),  # seed
    st.sampled_from([None, None, None, 0, 2]),  # log-probabilities of the prompt
    st.sampled_from([None, None, None, GRAMMAR]),
)


def expected_token(request: SequenceRequest, position: int) -> int:
    """Return the token that the scripted engine generates for a request there, whatever happens to it."""
    prompt, sampling = request.prompt, request.sampling
    if sampling.grammar is None:
        return lettered(prompt, sampling, position)
    return _tokens_alone(prompt, sampling, request.max_tokens)[position]


@cache
def _tokens_alone(
    prompt: tuple[int, ...], sampling: SamplingParams, max_tokens: int
) -> tuple[int, ...]:
    """Tokens of a row that is never disturbed, up to its end."""
    engine = FakeEngine()
    chunk = PrefillChunk(
        0, prompt, 0, is_last=True, sampling=sampling, reserved_tokens=len(prompt) + max_tokens
    )
    result = engine.run(StepPlan(prefill=(chunk,)))
    tokens = [one.token_id for one in result.tokens]
    while len(tokens) < max_tokens and tokens[-1] != END_OF_TEXT:
        result = engine.run(StepPlan(decode=(DecodeRow(0),)))
        tokens += [one.token_id for one in result.tokens]
    return tuple(tokens)


BATCHINGS = st.builds(
    lambda max_b, window_s, chunk_tokens, coalesce, policy, budget_tokens, has_classes: Batching(
        max_b,
        window_s,
        chunk_tokens,
        coalesce,
        # A row of these takes the 256 columns of the first length class.
        KvBudget(
            budget_tokens * 10 * (20 if has_classes else 1),
            10,
            PER_SEQUENCE_BYTES,
            policy,
            has_classes,
        ),
        prefill_share=PREFILL_SHARE,
    ),
    max_b=st.sampled_from([1, 2, 3, 4, 4]),
    window_s=st.sampled_from([0.0, 0.0, 1.0]),
    chunk_tokens=st.sampled_from([None, 1, 4]),
    coalesce=st.booleans(),
    policy=st.sampled_from(list(KvPolicy)),
    budget_tokens=st.sampled_from([12, 24, 40, 60, 60, 1000]),
    has_classes=st.booleans(),
)
ALONE = Batching(
    max_b=1,
    window_s=0.0,
    prefill_chunk_tokens=None,
    coalesce=False,
    kv=KvBudget(0, 10, PER_SEQUENCE_BYTES, KvPolicy.DEFER),
    prefill_share=PREFILL_SHARE,
)
"""Single flight in these terms, but for its KV budget, which it has none of."""

DRAFTS = st.sampled_from(
    [NO_DRAFTS, DraftPolicy(4), DraftPolicy(4), DraftPolicy(2), DraftPolicy(3, is_batched=True)]
)
DRAFT_NUMBERS = st.sampled_from([1, 2, 3, 3, 4])


def config_of(batching: Batching, limits: QueueLimits, drafts: DraftPolicy) -> SchedulerConfig:
    """Return the config of continuous batching, or of single flight."""
    if batching is ALONE:
        return single_flight(limits, prefill_chunk_tokens=4, drafts=drafts)
    return continuous(limits, batching, drafts)


class ContinuousMachine(RuleBasedStateMachine):
    """The serving loop's verbs in any order."""

    scheduler_class: ClassVar[type[Scheduler]] = Scheduler
    engine_classes: ClassVar[tuple[type[FakeEngine], ...]] = (FakeEngine, LateFirstToken)

    def __init__(self) -> None:
        """Nothing yet; the first rule chooses the configuration."""
        super().__init__()
        self.clock = ManualClock()
        self.faults = FakeFaults()
        self.step_error: Exception | None = None
        self.is_surviving = False
        self.records: dict[str, Record] = {}
        self.limits = LIMITS
        self.is_held = False
        self.joinable: set[int] = set()
        self.both_were_ready = False
        self.last_lanes: set[Lane | None] = set()
        self.lanes: dict[int, Lane] = {}
        self.drafts = NO_DRAFTS
        self.verified: list[tuple[int, int]] = []
        self.fallbacks = 0

    @initialize(
        batching=BATCHINGS,
        drafts=DRAFTS,
        draft_number=DRAFT_NUMBERS,
        is_late=st.booleans(),
    )
    def configure(
        self, batching: Batching, drafts: DraftPolicy, draft_number: int, *, is_late: bool
    ) -> None:
        """Any configuration, and an engine that is early or late with first tokens."""
        self.batching, self.drafts = batching, drafts
        self.engine_class, self.draft_number = self.engine_classes[is_late], draft_number
        self._start_engine()
        self._start()

    def _start_engine(self) -> None:
        self.engine = self.engine_class(faults=self.faults, before_step=self._before_step)
        self.engine.draft_script = drafts_by(self.draft_number)

    def _start(self) -> None:
        """Start a new scheduler, without draft counts."""
        config = config_of(self.batching, self.limits, self.drafts)
        self.scheduler = self.scheduler_class(drafting_eagerly(config))
        self.mode = self.scheduler._step_mode = self._mode_of(0)
        self.verified, self.fallbacks = [], 0
        self.both_were_ready, self.is_held = False, False

    # Rules

    @rule(
        sizes=st.lists(SIZES, min_size=1, max_size=3),
        priority=st.sampled_from(list(Priority)),
        namespace=st.sampled_from(["", "", "other"]),
        waited_s=st.sampled_from([0.0, 0.0, 4.0]),
    )
    def submit(
        self,
        sizes: list[tuple[int, int, float, int, int | None, Grammar | None]],
        priority: Priority,
        namespace: str,
        waited_s: float,
    ) -> None:
        """A request of one to three sequences: all of them are taken in, or all of them end."""
        first = len(self.records)
        requests = tuple(
            SequenceRequest(
                sequence_id=f"s{first + index}",
                group_id=f"g{first}",
                prompt=tuple(range(prompt_tokens)),
                sampling=SamplingParams(
                    temperature=temperature,
                    seed=seed,
                    prompt_logprobs=prompt_logprobs,
                    grammar=grammar,
                ),
                max_tokens=max_tokens,
                stop_token_ids=STOP_TOKENS,
                arrived_s=self.clock.monotonic_s() - waited_s,
                request_id=f"r{first}",
                namespace=namespace,
                priority=priority,
            )
            for index, (
                prompt_tokens,
                max_tokens,
                temperature,
                seed,
                prompt_logprobs,
                grammar,
            ) in enumerate(sizes)
        )
        self._submit(requests)

    @rule(age=st.integers(0, 9), priority=st.sampled_from(list(Priority)), steps=st.integers(0, 2))
    def submit_twin(self, age: int, priority: Priority, steps: int) -> None:
        """Submit a request identical to a waiting or running one."""
        for _ in range(steps):
            self._step()
        open_records = [one for one in self.records.values() if one.finished is None]
        if not open_records:
            return
        twin = open_records[age % len(open_records)].request
        number = len(self.records)
        self._submit(
            (
                replace(
                    twin,
                    sequence_id=f"s{number}",
                    group_id=f"g{number}",
                    request_id=f"r{number}",
                    arrived_s=self.clock.monotonic_s(),
                    priority=priority,
                    resumption=None,
                ),
            )
        )

    def _submit(self, requests: tuple[SequenceRequest, ...]) -> None:
        for request in requests:
            number = len(self.records)
            self.records[request.sequence_id] = Record(number, request)
        refusal = self._refusal(requests)
        self._assign_work(requests)
        self._note(self.scheduler.submit(requests, self.clock.monotonic_s()))
        for request in requests:
            record = self.records[request.sequence_id]
            taken_in = record.is_queued or record.admitted is not None
            assert taken_in == (refusal is None), f"{refusal} was due"
            assert refusal is None or type(_error(record)) is refusal

    @rule(ages=st.lists(st.integers(0, 6), max_size=4), is_gone=st.booleans())
    def abort(self, ages: list[int], *, is_gone: bool) -> None:
        """Any ids, counted back from the newest: unknown (0), waiting, running, finished, twice."""
        sequence_ids = tuple(f"s{len(self.records) - age}" for age in ages)
        error = ClientDisconnectedError("gone") if is_gone else None
        open_before = {one for one in sequence_ids if one in self.records and self._is_open(one)}
        events = self.scheduler.abort(sequence_ids, error, self.clock.monotonic_s())
        self._note(events)
        finished = [one for one in events if isinstance(one, SequenceFinished)]
        assert len(events) == len(finished) == len(open_before)
        assert {one.sequence_id for one in finished} == open_before
        assert all(one.reason is FinishReason.ABORT and one.error is error for one in finished)

    @rule()
    def step(self) -> None:
        """A step that goes well."""
        self._step()

    @rule(steps=st.integers(2, 4))
    def run_on(self, steps: int) -> None:
        """Some steps in a row, so that sequences come to their own ends."""
        for _ in range(steps):
            self._step()

    @rule(slot_index=st.integers(0, 3))
    def step_with_row_fault(self, slot_index: int) -> None:
        """Whichever token the slot would get in this step, its row fails instead."""
        cause = ValueError("planted")
        self._note(self.scheduler.admit(self.clock.monotonic_s()))
        subscribers = self._subscribers(slot_index)
        others = [one for one in self._running() if one not in subscribers]
        self.faults.row_errors = {(slot_index, position): cause for position in range(20)}
        self._step()
        self.faults.row_errors = {}
        is_hit = [isinstance(_error(one), RowFaultError) for one in subscribers]
        assert len(set(is_hit)) <= 1, "all subscribers of a row or none"
        assert not any(isinstance(_error(one), RowFaultError) for one in others)

    @rule(slot_index=st.integers(0, 3))
    def step_with_draft_fault(self, slot_index: int) -> None:
        """A row's proposer fails; the row goes on without drafts."""
        self.faults.draft_errors = {
            (slot_index, position): ValueError("planted") for position in range(20)
        }
        self._step()
        self.faults.draft_errors = {}

    @rule()
    def step_with_engine_fault(self) -> None:
        """Let the run raise: running sequences end, waiting ones stay, rows are dropped."""
        self._note(self.scheduler.admit(self.clock.monotonic_s()))
        self.step_error = RuntimeError("planted")
        running = self._running()
        waiting = [one for one in self.records.values() if one.is_waiting]
        self._step()
        self.step_error = None
        assert all(isinstance(_error(one), EngineFaultError) for one in running)
        assert all(one.is_waiting for one in waiting)

    @rule()
    def survive_engine_fault(self) -> None:
        """Let the run raise: running sequences are resumed, one at a time at first; one that fails alone again ends."""
        self._note(self.scheduler.admit(self.clock.monotonic_s()))
        self.step_error, self.is_surviving = RuntimeError("planted"), True
        running = {one.request.sequence_id: one for one in self._running()}
        to_blame = {name for name in running if self.scheduler._open[name].is_suspect}
        is_stepping = not self.scheduler.plan().is_empty
        self._step()
        self.step_error, self.is_surviving = None, False
        for name, record in running.items():
            is_ended = is_stepping and name in to_blame
            assert isinstance(_error(record), EngineFaultError) == is_ended
            assert is_ended or not is_stepping or record.is_queued

    @rule(
        steps=st.integers(0, 3),
        unread_steps=st.sampled_from([0, 0, 1, 2]),
        are_suspects=st.booleans(),
    )
    def restart_engine_process(self, steps: int, unread_steps: int, *, are_suspects: bool) -> None:
        """Scheduler and engine are gone: others go on behind what was read of each open sequence."""
        for _ in range(steps):
            self._step()
        now_s = self.clock.monotonic_s()
        for _ in range(unread_steps):
            self.scheduler.admit(now_s)
            plan = self.scheduler.plan()
            self.scheduler.commit(plan, self.engine.run(plan), now_s, duration_s=0.01)
        self._start_engine()
        self._start()
        self.joinable.clear()
        groups: dict[str, list[Record]] = {}
        for record in self.records.values():
            if record.finished is None:
                groups.setdefault(record.request.group_id, []).append(record)
                self._note_restart(record, is_suspect=are_suspects and record.is_running)
        for group in groups.values():
            requests = tuple(one.request for one in group)
            self._assign_work(requests)
            self._note(self.scheduler.submit(requests, now_s))
            assert all(one.is_waiting for one in group), "what was taken in once is not refused"

    def _note_restart(self, record: Record, *, is_suspect: bool) -> None:
        """Note what another process is told of a sequence, which then waits there."""
        record.request = replace(
            record.request,
            resumption=Resumption(
                tuple(record.tokens),
                is_group_started=self._is_group_started(record),
                is_suspect=is_suspect,
            ),
        )
        record.is_queued, record.is_suspended = False, bool(record.tokens)
        if not record.tokens:
            record.admitted = record.scored = None

    @rule(seconds_s=st.sampled_from([0.5, 1.0, 1.0, 3.0, 11.0, 26.0]))
    def wait(self, seconds_s: float) -> None:
        """Time passes, past the timeouts now and then."""
        self.clock.advance(seconds_s)

    @rule(is_held=st.booleans())
    def hold(self, *, is_held: bool) -> None:
        """Hold admission for a while."""
        self.is_held = is_held
        if is_held:
            self.scheduler.hold_admission()
        else:
            self.scheduler.resume_admission()

    @rule()
    def suspend(self) -> None:
        """All that runs gives up its slots, and goes on behind its tokens when it has one again."""
        self._suspend(None)

    def _suspend(self, config: SchedulerConfig | None) -> None:
        self.scheduler.suspend(config)
        self._note_suspended()

    def _note_suspended(self) -> None:
        """A suspended sequence continues after its tokens; one without tokens gets all its events again."""
        for record in self._running():
            sequence = self.scheduler._open.get(record.request.sequence_id)
            if sequence is None or sequence.is_running:
                continue
            record.is_queued, self.both_were_ready = True, False
            if sequence.completion_tokens:
                record.is_suspended = True
                self.joinable.discard(record.work)
            else:
                record.admitted = record.scored = None

    @rule(limits=st.sampled_from(OTHER_LIMITS))
    def set_limits(self, limits: QueueLimits) -> None:
        """Apply other limits, which end no sequence at once."""
        self.limits = limits
        self.scheduler.set_limits(limits)

    @rule(
        batching=st.one_of(BATCHINGS, BATCHINGS, st.just(ALONE)),
        limits=st.sampled_from(OTHER_LIMITS),
        drafts=DRAFTS,
        is_suspending=st.booleans(),
    )
    def apply_config(
        self, batching: Batching, limits: QueueLimits, drafts: DraftPolicy, *, is_suspending: bool
    ) -> None:
        """Suspend or finish running sequences, then admit the waiting ones under another config."""
        config = config_of(batching, limits, drafts)
        self.hold(is_held=True)
        if is_suspending:
            self._suspend(config)
        while not self.scheduler.is_at_rest:
            self._step()
        assert not self.engine._rows, "at rest the engine has none"
        waiting = [one for one in self.records.values() if one.is_waiting]
        self.batching, self.limits, self.drafts = batching, limits, drafts
        if not batching.coalesce:
            self.joinable.clear()
        self._note(self.scheduler.apply_config(drafting_eagerly(config), self.clock.monotonic_s()))
        self.is_held, self.both_were_ready = False, False
        kv = batching.kv
        for one in waiting:
            is_unfit = (
                batching is not ALONE
                and kv.reservation_bytes(one.reserved_tokens) > kv.budget_bytes
            )
            assert one.is_waiting != is_unfit, "they wait on, but for those that can never run"
            assert not is_unfit or isinstance(_error(one), KvBudgetExceededError)

    def drain(self) -> None:
        """Without newcomers everything ends, exactly once, and no KV stays behind."""
        for _ in range(800):
            due_s = self.scheduler.wait_s(self.clock.monotonic_s())
            if due_s is not None:
                self.clock.advance(due_s + 0.001)
            elif self.scheduler.plan().is_empty and not self.scheduler.waiting_count:
                break
            self._step()
        assert not any(self._is_open(one) for one in self.records)
        assert self.scheduler.plan().is_empty
        assert self.engine.memory().kv_used_bytes == 0
        assert self.scheduler.kv_reserved_bytes == 0

    @rule(max_b=st.integers(1, 4), how=st.sampled_from(["drain", "reload", *["neither"] * 4]))
    def end_all(self, max_b: int, how: str) -> None:
        """End all sequences now and then; rarely, to allow long histories."""
        if how == "drain":
            self.drain()
        elif how == "reload":
            self.reload(max_b)

    def reload(self, max_b: int) -> None:
        """All are answered, and a new scheduler goes on with the same engine."""
        error = EngineFaultError("reloaded")
        self._note(self.scheduler.fail(error, self.clock.monotonic_s(), include_waiting=True))
        assert not any(self._is_open(one) for one in self.records)
        self.scheduler.check_invariants()
        self.engine.reset()
        self.batching = self._reloaded_batching(max_b)
        self._start()

    def _reloaded_batching(self, max_b: int) -> Batching:
        batching = replace(self.batching, max_b=max_b)
        if batching.kv.budget_bytes == 0:
            batching = replace(batching, kv=replace(batching.kv, budget_bytes=600))
        return batching

    def teardown(self) -> None:
        """Left alone, everything ends."""
        if hasattr(self, "scheduler"):
            self.drain()

    # Invariants

    @invariant()
    def counts_agree(self) -> None:
        """The scheduler's counts are the record's."""
        self.scheduler.check_invariants()
        running = self._running()
        slots = {_admission(one).slot_index for one in running}
        assert len(running) == self.scheduler.running_count
        assert len(slots) == self.scheduler.active_loops <= self.batching.max_b
        waiting = self._waiting_groups()
        assert sum(len(group) for group in waiting) == self.scheduler.waiting_count
        assert self.scheduler._waiting.prompt_tokens == sum(
            len(group[0].request.prompt) for group in waiting
        )

    @invariant()
    def drafts_add_up(self) -> None:
        """Draft counts match the engine's outcomes, position by position."""
        assert self.scheduler.step_mode is self._mode_of(self.scheduler.active_loops)
        longest = max((drafted for drafted, _ in self.verified), default=0)
        assert self.scheduler.draft_reading == DraftReading(
            cycles=len(self.verified),
            drafted_tokens=sum(drafted for drafted, _ in self.verified),
            accepted_tokens=sum(accepted for _, accepted in self.verified),
            drafted_by_position=tuple(
                sum(drafted > at for drafted, _ in self.verified) for at in range(longest)
            ),
            accepted_by_position=tuple(
                sum(accepted > at for _, accepted in self.verified) for at in range(longest)
            ),
            fallbacks=self.fallbacks,
        )

    @invariant()
    def subscribers_of_a_slot_are_alike(self) -> None:
        """Subscribers of a slot have identical requests and tokens, and allow coalescing."""
        for slot_index in range(self.batching.max_b):
            subscribers = self._subscribers(slot_index)
            assert len({key_of(one.request) for one in subscribers}) <= 1
            assert len({tuple(one.tokens) for one in subscribers}) <= 1
            assert len({one.work for one in subscribers}) <= 1

    @invariant()
    def reservations_add_up(self) -> None:
        """Reservations are the batch's slab and the serial row, within the budget."""
        if self.batching is ALONE:
            assert self.scheduler.kv_reserved_bytes == 0
            assert self.scheduler.kv_budget_bytes is None
            return
        assert self.scheduler.kv_reserved_bytes == self._promised_bytes()
        assert self._promised_bytes() <= self.batching.kv.budget_bytes

    @invariant()
    def engine_rows_are_the_slots(self) -> None:
        """Every row is of an occupied slot, or of one that the next plan frees."""
        slots = self.scheduler._running.slots
        known = {one.slot_index for one in slots} | set(slots.released)
        begun = {one.slot_index for one in slots if one.prefilled_tokens}
        assert begun <= set(self.engine._rows) <= known

    # The serving loop

    def _step(self) -> None:
        now_s = self.clock.monotonic_s()
        self._note(self.scheduler.admit(now_s))
        self._check_after_admission(now_s)
        plan = self.scheduler.plan()
        assert plan == self.scheduler.plan(), "planning changes nothing"
        self._check_plan(plan)
        try:
            result = self.engine.run(plan)
        except RuntimeError:
            assert plan == self.scheduler.plan(), "a failed run leaves what it was planned from"
            end = self.scheduler.survive if self.is_surviving else self.scheduler.fail
            self._note(end(EngineFaultError("planted"), now_s))
            self._note_suspended()
            self.engine.reset()
            self.both_were_ready = False  # the turn was not taken, and who had it is gone
            return
        self._commit(plan, result, now_s)

    def _commit(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Take a step in, which was made in one way for all of its tokens."""
        self.verified += [(one.drafted_tokens, one.accepted_tokens) for one in result.drafts]
        self.fallbacks += len(result.draft_faults)
        mode = self._mode_of(self.scheduler.active_loops)
        subscribers = {one.slot_index: self._subscribers(one.slot_index) for one in result.tokens}
        unstarted = {
            slot: [one for one in some if not one.tokens] for slot, some in subscribers.items()
        }
        self._note(self.scheduler.commit(plan, result, now_s, duration_s=0.01))
        self._note_suspended()
        assert self.mode is mode, "a change of mode is told with the first step that it is of"
        for slot_index, records in unstarted.items():
            for record in records:
                if record.tokens:
                    assert record.started is not None
                    assert record.started.decode_mode is self._mode_in(slot_index, mode)

    def _mode_of(self, loops: int) -> DecodeMode:
        """Decode mode of a step of so many sequences."""
        if loops <= 1 and self.drafts.max_draft_tokens:
            return DecodeMode.SPECULATIVE
        return DecodeMode.SINGLE if self.batching is ALONE else DecodeMode.BATCHED

    def _mode_in(self, slot_index: int, mode: DecodeMode) -> DecodeMode:
        """Decode mode of one slot in a step of a mode."""
        is_serial = self.lanes[slot_index] is Lane.SERIAL
        return DecodeMode.SINGLE if is_serial and mode is DecodeMode.BATCHED else mode

    def _before_step(self, _plan: StepPlan) -> None:
        if self.step_error is not None:
            raise self.step_error

    def _check_after_admission(self, now_s: float) -> None:
        """No sequence is overdue after admission, and none waits beside an idle engine."""
        for one in self.records.values():
            age_s = now_s - one.request.arrived_s
            patience_s = min(self.limits.queue_timeout_s, self.limits.request_timeout_s)
            if self._is_group_started(one):
                patience_s = self.limits.request_timeout_s
            assert not (one.is_waiting and age_s >= patience_s)
            assert not (one.is_running and age_s >= self.limits.request_timeout_s)
        is_idle = not self.scheduler.running_count and not self.is_held
        if self.scheduler.waiting_count and is_idle:
            assert self.batching.window_s > 0, "only company is worth waiting for"
            assert len(self._waiting_groups()) < self.batching.max_b

    def _check_plan(self, plan: StepPlan) -> None:
        """All ready rows of one lane or none, in turns; every prompt within its bounds."""
        ready = {
            one.slot_index: one.lane for one in self.scheduler._running.slots if one.is_prefilled
        }
        decoding = {row.slot_index for row in plan.decode}
        lanes = {ready[one] for one in decoding}
        is_burst = not lanes and all(self._is_whole(one) for one in plan.prefill)
        self.lanes = {
            one.slot_index: one.lane
            for one in self.scheduler._running.slots
            if one.slot_index is not None and one.lane is not None
        }
        is_lonely = self.scheduler.active_loops == 1
        allowed = self.drafts.max_draft_tokens if is_lonely or self.drafts.is_batched else 0
        if plan.prefill:
            allowed = 0  # a chunk uses up what a step may last longer
        assert {row.max_draft_tokens for row in plan.decode} <= {allowed}
        assert len(lanes) == (1 if ready and not is_burst else 0)
        assert not is_burst or plan.prefill or not ready, "rows stand still for prompts alone"
        assert decoding == {one for one, lane in ready.items() if lane in lanes}
        assert not self.scheduler.active_loops or plan.prefill or plan.decode
        if not is_burst:  # it is nobody's turn, as often as it comes
            both = len(set(ready.values())) == 2
            in_turn = lanes != self.last_lanes
            assert in_turn or not (both and self.both_were_ready), "lanes take turns"
            self.both_were_ready, self.last_lanes = both, lanes
        for chunk in plan.prefill:
            assert chunk.slot_index not in ready

    def _is_whole(self, chunk: PrefillChunk) -> bool:
        """True if a chunk is a whole prompt."""
        sequence = self.scheduler._running.slots.at(chunk.slot_index)
        return sequence is not None and chunk.token_ids == sequence.prefill_token_ids

    # The record

    def _running(self) -> list[Record]:
        return [one for one in self.records.values() if one.is_running]

    def _is_open(self, sequence_id: str) -> bool:
        return self.records[sequence_id].finished is None

    def _subscribers(self, slot_index: int) -> list[Record]:
        return [one for one in self._running() if _admission(one).slot_index == slot_index]

    def _is_group_started(self, record: Record) -> bool:
        return any(
            one.has_run and one.request.group_id == record.request.group_id
            for one in self.records.values()
        )

    def _waiting_groups(self) -> list[list[Record]]:
        """Waiting requests in queue order, grouped by sequence."""
        groups: dict[int, list[Record]] = {}
        for one in self.records.values():
            if one.is_waiting:
                groups.setdefault(one.work, []).append(one)
        return list(groups.values())

    def _joinable_work(self) -> dict[CoalescingKey, int]:
        """Sequences open to subscribers: all submitted while coalescing was on, until it is off."""
        return {
            key_of(one.request): one.work
            for one in self.records.values()
            if one.work in self.joinable
            and is_shareable(one.request)
            and (one.is_running or one.is_waiting)
        }

    def _assign_work(self, requests: tuple[SequenceRequest, ...]) -> None:
        works = self._joinable_work()
        for request in requests:
            record = self.records[request.sequence_id]
            record.work = record.number
            if is_shareable(request):
                record.work = works.get(key_of(request), record.number)
                if self.batching.coalesce:
                    works[key_of(request)] = record.work
                    self.joinable.add(record.work)

    def _promised_bytes(self) -> int:
        batch, serial = self._promised_tokens()
        assert len(serial) <= 1, "one serial row at a time"
        return self._bytes_of(batch, serial)

    def _bytes_of(self, batch: list[int], serial: list[int]) -> int:
        if self.batching.kv.has_length_classes:
            positions = 256 * len(batch) + sum(serial)
        else:
            rows = slab_rows(len(batch), self.batching.max_b) if batch else 0
            positions = rows * max(batch, default=0) + sum(serial)
        subscribers = len(batch) + len(serial)
        return positions * self.batching.kv.bytes_per_token + subscribers * PER_SEQUENCE_BYTES

    def _promised_tokens(self) -> tuple[list[int], list[int]]:
        """Slots and lanes of requests, from the events."""
        slots = {_admission(one).slot_index: one for one in self._running()}
        batch: list[int] = []
        serial: list[int] = []
        for one in slots.values():
            (batch if self._is_batch(one) else serial).append(one.reserved_tokens)
        return batch, serial

    def _is_batch(self, record: Record) -> bool:
        admission = _admission(record)
        if admission.decode_mode is DecodeMode.SPECULATIVE or record.has_resumed:  # in either lane
            sequence = self.scheduler._running.slots.at(admission.slot_index)
            return sequence is not None and sequence.lane is Lane.BATCH
        return admission.decode_mode is DecodeMode.BATCHED

    def _refusal(self, requests: tuple[SequenceRequest, ...]) -> type[MachdError] | None:
        """Expected outcome of a request, from the record."""
        taken = set(self._joinable_work())
        new: list[Record] = []
        for request in requests:
            if key_of(request) not in taken:
                new.append(self.records[request.sequence_id])
            if self.batching.coalesce and is_shareable(request):
                taken.add(key_of(request))
        if not new:
            return None
        return self._kv_refusal(new) or (None if self._has_room(new) else QueueFullError)

    def _kv_refusal(self, new: list[Record]) -> type[MachdError] | None:
        if self.batching is ALONE:
            return None
        kv = self.batching.kv
        needs = [one.reserved_tokens for one in new]
        if kv.reservation_bytes(max(needs)) > kv.budget_bytes:
            return KvBudgetExceededError
        if kv.policy is KvPolicy.DEFER:
            return None
        if not self._all_fit([], [], needs):
            return KvBudgetExceededError
        before = [sequence.reserved_tokens for sequence in self.scheduler._waiting]
        batch, serial = self._promised_tokens()
        return None if self._all_fit(batch, serial, [*before, *needs]) else KvBudgetSpentError

    def _all_fit(self, batch: list[int], serial: list[int], tokens: list[int]) -> bool:
        """True if requests up to the slot count could be admitted one after the other."""
        batch, serial, tokens = batch.copy(), serial.copy(), tokens.copy()
        while tokens and len(batch) + len(serial) < self.batching.max_b:
            one = tokens.pop(0)
            if self._bytes_of([*batch, one], serial) <= self.batching.kv.budget_bytes:
                batch.append(one)
            elif not serial and self._bytes_of(batch, [one]) <= self.batching.kv.budget_bytes:
                serial.append(one)
            else:
                return False
        return True

    def _has_room(self, new: list[Record]) -> bool:
        waiting = self._waiting_groups()
        slots = {_admission(one).slot_index for one in self._running()}
        queued = len(waiting) + len(new) - (self.batching.max_b - len(slots))
        tokens = sum(len(group[0].request.prompt) for group in waiting)
        tokens += sum(len(one.request.prompt) for one in new)
        limits = self.limits
        return queued <= limits.max_queue and (queued <= 0 or tokens <= limits.max_queue_tokens)

    # What events may say

    def _note(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case SequenceQueued() | SequenceAdmitted() | SequenceResumed():
                    self._note_place(self.records[event.sequence_id], event)
                case SequenceStarted() | DecodeModeChanged():
                    self._note_progress(event)
                case OutputGenerated(sequence_id, output):
                    self._note_output(self.records[sequence_id], output)
                case SequenceFinished(sequence_id):
                    self._note_finished(self.records[sequence_id], event)
                case StepCompleted() | EngineFaulted() | InvariantBroken() | PromptLookedUp():
                    raise AssertionError("the serving loop says that, not the scheduler")

    def _note_place(
        self, record: Record, event: SequenceQueued | SequenceAdmitted | SequenceResumed
    ) -> None:
        match event:
            case SequenceQueued(_, position):
                self._note_queued(record, position)
            case SequenceAdmitted():
                self._note_admitted(record, event)
            case SequenceResumed():
                self._note_resumed(record, event)

    def _note_queued(self, record: Record, position: int) -> None:
        assert not record.is_queued
        assert record.admitted is None or record.is_suspended
        assert record.finished is None
        record.is_queued = True
        assert 0 <= position <= len(self._waiting_groups()) + 2, "siblings come in one go"

    def _note_admitted(self, record: Record, event: SequenceAdmitted) -> None:
        subscribers = self._subscribers(event.slot_index)
        if subscribers:
            leader = subscribers[0].request
            is_sibling = leader.group_id == record.request.group_id
            assert event.coalesced_with == (None if is_sibling else leader.request_id)
            assert key_of(leader) == key_of(record.request)
        else:
            assert event.coalesced_with is None
            self._check_turn(record)
        assert record.admitted is None, "admitted once"
        assert record.finished is None
        record.admitted, record.has_run = event, True
        expected = self._mode_of(event.active_loops)
        if self._is_batch(record) or expected is not DecodeMode.BATCHED:
            assert event.decode_mode is expected
        else:
            assert event.decode_mode is DecodeMode.SINGLE
        assert self.scheduler.active_loops <= self.batching.max_b

    def _check_turn(self, record: Record) -> None:
        assert record.is_waiting, "a slot is given to who stands in the queue"
        assert not self.is_held, "nobody is given a slot while admission is held"
        groups = self._waiting_groups()
        suspects = {name for name, one in self.scheduler._open.items() if one.is_suspect}
        if record.request.sequence_id in suspects:
            assert self.scheduler.active_loops == 1, "a suspect goes on alone"
            groups = [one for one in groups if one[0].request.sequence_id in suspects]
        else:
            assert not suspects, "nobody joins while one is to go on alone"
        due_s = min(min(one.due_s for one in group) for group in groups)
        assert any(
            record in group and min(one.due_s for one in group) == due_s for group in groups
        ), "nobody overtakes"

    def _note_resumed(self, record: Record, event: SequenceResumed) -> None:
        assert record.is_suspended, "told once for each time that it was suspended"
        if not self._subscribers(event.slot_index):
            self._check_turn(record)
        assert event.completion_tokens == len(record.tokens) > 0
        record.admitted = structs.replace(_admission(record), slot_index=event.slot_index)
        record.is_suspended, record.has_resumed = False, True

    def _note_progress(self, event: SequenceStarted | DecodeModeChanged) -> None:
        if isinstance(event, DecodeModeChanged):
            assert event.previous is self.mode, "modes follow one another"
            assert event.mode is not event.previous
            self.mode = event.mode
            return
        record = self.records[event.sequence_id]
        assert record.is_running
        assert record.started is None, "told once"
        assert not record.tokens, "before the first token"
        record.started = event

    def _note_output(self, record: Record, output: RowOutput) -> None:
        if isinstance(output, SampledToken):
            self._note_token(record, output.token_id)
        else:
            self._note_scored(record, output)

    def _note_scored(self, record: Record, scored: ScoredPrompt) -> None:
        assert record.is_running
        assert record.scored is None, "told once"
        assert record.started is None, "before the first token"
        asked, prompt = record.request.sampling.prompt_logprobs, record.request.prompt
        assert asked is not None, "told only if asked"
        assert [(one.position, one.token_id) for one in scored.logprobs] == [
            *enumerate(prompt[1:], start=1)
        ]
        assert all(len(one.top_logprobs) == asked for one in scored.logprobs)
        record.scored = scored

    def _note_token(self, record: Record, token_id: int) -> None:
        assert record.started is not None, "a sequence is told that it starts"
        assert record.is_running, "tokens come to running sequences only, never after the end"
        request = record.request
        assert token_id == expected_token(request, len(record.tokens))
        assert token_id not in STOP_TOKENS
        record.tokens.append(token_id)
        assert len(record.tokens) <= request.max_tokens

    def _note_finished(self, record: Record, event: SequenceFinished) -> None:
        assert record.finished is None, "finished exactly once"
        record.finished = event
        request, generated = record.request, len(record.tokens)
        assert event.prompt_tokens == len(request.prompt)
        stop_tokens = 1 if event.reason is FinishReason.STOP else 0
        assert event.completion_tokens == generated + stop_tokens
        match event.reason:
            case FinishReason.STOP:
                assert expected_token(request, generated) in STOP_TOKENS
                assert event.error is None
                self._check_scored(record)
            case FinishReason.LENGTH:
                assert generated == request.max_tokens
                assert event.error is None
                self._check_scored(record)
            case FinishReason.ERROR:
                expected = (*REFUSALS, QueueTimeoutError, RequestTimeoutError)
                assert isinstance(event.error, (*expected, RowFaultError, EngineFaultError))
                is_late = isinstance(event.error, QueueTimeoutError)
                assert not (is_late and self._is_group_started(record)), "it has had a slot"
            case FinishReason.ABORT:
                assert event.error is None or isinstance(event.error, ClientDisconnectedError)

    def _check_scored(self, record: Record) -> None:
        asked = record.request.sampling.prompt_logprobs
        assert (record.scored is None) == (asked is None), "told if asked"


def _error(record: Record) -> MachdError | None:
    return record.finished.error if record.finished is not None else None


def _admission(record: Record) -> SequenceAdmitted:
    assert record.admitted is not None, "it runs"
    return record.admitted


class SingleFlightMachine(ContinuousMachine):
    """The narrowest configuration: one row, without drafts, on an engine that is never late."""

    engine_classes = (FakeEngine, FakeEngine)

    @initialize()
    def configure(self) -> None:
        """Configure single flight."""
        self.batching, self.engine_class, self.draft_number = ALONE, self.engine_classes[0], 1
        self._start_engine()
        self._start()

    @rule(limits=st.sampled_from(OTHER_LIMITS), is_suspending=st.booleans())
    def apply_config(self, limits: QueueLimits, *, is_suspending: bool) -> None:
        """Apply other limits as a new config."""
        super().apply_config(ALONE, limits, NO_DRAFTS, is_suspending=is_suspending)

    @rule()
    def step_with_row_fault(self) -> None:
        """The row fails if its token would come in this step."""
        self._note(self.scheduler.admit(self.clock.monotonic_s()))
        due = [one for one in self._running() if self._is_token_due(one)]
        super().step_with_row_fault(0)
        assert all(isinstance(_error(one), RowFaultError) for one in due)

    def _is_token_due(self, record: Record) -> bool:
        plan = self.scheduler.plan()
        is_last = bool(plan.decode) or any(chunk.is_last for chunk in plan.prefill)
        return is_last and record.request.max_tokens > 0

    def _reloaded_batching(self, max_b: int) -> Batching:
        del max_b
        return ALONE

    def _note_queued(self, record: Record, position: int) -> None:
        waiting = [one for one in self.records.values() if one.is_waiting]
        super()._note_queued(record, position)
        if not any(one.request.resumption or one.has_run for one in (*waiting, record)):
            assert position == sum(one.due_s <= record.due_s for one in waiting)
