"""Rows begin with what others have computed, wait for it where that is worth it, and leave their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engines.chained_engine import STATE_BYTES, TOKEN_BYTES, ChainedEngine, said
from support.schedulers.sequence_samples import LIMITS, batching_of, only, outputs_of

from machd.engine.protocol.blocks import ForgetSaved, LoadBlock, StoreBlock
from machd.engine.protocol.step import SampledToken, StepPlan
from machd.errors import EngineFaultError, MachdError, OverloadedError, RequestTimeoutError
from machd.request.generation import SamplingParams
from machd.scheduler import common_prefixes, prefix_cache
from machd.scheduler.block_tree import BlockTree, common_tokens
from machd.scheduler.config import continuous
from machd.scheduler.events import CacheReason, Event, PromptLookedUp, SequenceFinished
from machd.scheduler.pacing import StepPace
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits, PrefixReading
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import Priority, SequenceRequest

PLENTY = PrefixLimits(100_000)
DISK = PrefixLimits(1_000_000, disk_bytes=1_000_000)
ALPHABET = 200
SYSTEM = tuple(range(100, 112))
"""Twelve tokens that prompts begin with."""

LONG = tuple(range(100, 118))
"""A prompt of four chunks of five tokens, the last of which is not full."""


class Daemon:
    """A scheduler with a prefix cache, an engine, and what was heard from them."""

    def __init__(
        self,
        *,
        is_stateful: bool = False,
        limits: PrefixLimits = PLENTY,
        chunk_tokens: int = 5,
        max_b: int = 4,
        before: Daemon | None = None,
    ) -> None:
        """Start; what ``before`` has on disk is found."""
        self.engine = ChainedEngine(
            is_stateful=is_stateful, alphabet=ALPHABET, is_late=False, looks_ahead=False
        )
        if before is not None:
            self.engine.disk = before.engine.disk
        costs = BlockCosts(TOKEN_BYTES, STATE_BYTES if is_stateful else 0, 0, 0)
        shape = PrefixConfig(b"model", 4, costs, min_gain_tokens=3)
        saved = sorted((one for one, _ in self.engine.disk.values()), key=lambda one: one.start)
        self.cache = PrefixCache(shape, limits, saved)
        batching = batching_of(max_b=max_b, prefill_chunk_tokens=chunk_tokens)
        pace = StepPace(beside_decode=chunk_tokens, alone=chunk_tokens)
        config = replace(continuous(LIMITS, batching), pace=pace)
        self.core = Scheduler(config, self.cache)
        self.events: list[Event] = []
        self.plans: list[StepPlan] = []
        self.count = 0

    def submit(
        self,
        *prompt: int,
        max_tokens: int = 1,
        namespace: str = "",
        priority: Priority = Priority.NORMAL,
    ) -> str:
        """Ask for a completion; returns the sequence's id."""
        sequence_id = f"s{self.count}"
        self.count += 1
        request = SequenceRequest(
            sequence_id,
            sequence_id,
            prompt,
            SamplingParams(temperature=0.0),
            max_tokens,
            frozenset(),
            0.0,
            cache_namespace=namespace,
            priority=priority,
        )
        self.events += self.core.submit((request,), 0.0)
        return sequence_id

    def step(self, count: int = 1) -> None:
        """Some steps."""
        for _ in range(count):
            self.events += self.core.admit(0.0)
            plan = self.core.plan()
            self.plans.append(plan)
            self.events += self.core.commit(plan, self.engine.run(plan), 0.0, duration_s=0.01)
            self.core.check_invariants(is_whole=False)
            self.core.check_invariants()

    def finish(self) -> None:
        """Step until no sequence is left and the plan is empty."""
        for _ in range(200):
            if not self.core.running_count + self.core.waiting_count and not self.cache.changes:
                return
            self.step()
        raise AssertionError("it never ends")

    def ask(self, *prompt: int, max_tokens: int = 1, namespace: str = "") -> int:
        """Have a prompt answered alone; returns how much of it was cached."""
        sequence_id = self.submit(*prompt, max_tokens=max_tokens, namespace=namespace)
        self.finish()
        return self.cached(sequence_id)

    def cached(self, sequence_id: str) -> int:
        """Events of a finished sequence."""
        (end,) = [
            one for one in only(SequenceFinished, self.events) if one.sequence_id == sequence_id
        ]
        told = [
            one.diagnosis.cached_tokens
            for one in only(PromptLookedUp, self.events)
            if one.sequence_id == sequence_id
        ]
        assert told == [end.cached_tokens]
        return end.cached_tokens

    def reason(self, sequence_id: str) -> CacheReason:
        """Why no more of a prompt was cached."""
        told = [one for one in only(PromptLookedUp, self.events) if one.sequence_id == sequence_id]
        (event,) = told
        return event.diagnosis.client_reason

    def answer(self, sequence_id: str) -> list[int]:
        """Its tokens."""
        return [one.token_id for one in outputs_of(SampledToken, self.events, sequence_id)]

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were computed in all."""
        return sum(plan.prefill_tokens for plan in self.plans)

    @property
    def reading(self) -> PrefixReading:
        """Current counts."""
        return self.cache.reading


def test_a_prompt_is_computed_once() -> None:
    """Again it is a full hit, longer it is a partial one, elsewhere it is none."""
    daemon = Daemon()
    assert daemon.ask(*SYSTEM, 1) == 0
    assert daemon.ask(*SYSTEM, 1) == 12
    assert [plan.prefill_tokens for plan in daemon.plans if plan.prefill][-1] == 1
    assert daemon.ask(*SYSTEM, 2, 3) == 12
    assert daemon.ask(*SYSTEM[:7], 9) == 7
    assert daemon.ask(*SYSTEM, 1, namespace="b") == 0
    assert daemon.ask(5) == 0
    reading = daemon.reading
    assert (reading.queries, reading.hits, reading.prefix_hits, reading.misses) == (6, 2, 1, 3)


def test_an_answer_is_the_beginning_of_the_next_turn() -> None:
    """All of it is reused but the last token, whose KV was never computed."""
    daemon = Daemon()
    first = daemon.submit(*SYSTEM, 1, max_tokens=6)
    daemon.finish()
    said_tokens = daemon.answer(first)
    assert daemon.ask(*SYSTEM, 1, *said_tokens, 2) == 13 + 5


def test_answers_are_the_same_with_and_without() -> None:
    """Whatever is reused."""
    daemon = Daemon()
    for _ in range(2):
        one = daemon.submit(*SYSTEM, 1, max_tokens=5)
        daemon.finish()
        text = [*SYSTEM, 1]
        for token in daemon.answer(one):
            assert token == said(tuple(text), ALPHABET)
            text.append(token)


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 5, 7, 12, 100])
@pytest.mark.parametrize("followers", [1, 2, 3])
def test_prompts_submitted_together_compute_their_common_prefix_once(
    followers: int, chunk_tokens: int, *, is_stateful: bool
) -> None:
    """Others wait for the first one's blocks, and compute nothing but their own."""
    daemon = Daemon(is_stateful=is_stateful, chunk_tokens=chunk_tokens)
    asked = [daemon.submit(*SYSTEM, number, 50, 51) for number in range(followers + 1)]
    daemon.finish()
    assert [daemon.cached(one) for one in asked] == [0, *[12] * followers]
    assert daemon.prefilled_tokens == 15 + 3 * followers


@pytest.mark.parametrize("is_stateful", [False, True])
def test_row_goes_on_itself_when_its_leader_leaves(*, is_stateful: bool) -> None:
    """With what that one has left: to the token it stood at."""
    daemon = Daemon(is_stateful=is_stateful, chunk_tokens=5)
    leader, second, third = (daemon.submit(*SYSTEM, number, 50) for number in range(3))
    daemon.step()
    daemon.events += daemon.core.abort((leader,), None, 0.0)
    daemon.finish()
    assert daemon.cached(second) == 5
    assert daemon.cached(third) == 12


def test_row_goes_on_itself_when_its_blocks_are_lost() -> None:
    """A row computes blocks itself once the ones that it waits for are lost."""
    daemon = Daemon(chunk_tokens=5)
    daemon.engine.loses = lambda change: isinstance(change, StoreBlock)
    leader, second = (daemon.submit(*SYSTEM, number, 50) for number in range(2))
    daemon.finish()
    assert (daemon.cached(leader), daemon.cached(second)) == (0, 0)
    assert daemon.reading.blocks == 0


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("max_bytes", [0, 39, 80])
def test_row_does_not_wait_for_blocks_without_room(max_bytes: int, *, is_stateful: bool) -> None:
    """All are computed beside each other as without a cache, or nearly so."""
    daemon = Daemon(
        is_stateful=is_stateful, limits=PrefixLimits(max_bytes), chunk_tokens=100, max_b=4
    )
    asked = [daemon.submit(*SYSTEM, number, 50) for number in range(4)]
    daemon.finish()
    assert all(daemon.cached(one) <= max_bytes // TOKEN_BYTES for one in asked)
    assert daemon.reading.bytes <= max_bytes
    if not max_bytes:
        assert len(daemon.plans[0].prefill) == 4, "all at once"


def test_followers_may_be_followed() -> None:
    """Each waits for the one that has most of its beginning."""
    daemon = Daemon(chunk_tokens=3)
    first = daemon.submit(*SYSTEM[:6], 1)
    second = daemon.submit(*SYSTEM, 2)
    third = daemon.submit(*SYSTEM, 3)
    daemon.finish()
    assert [daemon.cached(one) for one in (first, second, third)] == [0, 6, 12]
    assert daemon.prefilled_tokens == 7 + 7 + 1


def test_row_does_not_wait_for_a_less_urgent_leader() -> None:
    """An urgent row does not wait for a less urgent leader."""
    daemon = Daemon()
    daemon.submit(*SYSTEM, 1, priority=Priority.BATCH)
    daemon.step()
    urgent = daemon.submit(*SYSTEM, 2, priority=Priority.INTERACTIVE)
    daemon.submit(*range(40, 70), priority=Priority.INTERACTIVE)
    daemon.step(2)  # the first makes sure of the block that is there
    assert [chunk.slot_index for chunk in daemon.plans[-1].prefill] == [1]
    daemon.finish()
    assert daemon.answer(urgent)


def test_row_with_a_longer_match_does_not_wait() -> None:
    """A row does not wait for a leader with a shorter common prefix than its own match."""
    daemon = Daemon(chunk_tokens=3)
    daemon.ask(*SYSTEM, 1)
    other = daemon.submit(*SYSTEM[:5], 7, 7, 7, 7, 7, 7, 7, 7)
    third = daemon.submit(*SYSTEM, 3)
    daemon.step()
    assert {chunk.start for chunk in daemon.plans[-1].prefill} <= {5, 12}
    daemon.finish()
    assert (daemon.cached(other), daemon.cached(third)) == (5, 12)


def test_row_does_not_wait_across_namespaces() -> None:
    """Nor finds anything there."""
    daemon = Daemon(chunk_tokens=100)
    asked = [daemon.submit(*SYSTEM, 1, namespace=name) for name in "ab"]
    daemon.step()
    assert len(daemon.plans[0].prefill) == 2
    daemon.finish()
    assert [daemon.cached(one) for one in asked] == [0, 0]


def test_state_is_kept_at_the_ends_of_prompts_and_answers() -> None:
    """The same prompt again is a full hit; the next turn begins where the answer ended."""
    daemon = Daemon(is_stateful=True)
    first = daemon.submit(*SYSTEM, 1, max_tokens=4)
    daemon.finish()
    assert daemon.ask(*SYSTEM, 1) == 12
    assert daemon.ask(*SYSTEM, 1, *daemon.answer(first), 2) == 13 + 3


def test_state_is_kept_where_texts_are_seen_to_part() -> None:
    """The second text pays for it, the third one has it."""
    daemon = Daemon(is_stateful=True)
    assert daemon.ask(*SYSTEM[:10], 1, 2, 3, 4) == 0
    assert daemon.ask(*SYSTEM[:10], 5, 6, 7, 8) == 0
    assert daemon.ask(*SYSTEM[:10], 9, 9, 9, 9) == 10


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("max_b", [1, 4])
@pytest.mark.parametrize("error", [None, OverloadedError("cancelled by an operator")])
def test_cancelled_prompt_is_gone_on_with_where_it_was(
    error: MachdError | None, max_b: int, *, is_stateful: bool
) -> None:
    """After each of its chunks; with state a snapshot is made there, although no text ends there."""
    for chunks in range(1, 4):
        daemon = Daemon(is_stateful=is_stateful, chunk_tokens=5, max_b=max_b)
        cancelled = daemon.submit(*LONG)
        daemon.step(chunks)
        daemon.events += daemon.core.abort((cancelled,), error, 0.0)
        again = daemon.submit(*LONG)
        daemon.finish()
        assert daemon.cached(again) == 5 * chunks
        assert daemon.reason(again) is CacheReason.CONTINUED
        assert daemon.prefilled_tokens == len(LONG)
        assert daemon.answer(again) == [said(LONG, ALPHABET)]


@pytest.mark.parametrize("is_stateful", [False, True])
def test_prompt_that_is_late_is_gone_on_with(*, is_stateful: bool) -> None:
    """A deadline ends a prompt as its client's leaving does."""
    daemon = Daemon(is_stateful=is_stateful)
    daemon.submit(*LONG)
    daemon.step(2)
    daemon.events += daemon.core.admit(LIMITS.request_timeout_s + 1)
    (late,) = only(SequenceFinished, daemon.events)
    assert isinstance(late.error, RequestTimeoutError)
    assert daemon.ask(*LONG) == 10


def test_prompt_cancelled_before_its_first_chunk_leaves_nothing() -> None:
    """While it waits, and in its slot."""
    daemon = Daemon(max_b=1)
    first, second = daemon.submit(*LONG), daemon.submit(*LONG)
    daemon.events += daemon.core.admit(0.0)
    daemon.events += daemon.core.abort((second, first), None, 0.0)
    daemon.finish()
    assert daemon.reading.blocks == 0
    again = daemon.submit(*LONG)
    daemon.finish()
    assert (daemon.cached(again), daemon.reason(again)) == (0, CacheReason.FIRST_SEEN)


@pytest.mark.parametrize(
    "limits", [PrefixLimits(0), PrefixLimits(80), PrefixLimits(100_000, max_entries=1)]
)
@pytest.mark.parametrize("is_stateful", [False, True])
def test_blocks_of_a_cancelled_prompt_obey_the_limits(
    limits: PrefixLimits, *, is_stateful: bool
) -> None:
    """In bytes and in texts; no row pins them any more, and they can be cleared."""
    daemon = Daemon(is_stateful=is_stateful, limits=limits)
    daemon.ask(7, 7, 7, 7, 7)
    cancelled = daemon.submit(*LONG)
    daemon.step(3)
    daemon.events += daemon.core.abort((cancelled,), None, 0.0)
    daemon.finish()
    reading = daemon.reading
    assert reading.bytes <= limits.max_bytes
    assert reading.entries <= (limits.max_entries or reading.entries)
    assert reading.pinned_blocks == 0
    daemon.core.clear_prefixes(is_disk_included=False)
    assert daemon.reading.blocks == 0


def test_cancelled_prompt_is_found_by_its_own_namespace_alone() -> None:
    """Another API key computes it whole."""
    daemon = Daemon()
    cancelled = daemon.submit(*LONG, namespace="a")
    daemon.step(3)
    daemon.events += daemon.core.abort((cancelled,), None, 0.0)
    assert daemon.ask(*LONG, namespace="b") == 0
    assert daemon.ask(*LONG, namespace="a") == 15


@pytest.mark.parametrize("is_stateful", [False, True])
def test_follower_of_a_cancelled_prompt_goes_on_for_all(*, is_stateful: bool) -> None:
    """Each begins where the cancelled one was, or waits for the one that does: nothing is computed twice."""
    daemon = Daemon(is_stateful=is_stateful)
    leader, *others = (daemon.submit(*LONG, number, 50) for number in range(3))
    daemon.step(3)
    daemon.events += daemon.core.abort((leader,), None, 0.0)
    daemon.finish()
    assert [daemon.cached(one) for one in others] == [15, len(LONG)]
    assert daemon.prefilled_tokens == len(LONG) + 2 * len(others)


@pytest.mark.parametrize("is_stateful", [False, True])
def test_another_daemon_goes_on_with_a_cancelled_prompt(*, is_stateful: bool) -> None:
    """Its blocks are saved as others are."""
    before = Daemon(is_stateful=is_stateful, limits=DISK)
    cancelled = before.submit(*LONG)
    before.step(3)
    before.events += before.core.abort((cancelled,), None, 0.0)
    before.finish()
    daemon = Daemon(is_stateful=is_stateful, limits=DISK, before=before)
    assert daemon.ask(*LONG) == 15


@pytest.mark.parametrize("is_stateful", [False, True])
def test_chunk_of_a_row_that_failed_is_not_kept(*, is_stateful: bool) -> None:
    """Blocks of its earlier chunks stay, and none makes room for the one that failed."""
    daemon = Daemon(is_stateful=is_stateful, limits=PrefixLimits(20 * TOKEN_BYTES), chunk_tokens=8)
    daemon.ask(7, 7, 7, 7, 7)
    daemon.submit(*LONG)
    daemon.step()
    daemon.engine.failing_slots = {0}
    daemon.step()
    daemon.engine.failing_slots = set()
    daemon.finish()
    assert daemon.reading.evictions == 0
    assert all(len(block.texts[-1]) <= 8 for block in daemon.engine.blocks.values())


def test_a_failed_row_leaves_nothing_more() -> None:
    """Blocks stored before the fault stay."""
    daemon = Daemon()
    one = daemon.submit(*SYSTEM, 1, max_tokens=6)
    daemon.step(4)
    daemon.engine.failing_slots = {0}
    daemon.step()
    daemon.engine.failing_slots = set()
    daemon.finish()
    assert daemon.cached(one) == 0
    assert daemon.ask(*SYSTEM, 1, *daemon.answer(one), 2) <= 12


def test_sharing_is_told_in_bytes() -> None:
    """Ten texts with one beginning keep it once."""
    daemon = Daemon(max_b=1)
    for number in range(10):
        daemon.ask(*SYSTEM, 20 + number, 50)
    reading = daemon.reading
    assert reading.entries == 10
    assert reading.shared_blocks == 3
    assert reading.bytes_saved == 9 * 12 * TOKEN_BYTES
    assert reading.bytes == (12 + 10 * 2) * TOKEN_BYTES
    assert reading.pinned_blocks == reading.pinned_bytes == 0


def test_running_rows_pin_what_they_stand_on() -> None:
    """And clearing spares it."""
    daemon = Daemon()
    daemon.ask(*SYSTEM, 1)
    daemon.ask(9, 9, 9, 9, 9)
    daemon.submit(*SYSTEM, 1, max_tokens=8)
    daemon.step(2)
    assert daemon.reading.pinned_bytes == 12 * TOKEN_BYTES
    daemon.core.clear_prefixes(is_disk_included=False)
    assert daemon.reading.bytes == 12 * TOKEN_BYTES
    daemon.finish()


@pytest.mark.parametrize("is_stateful", [False, True])
def test_another_daemon_finds_what_was_saved(*, is_stateful: bool) -> None:
    """It is read before the row begins, and only for its own namespace."""
    limits = PrefixLimits(100_000, disk_bytes=100_000)
    before = Daemon(is_stateful=is_stateful, limits=limits)
    before.ask(*SYSTEM, 1, namespace="a")
    daemon = Daemon(is_stateful=is_stateful, limits=limits, before=before)
    assert daemon.ask(*SYSTEM, 1, namespace="b") == 0
    assert daemon.reading.blocks > 0
    assert daemon.ask(*SYSTEM, 1, namespace="a") == 12
    assert any(isinstance(one, LoadBlock) for plan in daemon.plans for one in plan.blocks)


def test_what_cannot_be_read_is_computed() -> None:
    """No row waits for it twice, and it is stored again."""
    limits = PrefixLimits(100_000, disk_bytes=100_000)
    before = Daemon(limits=limits)
    before.ask(*SYSTEM, 1)
    daemon = Daemon(limits=limits, before=before)
    lost = sorted(daemon.engine.disk.values(), key=lambda one: one[0].start)[1][0]
    del daemon.engine.disk[lost.digest]
    assert daemon.ask(*SYSTEM, 1) == 4
    assert daemon.ask(*SYSTEM, 1) == 12
    assert lost.digest in daemon.engine.disk


def test_a_fault_of_the_engine_costs_memory_alone() -> None:
    """Saved blocks are found again."""
    limits = PrefixLimits(100_000, disk_bytes=100_000)
    daemon = Daemon(limits=limits)
    daemon.ask(*SYSTEM, 1)
    daemon.submit(*SYSTEM, 1, max_tokens=8)
    daemon.step(2)
    daemon.events += daemon.core.fail(EngineFaultError("planted"), 0.0)
    daemon.engine.reset()
    assert daemon.reading.bytes == 0
    assert daemon.ask(*SYSTEM, 1) == 12


def test_waiting_row_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting row is not looked up again while its leader goes on."""
    daemon = Daemon(chunk_tokens=1)
    walks = 0
    walk = daemon.cache._tree.walk

    def counted(*args: object) -> object:
        nonlocal walks
        walks += 1
        return walk(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(daemon.cache._tree, "walk", counted)
    for number in range(4):
        daemon.submit(*SYSTEM, number, 50)
    daemon.finish()
    waited = 12 * 3
    assert walks < waited


STOPS = (10, 20, 50, 30, 40)
"""Where texts leave one that is longer."""


def test_what_was_cleared_while_a_row_ran_is_saved_again() -> None:
    """A shared system prompt is saved again after the disk tier lost it."""
    daemon = Daemon(limits=DISK)
    daemon.ask(*SYSTEM, 1)
    daemon.submit(*SYSTEM, 2, max_tokens=6)
    daemon.step(3)
    daemon.core.clear_prefixes(is_disk_included=True)
    daemon.finish()
    daemon.ask(*SYSTEM, 30, 31, 32)
    assert daemon.reading.saved_blocks == daemon.reading.blocks
    assert Daemon(before=daemon, limits=DISK).ask(*SYSTEM, 30, 31, 32) == 14


def test_a_budget_of_disk_that_was_none_for_a_while_is_used_again() -> None:
    """By all that is of use from then on."""
    daemon = Daemon(limits=DISK)
    daemon.ask(*SYSTEM, 1)
    daemon.core.set_prefix_limits(replace(DISK, disk_bytes=0))
    daemon.step()
    assert daemon.reading.saved_blocks == 0
    daemon.core.set_prefix_limits(DISK)
    daemon.ask(*SYSTEM, 2, 3)
    assert Daemon(before=daemon, limits=DISK).ask(*SYSTEM, 2, 3) == 13


def test_a_write_that_was_dropped_is_made_with_the_next_use() -> None:
    """And what is behind it can be found by another daemon again."""
    daemon = Daemon(limits=DISK)
    daemon.engine.drops = lambda change: change.saved.start == 0
    daemon.ask(*SYSTEM, 1)
    daemon.engine.drops = lambda _change: False
    daemon.ask(*SYSTEM, 2, 3)
    daemon.ask(*SYSTEM, 2, 3)
    assert len(daemon.engine.disk) == daemon.reading.saved_blocks
    assert Daemon(before=daemon, limits=DISK).ask(*SYSTEM, 2, 3) == 13


@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_long_text_is_read_by_several_steps(*, is_stateful: bool) -> None:
    """A step reads so many blocks and no more, and the row begins when all are there."""
    long = tuple(number % 190 for number in range(400))
    before = Daemon(is_stateful=is_stateful, limits=DISK, chunk_tokens=100)
    before.ask(*long)
    daemon = Daemon(is_stateful=is_stateful, limits=DISK, chunk_tokens=100, before=before)
    assert daemon.ask(*long) == 399
    loads = [sum(isinstance(one, LoadBlock) for one in plan.blocks) for plan in daemon.plans]
    assert [one for one in loads if one] == [32, 32, 32, 4]
    assert sum(bool(plan.prefill) for plan in daemon.plans) == 1


@pytest.mark.parametrize("is_stateful", [False, True])
def test_two_long_texts_that_do_not_fit_are_not_read_for_ever(*, is_stateful: bool) -> None:
    """Rows begin with what is in memory if there is no room to load more."""
    texts = [tuple((number * step) % 190 for number in range(400)) for step in (3, 7)]
    before = Daemon(is_stateful=is_stateful, limits=DISK, chunk_tokens=100)
    for text in texts:
        before.ask(*text)
    daemon = Daemon(
        is_stateful=is_stateful,
        limits=replace(DISK, max_bytes=450 * TOKEN_BYTES),
        chunk_tokens=100,
        before=before,
    )
    for text in texts:
        daemon.submit(*text)
    daemon.finish()
    assert len(only(SequenceFinished, daemon.events)) == 2


def test_prompts_that_begin_alike_are_compared_about_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most comparisons follow from a third row, and none is repeated at each step."""
    compared: list[int] = []

    def counted(block: tuple[int, ...], text: tuple[int, ...], at: int = 0, known: int = 0) -> int:
        common = common_tokens(block, text, at, known=known)
        compared.append(common - known + 1)
        return common

    for module in (prefix_cache, common_prefixes):
        monkeypatch.setattr(module, "common_tokens", counted)
    daemon = Daemon(max_b=32, chunk_tokens=1)
    base = tuple(number % 190 for number in range(500))
    for number in range(32):
        daemon.submit(*base, number, 50)
    daemon.step()
    assert sum(compared) < 2 * 32 * 500
    seen = len(compared)
    daemon.step(20)
    assert len(compared) - seen <= 20, "of its own text with the tree, once a step at the most"


def test_rows_without_a_leader_are_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps it takes until their turn comes."""
    daemon = Daemon(max_b=8, chunk_tokens=1)
    searched = 0
    leader_of = daemon.cache._common_prefixes.leader_of

    def counted(*args: object) -> object:
        nonlocal searched
        searched += 1
        return leader_of(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(daemon.cache._common_prefixes, "leader_of", counted)
    for number in range(8):
        daemon.submit(number, *range(50, 90))
    daemon.step(20)
    assert searched == 8


def test_books_are_read_without_looking_at_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """While rows run: it would take the longer the more is kept."""
    daemon = Daemon()
    daemon.ask(*SYSTEM, 1, 2, 3, 4, 5)
    daemon.submit(*SYSTEM, 2, max_tokens=8)
    daemon.step(2)
    shown = daemon.reading

    def never(_tree: BlockTree) -> object:
        raise AssertionError("all blocks are looked at")

    monkeypatch.setattr(BlockTree, "__iter__", never)
    assert daemon.reading == shown
    daemon.core.check_invariants(is_whole=False)
    row = daemon.cache._rows[0]
    row.pinned.pins += 1
    with pytest.raises(AssertionError, match="rows pin blocks"):
        daemon.core.check_invariants(is_whole=False)
    row.pinned.pins -= 1


def test_row_stops_waiting_when_its_leader_becomes_less_urgent() -> None:
    """Also when that changes while it waits: an urgent subscriber joins, or leaves."""
    daemon = Daemon(chunk_tokens=2)
    daemon.submit(*SYSTEM, 1)
    daemon.submit(*SYSTEM, 2)
    daemon.step()
    leader, follower = (daemon.cache._rows[slot] for slot in (0, 1))
    assert daemon.cache._common_prefixes.goes_on_waiting(follower)
    leader.sequence.subscribers[0].request = replace(
        leader.sequence.subscribers[0].request, priority=Priority.BATCH, arrived_s=1e6
    )
    assert leader.sequence.place > follower.sequence.place
    assert not daemon.cache._common_prefixes.goes_on_waiting(follower)


def test_snapshots_are_made_at_the_two_furthest_branch_points() -> None:
    """A prompt with many waiters is not cut, and its state copied, for each of them."""
    text = tuple(range(100, 160))
    daemon = Daemon(is_stateful=True, chunk_tokens=100, max_b=8)
    daemon.submit(*text, 1)
    asked = [daemon.submit(*text[:stop], number, 50, 51) for number, stop in enumerate(STOPS)]
    daemon.step()
    while 0 in daemon.cache._rows:
        daemon.step()
    chunks = [one for plan in daemon.plans for one in plan.prefill if one.slot_index == 0]
    assert len(chunks) == 4, "two branch points, the prompt's end, and its last token"
    daemon.finish()
    cached = dict(zip(STOPS, map(daemon.cached, asked), strict=True))
    assert (cached[50], cached[40]) == (50, 40)


def test_a_better_copy_on_disk_is_not_forgotten() -> None:
    """A row that does not stand where a block has state reads it rather than replace it."""
    daemon = Daemon(is_stateful=True, limits=DISK)
    daemon.ask(*SYSTEM, 1)
    daemon.core.clear_prefixes(is_disk_included=False)
    daemon.step()
    ends = {one.digest for one, _ in daemon.engine.disk.values() if one.has_state}
    # There is no room to read it while the row is looked up.
    daemon.core.set_prefix_limits(replace(DISK, max_bytes=0))
    daemon.submit(*SYSTEM, 1, 2, 3, 4, 5)
    daemon.events += daemon.core.admit(0.0)
    daemon.core.set_prefix_limits(DISK)
    daemon.finish()
    told = [one for plan in daemon.plans for one in plan.blocks]
    assert any(isinstance(one, LoadBlock) for one in told)
    forgotten = [one.digests for one in told if isinstance(one, ForgetSaved)]
    assert not ends & {digest for digests in forgotten for digest in digests}
    assert all(daemon.engine.disk[digest][0].has_state for digest in ends)


@pytest.mark.parametrize("is_stateful", [False, True])
def test_second_row_waits_for_its_own_blocks_too(*, is_stateful: bool) -> None:
    """Although the steps are full of another one's, and none of its own is on its way yet."""
    texts = [tuple((number * step) % 190 for number in range(400)) for step in (3, 7)]
    before = Daemon(is_stateful=is_stateful, limits=DISK, chunk_tokens=100)
    for text in texts:
        before.ask(*text)
    daemon = Daemon(is_stateful=is_stateful, limits=DISK, chunk_tokens=100, before=before)
    asked = [daemon.submit(*text) for text in texts]
    daemon.finish()
    assert [daemon.cached(one) for one in asked] == [399, 399]
