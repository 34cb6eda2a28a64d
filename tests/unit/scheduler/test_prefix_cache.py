"""Rows begin with what others have computed, wait for it where that is worth it, and leave their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chained_engine import STATE_BYTES, TOKEN_BYTES, ChainedEngine, said
from sequence_samples import LIMITS, batching_of, only

from machd.engine.block_protocol import LoadBlock, StoreBlock
from machd.engine.protocol import SamplingParams, StepPlan
from machd.errors import EngineFaultError
from machd.scheduler.continuous import continuous
from machd.scheduler.core import SchedulerCore
from machd.scheduler.events import Event, PromptReused, SequenceFinished, TokenGenerated
from machd.scheduler.pacing import PrefillPace
from machd.scheduler.prefix_cache import PrefixCache, PrefixShape
from machd.scheduler.prefix_limits import BlockCosts, PrefixLimits
from machd.scheduler.prefix_reading import PrefixReading
from machd.scheduler.sequence import Priority, SequenceRequest

PLENTY = PrefixLimits(100_000)
ALPHABET = 200
SYSTEM = tuple(range(100, 112))
"""Twelve tokens that prompts begin with."""


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
        costs = BlockCosts(TOKEN_BYTES, STATE_BYTES if is_stateful else 0)
        shape = PrefixShape(b"model", 4, costs, min_gain_tokens=3)
        saved = sorted((one for one, _ in self.engine.disk.values()), key=lambda one: one.start)
        self.cache = PrefixCache(shape, limits, saved)
        batching = batching_of(max_b=max_b, prefill_chunk_tokens=chunk_tokens)
        pace = PrefillPace(beside_decode=chunk_tokens, alone=chunk_tokens)
        arrangement = replace(continuous(LIMITS, batching), pace=pace)
        self.core = SchedulerCore(arrangement, self.cache)
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
            self.core.check_invariants()

    def finish(self) -> None:
        """Until nobody is left and nothing is to be done."""
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
        """What a sequence that has ended was told."""
        (end,) = [
            one for one in only(SequenceFinished, self.events) if one.sequence_id == sequence_id
        ]
        told = [
            one.cached_tokens
            for one in only(PromptReused, self.events)
            if one.sequence_id == sequence_id
        ]
        assert told == ([end.cached_tokens] if end.cached_tokens else [])
        return end.cached_tokens

    def answer(self, sequence_id: str) -> list[int]:
        """Its tokens."""
        tokens = only(TokenGenerated, self.events)
        return [one.token.token_id for one in tokens if one.sequence_id == sequence_id]

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were computed in all."""
        return sum(plan.prefill_tokens for plan in self.plans)

    @property
    def reading(self) -> PrefixReading:
        """What there is now."""
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
    """All of it but the last token, which nobody has computed."""
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
def test_who_comes_together_computes_what_they_share_once(
    followers: int, chunk_tokens: int, *, is_stateful: bool
) -> None:
    """Others wait for the first one's blocks, and compute nothing but their own."""
    daemon = Daemon(is_stateful=is_stateful, chunk_tokens=chunk_tokens)
    asked = [daemon.submit(*SYSTEM, number, 50, 51) for number in range(followers + 1)]
    daemon.finish()
    assert [daemon.cached(one) for one in asked] == [0, *[12] * followers]
    assert daemon.prefilled_tokens == 15 + 3 * followers


@pytest.mark.parametrize("is_stateful", [False, True])
def test_who_waits_for_one_that_leaves_goes_on_itself(*, is_stateful: bool) -> None:
    """With what that one has left: to the token it stood at."""
    daemon = Daemon(is_stateful=is_stateful, chunk_tokens=5)
    leader, second, third = (daemon.submit(*SYSTEM, number, 50) for number in range(3))
    daemon.step()
    daemon.events += daemon.core.abort((leader,), None, 0.0)
    daemon.finish()
    assert daemon.cached(second) == 5
    assert daemon.cached(third) == 12


def test_who_waits_for_blocks_that_are_lost_goes_on_itself() -> None:
    """Nobody waits for what does not come."""
    daemon = Daemon(chunk_tokens=5)
    daemon.engine.loses = lambda change: isinstance(change, StoreBlock)
    leader, second = (daemon.submit(*SYSTEM, number, 50) for number in range(2))
    daemon.finish()
    assert (daemon.cached(leader), daemon.cached(second)) == (0, 0)
    assert daemon.reading.blocks == 0


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("max_bytes", [0, 39, 80])
def test_nobody_waits_for_what_there_is_no_room_for(max_bytes: int, *, is_stateful: bool) -> None:
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


def test_nobody_waits_for_one_whose_turn_comes_later() -> None:
    """Who is in a hurry does not stand behind the prompt of one that is not."""
    daemon = Daemon()
    daemon.submit(*SYSTEM, 1, priority=Priority.BATCH)
    daemon.step()
    urgent = daemon.submit(*SYSTEM, 2, priority=Priority.INTERACTIVE)
    daemon.submit(*range(40, 70), priority=Priority.INTERACTIVE)
    daemon.step(2)  # the first makes sure of the block that is there
    assert [chunk.slot_index for chunk in daemon.plans[-1].prefill] == [1]
    daemon.finish()
    assert daemon.answer(urgent)


def test_who_has_a_longer_match_does_not_wait() -> None:
    """What is in memory already is not waited for."""
    daemon = Daemon(chunk_tokens=3)
    daemon.ask(*SYSTEM, 1)
    other = daemon.submit(*SYSTEM[:5], 7, 7, 7, 7, 7, 7, 7, 7)
    third = daemon.submit(*SYSTEM, 3)
    daemon.step()
    assert {chunk.start for chunk in daemon.plans[-1].prefill} <= {5, 12}
    daemon.finish()
    assert (daemon.cached(other), daemon.cached(third)) == (5, 12)


def test_nobody_waits_across_namespaces() -> None:
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


def test_an_aborted_prompt_leaves_its_state() -> None:
    """Where it stood, although no text ends there."""
    daemon = Daemon(is_stateful=True, chunk_tokens=4)
    leader = daemon.submit(*SYSTEM, 1)
    daemon.step(2)
    daemon.events += daemon.core.abort((leader,), None, 0.0)
    daemon.finish()
    assert daemon.ask(*SYSTEM, 1) == 8


def test_a_failed_row_leaves_nothing_more() -> None:
    """What was kept before its fault stays: it went into tokens that others may have, too."""
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
    """Nobody waits for it twice, and it is kept anew."""
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
    """What is on disk is found again."""
    limits = PrefixLimits(100_000, disk_bytes=100_000)
    daemon = Daemon(limits=limits)
    daemon.ask(*SYSTEM, 1)
    daemon.submit(*SYSTEM, 1, max_tokens=8)
    daemon.step(2)
    daemon.events += daemon.core.fail(EngineFaultError("planted"), 0.0)
    daemon.engine.reset()
    assert daemon.reading.bytes == 0
    assert daemon.ask(*SYSTEM, 1) == 12


def test_who_waits_is_not_looked_up_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the one that it waits for goes on."""
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
