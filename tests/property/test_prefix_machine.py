"""Any history of prompts that begin alike, of faults, limits and restarts keeps the blocks right.

A Hypothesis state machine plays the serving loop with a prefix cache on an engine whose keys and
values show what they were computed from. Texts are of two or three tokens and blocks of two to four,
so that they share, part and split all the time. Caches that are broken on purpose prove that the
machine would notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.engines.chained_engine import (
    STATE_BYTES,
    TOKEN_BYTES,
    Chained,
    ChainedDisk,
    ChainedEngine,
    said,
)
from support.engines.scripted_drafts import drafts_by
from support.programs.kv_subscriber import WorkerBlocks
from support.schedulers.sequence_samples import EagerPace, batching_of

from machd.engine.protocol.blocks import (
    BlockChange,
    DropBlocks,
    ForgetSaved,
    HeldBlock,
    LoadBlock,
    SaveBlock,
    SavedBlock,
    SplitBlock,
    StoreBlock,
)
from machd.engine.protocol.memory import MemoryReading
from machd.engine.protocol.step import SampledToken, ScoredPrompt, StepPlan, StepResult
from machd.engine_process.block_ledger import BlockLedger
from machd.errors import EngineFaultError
from machd.request.generation import SamplingParams
from machd.scheduler.block_observer import BlockObserver
from machd.scheduler.block_pool import BlockPool
from machd.scheduler.block_tree import Block, BlockTree, Walk
from machd.scheduler.common_prefixes import CommonPrefixes, PrefixRow
from machd.scheduler.config import NO_DRAFTS, DraftPolicy, SchedulerConfig, continuous
from machd.scheduler.events import (
    CacheDiagnosis,
    CacheReason,
    Event,
    FinishReason,
    OutputGenerated,
    PromptLookedUp,
    SequenceFinished,
)
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import SequenceRequest
from machd.scheduler.waiting import QueueLimits

Text = tuple[int, ...]

LIMITS = QueueLimits(
    max_queue=50, max_queue_tokens=5000, queue_timeout_s=1e9, request_timeout_s=1e9
)
NAMESPACES = st.sampled_from(["", "", "b"])
SELDOM = st.sampled_from([True, False, False, False])
"""For what makes an end of much: or no history would come to be long."""

RARELY = st.sampled_from([False] * 11 + [True])
TOKENS = st.sampled_from([1, 2, 3, 4, 5, 6] * 2 + [0])
"""Completions without tokens reuse and leave little: they are few, so that the others meet often."""

PUBLISHED_TOKENS = 3
"""Tokens of a published block, which is not the size of the tree's."""


@dataclass
class Record:
    """The machine's record of one sequence."""

    request: SequenceRequest
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    scored: ScoredPrompt | None = None
    finished: SequenceFinished | None = None

    @property
    def text(self) -> Text:
        """Its prompt and what was heard of its completion."""
        return (*self.request.prompt, *self.tokens)


CHUNKS = st.sampled_from([None, 1, 2, 3, 5, 8])
PREFIX_LIMITS = st.builds(
    PrefixLimits,
    max_bytes=st.sampled_from([0, 40, 80, 120, 200, 300, 300, 600, 600, 100_000, 100_000]),
    max_entries=st.sampled_from([None, None, None, None, 1, 2, 4]),
    left_bytes=st.sampled_from([0, 50]),
    disk_bytes=st.sampled_from([None, 100_000, 100_000, 100_000, 600, 200, 0]),
)


class PrefixMachine(RuleBasedStateMachine):
    """The serving loop's verbs in any order, for caches that can be cut."""

    is_stateful: ClassVar[bool] = False
    cache_class: ClassVar[type[PrefixCache]] = PrefixCache
    pool_class: ClassVar[type[BlockPool]] = BlockPool
    tree_class: ClassVar[type[BlockTree]] = BlockTree
    ledger_class: ClassVar[type[BlockLedger]] = BlockLedger

    def __init__(self) -> None:
        """Nothing yet; the first rule chooses the configuration."""
        super().__init__()
        self.records: list[Record] = []
        self.made: dict[str, set[Text]] = {}
        self.now_s = 0.0
        self.opened = self.hits = self.prefix_hits = 0
        self.is_disk_exact = self.is_lossless = True

    @initialize(
        alphabet=st.sampled_from([2, 2, 3]),
        block_tokens=st.integers(2, 4),
        min_gain_tokens=st.integers(1, 3),
        max_b=st.sampled_from([1, 2, 3, 4, 4]),
        chunk_tokens=CHUNKS,
        coalesce=st.sampled_from([False, False, True]),
        limits=PREFIX_LIMITS,
        is_late=st.booleans(),
        looks_ahead=st.booleans(),
        expected_state_bytes=st.sampled_from([STATE_BYTES, 1, 60]),
        least=st.sampled_from([(0, 0), (0, 0), (0, 7), (25, 0), (35, 7)]),
        moved=st.sampled_from([1, 2, 32]),
        drafts=st.sampled_from([DraftPolicy(3, is_batched=True), DraftPolicy(4), NO_DRAFTS]),
        draft_number=st.sampled_from([1, 2, 3, 4]),
        stop_tokens=st.sampled_from([(1,), (), ()]),
    )
    def configure(
        self,
        *,
        alphabet: int,
        block_tokens: int,
        min_gain_tokens: int,
        max_b: int,
        chunk_tokens: int | None,
        coalesce: bool,
        limits: PrefixLimits,
        is_late: bool,
        looks_ahead: bool,
        expected_state_bytes: int,
        least: tuple[int, int],
        moved: int,
        drafts: DraftPolicy,
        draft_number: int,
        stop_tokens: Text,
    ) -> None:
        """Any configuration."""
        self.stop_tokens = frozenset(stop_tokens)
        self.moved, self.drafts, self.draft_script = moved, drafts, drafts_by(draft_number)
        self.alphabet, self.limits, self.coalesce = alphabet, limits, coalesce
        state_bytes = expected_state_bytes if self.is_stateful else 0
        costs = BlockCosts(TOKEN_BYTES, state_bytes, *least)
        self.shape = PrefixConfig(b"model", block_tokens, costs, min_gain_tokens, 2)
        self.config = self._scheduler_config(max_b, chunk_tokens)
        self.engine_parts = {"is_late": is_late, "looks_ahead": looks_ahead}
        self._start({})

    def _scheduler_config(self, max_b: int, chunk_tokens: int | None) -> SchedulerConfig:
        batching = batching_of(
            max_b=max_b,
            prefill_chunk_tokens=chunk_tokens,
            coalesce=self.coalesce,
            shares_prefixes=not self.is_stateful,
        )
        pace = EagerPace(beside_decode=chunk_tokens, alone=chunk_tokens or 12)
        return replace(continuous(LIMITS, batching, self.drafts), pace=pace)

    def _start(self, disk: ChainedDisk) -> None:
        self.engine = ChainedEngine(
            is_stateful=self.is_stateful, alphabet=self.alphabet, **self.engine_parts
        )
        self.engine.disk, self.engine.draft_script = disk, self.draft_script
        saved = sorted((one for one, _ in disk.values()), key=lambda one: one.start)
        self.seen = WorkerBlocks()
        ledger = self.ledger_class(self.seen.apply, PUBLISHED_TOKENS, b"secret")
        self.cache = self.cache_class(self.shape, self.limits, observer=ledger)
        if self.pool_class is not BlockPool or self.tree_class is not BlockTree:
            tree = self.cache._tree = self.tree_class(self.shape.model_key)
            self.cache._pool = self.pool_class(tree, self.shape.costs, self.limits, ledger)
        tier = self.cache._pool.disk_tier
        tier.max_loads = tier.max_saves = self.moved
        self.cache._pool.find_saved(saved)
        self.core = Scheduler(self.config, self.cache)
        self.opened = self.hits = self.prefix_hits = 0

    # Rules

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=TOKENS,
        namespace=NAMESPACES,
        is_scored=RARELY,
        steps=st.integers(0, 3),
    )
    def submit(
        self,
        *,
        prompt: list[int],
        max_tokens: int,
        namespace: str,
        is_scored: bool,
        steps: int,
    ) -> None:
        """A prompt that is like no other, but for chance."""
        text = [one % self.alphabet for one in prompt]
        self._submit(text, max_tokens, namespace, is_scored=is_scored)
        self._run(steps)

    @rule(
        age=st.integers(0, 9),
        lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
        more=st.lists(st.integers(0, 2), max_size=6),
        max_tokens=TOKENS,
        is_foreign=st.sampled_from([False, False, False, True]),
        is_scored=RARELY,
        steps=st.integers(0, 3),
    )
    def submit_alike(
        self,
        *,
        age: int,
        lengths: list[int],
        more: list[int],
        max_tokens: int,
        is_foreign: bool,
        is_scored: bool,
        steps: int,
    ) -> None:
        """Beginnings of a known text, and other ends than it has."""
        if not self.records:
            return
        known = self.records[-1 - age % len(self.records)]
        own = known.request.cache_namespace
        namespace = ("b" if own == "" else "") if is_foreign else own
        for index, length in enumerate(lengths):
            end = [(one + index) % self.alphabet for one in more]
            text = [*known.text[:length], *end]
            self._submit(text, max_tokens, namespace, is_scored=is_scored)
        self._run(steps)

    @rule(steps=st.integers(0, 2))
    def submit_next_turns(self, steps: int) -> None:
        """Continue a finished text, as a chat does."""
        for record in [one for one in self.records[-3:] if one.finished is not None]:
            self._submit([*record.text, 0], 2, record.request.cache_namespace)
        self._run(steps)

    @rule(age=st.integers(0, 6))
    def abort(self, age: int) -> None:
        """Abort a waiting or running sequence."""
        opened = [one for one in self.records if one.finished is None]
        if opened:
            record = opened[-1 - age % len(opened)]
            self._note(self.core.abort((record.request.sequence_id,), None, self.now_s))
            assert record.finished is not None

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=6, max_size=24),
        age=st.integers(0, 9),
        length=st.integers(0, 20),
        computed=st.integers(1, 2),
        steps=st.integers(0, 2),
    )
    def cancel_prompt_and_submit_it_again(
        self, prompt: list[int], age: int, length: int, computed: int, steps: int
    ) -> None:
        """A client leaves while its prompt is computed, and asks for the same again."""
        known = self.records[-1 - age % len(self.records)].text if self.records else ()
        text = [*known[:length], *[one % self.alphabet for one in prompt]]
        self._submit(text, 1, "")
        record = self.records[-1]
        self._run(computed)
        if record.finished is None:
            self._cancel(record)
        self._submit(text, 1, "")
        self._run(steps)

    @rule()
    def step(self) -> None:
        """A step that goes well."""
        self._step()

    @rule(steps=st.integers(2, 8))
    def run_on(self, steps: int) -> None:
        """Some steps in a row."""
        self._run(steps)

    @rule(made=st.sampled_from([0, 0, 0, 1, 2, 9]), is_now=SELDOM)
    def step_with_engine_fault(self, made: int, *, is_now: bool) -> None:
        """The step raises when some of its changes are made."""
        if not is_now:
            return
        self.engine.makes_changes = made
        self._step()
        self.engine.makes_changes = None
        self.is_disk_exact = False

    @rule(slots=st.sets(st.integers(0, 3), min_size=1))
    def step_with_row_faults(self, slots: set[int]) -> None:
        """Rows fail, others go on."""
        self.engine.failing_slots = slots
        self._step()
        self.engine.failing_slots = set()

    @rule(lost=st.sets(st.integers(0, 5), min_size=1), is_written=st.booleans())
    def step_with_losses(self, lost: set[int], *, is_written: bool) -> None:
        """Some stores and loads go wrong, and the disk tier may miss what it is given."""
        counts = iter(range(1000))
        self.engine.loses = lambda _change: next(counts) in lost
        self.engine.writes = is_written
        self.is_lossless = False
        self._step()
        self.engine.loses = lambda _change: False
        self.engine.writes = True
        self.is_disk_exact = self.is_disk_exact and is_written

    @rule(dropped=st.sets(st.integers(0, 5), min_size=1), steps=st.integers(1, 3))
    def step_with_dropped_writes(self, dropped: set[int], steps: int) -> None:
        """The disk tier misses some of what it is given, and says so later."""
        counts = iter(range(1000))
        self.engine.drops = lambda _change: next(counts) in dropped
        self._run(steps)
        self.engine.drops = lambda _change: False

    @rule(available_bytes=st.sampled_from([None, None, None, 0, 40, 1000, 1000]))
    def observe_memory(self, available_bytes: int | None) -> None:
        """The machine has more or less left."""
        reading = MemoryReading(0, 0, 0, 0, available_bytes=available_bytes)
        self.core.observe_memory(reading)

    @rule(missing_bytes=st.sampled_from([1, 40, 1000]), times=st.integers(1, 3), is_now=SELDOM)
    def lack_memory(self, missing_bytes: int, times: int, *, is_now: bool) -> None:
        """Steps lack memory: blocks are evicted, then sequences leave their slots."""
        self._note(self.core.admit(self.now_s))
        for _ in range(times if is_now else 0):
            if self.core.active_loops:
                _, events = self.core.yield_memory(missing_bytes, self.now_s)
                self._note(events)
                self._forget_reuse_of_waiting()

    @rule(is_now=SELDOM)
    def suspend(self, *, is_now: bool) -> None:
        """All that runs gives up its slots, as for another config."""
        if is_now:
            self.core.suspend()
            self._forget_reuse_of_waiting()

    @rule(limits=PREFIX_LIMITS, is_now=SELDOM)
    def set_limits(self, limits: PrefixLimits, *, is_now: bool) -> None:
        """Other limits, at any time."""
        if is_now and (limits.disk_bytes is None) == (self.limits.disk_bytes is None):
            self.limits = limits
            self.core.set_prefix_limits(limits)

    @rule(is_disk_included=st.booleans(), is_now=SELDOM)
    def clear(self, *, is_disk_included: bool, is_now: bool) -> None:
        """Clear every block that no row holds."""
        if not is_now:
            return
        kept = self.cache._pool
        count = self.core.clear_prefixes(is_disk_included=is_disk_included)
        assert count >= 0
        pinned = {block for row in self.cache._rows.values() for block in row.pinned.path()}
        pinned |= {block for row in self.cache._rows.values() for block in row.tip.path()}
        assert set(kept._by_id.values()) <= pinned
        assert not is_disk_included or not kept.disk_tier.count

    @rule(missing=st.sets(st.integers(0, 9), max_size=3))
    def lose_files(self, missing: set[int]) -> None:
        """Files go away under a running daemon: what is loaded of them is lost, as in a failed load."""
        self._lose_files(missing)
        self.is_disk_exact = self.is_lossless = False

    @rule(missing=st.sets(st.integers(0, 9), max_size=3), asked=st.integers(0, 3), is_now=SELDOM)
    def crash(self, missing: set[int], asked: int, *, is_now: bool) -> None:
        """A new daemon finds what is on disk, with holes in it, and may be asked the same again."""
        if not is_now:
            return
        for record in self.records:
            if record.finished is None:
                record.finished = SequenceFinished("", FinishReason.ERROR, None, 0, 0, 0, 0.0)
        disk = dict(self.engine.disk)
        self._start(disk)
        self.is_disk_exact = True
        self._lose_files(missing)
        self._start(self.engine.disk)
        for record in self.records[-asked:] if asked else []:
            self._submit(record.text, 1, record.request.cache_namespace)

    @rule(max_b=st.sampled_from([1, 2, 3, 4, 4]), chunk_tokens=CHUNKS, is_now=SELDOM)
    def change_config(self, max_b: int, chunk_tokens: int | None, *, is_now: bool) -> None:
        """Finish running sequences, then apply another config with the same blocks."""
        if not is_now:
            return
        self.core.hold_admission()
        self._run_until(lambda: self.core.is_at_rest)
        self.config = self._scheduler_config(max_b, chunk_tokens)
        self._note(self.core.apply_config(self.config, self.now_s))
        self.engine.reset()

    @rule(is_now=SELDOM)
    def drain(self, *, is_now: bool) -> None:
        """Finish all sequences now and then."""
        if is_now:
            self._drain()

    def teardown(self) -> None:
        """Left alone, everything ends."""
        if hasattr(self, "core"):
            self._drain()

    # Invariants

    @invariant()
    def books_add_up(self) -> None:
        """The scheduler's and the cache's own."""
        self.core.check_invariants()
        reading = self.core.prefix_reading
        assert reading is not None
        assert reading.queries == reading.hits + reading.prefix_hits + reading.misses == self.opened
        assert (reading.hits, reading.prefix_hits) == (self.hits, self.prefix_hits)
        assert reading.pinned_bytes <= reading.bytes
        for row in self.cache._rows.values():
            assert not self.is_lossless or row.pinned.is_usable, "rows keep what they hold"
            assert row.leader is None or not row.leader.sequence.is_prefilled, "that one is done"
        assert reading.blocks >= reading.entries >= (1 if reading.blocks else 0)

    @invariant()
    def memory_is_within_its_limits(self) -> None:
        """Blocks beyond a limit are pinned or pending."""
        kept = self.cache._pool
        can_go = any(block.is_evictable for block in kept.tree)
        assert kept.bytes <= kept.limit_bytes or not can_go
        assert kept.limit_bytes <= self.limits.max_bytes
        if self.limits.max_entries is not None:
            assert kept.entries <= self.limits.max_entries or not can_go
        if self.limits.disk_bytes is not None:
            assert kept.disk_tier.file_bytes <= self.limits.disk_bytes

    @invariant()
    def blocks_are_the_engine_s(self) -> None:
        """Once the changes that are queued are made, the engine has what the tree has."""
        block_ids = set(self.engine.blocks)
        unsettled: set[int] = set()
        for change in self.cache.changes:
            _foresee(change, block_ids, unsettled)
        kept = self.cache._pool
        assert block_ids == set(kept._by_id)
        for block_id, block in kept._by_id.items():
            if block_id not in unsettled:
                self._check_content(block, self.engine.blocks[block_id])
        if not unsettled:
            counted = self.shape.costs.counted
            assert kept.bytes == sum(counted(one.nbytes) for one in self.engine.blocks.values())

    @invariant()
    def published_blocks_are_those_in_memory(self) -> None:
        """A subscriber knows every text that the engine has, and none that is in no memory."""
        held: list[Text] = []
        in_memory: list[Text] = []
        for block in self.cache._tree:
            text = tuple(token for one in block.path() for token in one.token_ids)
            first = block.start // PUBLISHED_TOKENS + 1
            for count in range(first, block.stop // PUBLISHED_TOKENS + 1):
                in_memory += [text[: count * PUBLISHED_TOKENS]] * block.is_in_memory
                held += [text[: count * PUBLISHED_TOKENS]] * block.is_held
        published = Counter(self.seen.texts.values())
        assert Counter(held) <= published <= Counter(in_memory)

    @invariant()
    def files_are_the_tier_s(self) -> None:
        """After the queued changes no file is on disk that the index lacks."""
        digests = {digest: saved for digest, (saved, _) in self.engine.disk.items()}
        for change in self.cache.changes:
            if isinstance(change, SaveBlock):
                digests[change.saved.digest] = change.saved
            if isinstance(change, ForgetSaved):
                for digest in change.digests:
                    digests.pop(digest, None)
        blocks = {one.digest: one for one in self.cache._tree if one.is_saved}
        assert digests.keys() <= blocks.keys()
        told = digests.keys() | set(self.engine.unsaved)
        assert not self.is_disk_exact or told >= blocks.keys(), "what is missed is told"
        for digest, saved in digests.items():
            block = blocks[digest]
            assert (saved.start, saved.token_ids) == (block.start, block.token_ids)
            assert saved.has_state == block.has_state

    @invariant()
    def completions_are_right(self) -> None:
        """Tokens match those of an engine that computes every prompt."""
        for record in self.records:
            expected = list(record.request.prompt)
            for token in record.tokens:
                assert token == said(tuple(expected), self.alphabet)
                expected.append(token)

    def _check_content(self, block: Block, content: Chained) -> None:
        text: Text = ()
        for one in block.path():
            assert one.start == len(text)
            text += one.token_ids
        assert content.texts == tuple(text[: end + 1] for end in range(block.start, block.stop))
        if self.is_stateful:
            assert (content.state is not None) == block.has_state
            assert content.state in {None, text}
        assert self.shape.costs.counted(content.nbytes) == block.nbytes

    # The serving loop

    def _submit(
        self, prompt: Iterable[int], max_tokens: int, namespace: str, *, is_scored: bool = False
    ) -> None:
        number = len(self.records)
        request = SequenceRequest(
            sequence_id=f"s{number}",
            group_id=f"g{number}",
            prompt=tuple(prompt)[:24],
            sampling=SamplingParams(temperature=0.0, prompt_logprobs=0 if is_scored else None),
            max_tokens=max_tokens,
            stop_token_ids=self.stop_tokens,
            arrived_s=self.now_s,
            namespace=namespace,
            cache_namespace=namespace,
        )
        self.records.append(Record(request))
        self._note(self.core.submit((request,), self.now_s))

    def _cancel(self, record: Record) -> None:
        """Abort a sequence; of a prompt that is computed in part, all of that is there afterwards, where there is room."""
        sequence = self.core._open[record.request.sequence_id]
        rows = [one for one in self.cache._rows.values() if one.sequence is sequence]
        is_last = len(sequence.subscribers) == 1
        must_keep = [one for one in rows if is_last and one.is_open and self._can_keep(one)]
        self._note(self.core.abort((record.request.sequence_id,), None, self.now_s))
        for row in must_keep:
            walk = self.cache._tree.walk(row.root, record.request.prompt)
            assert self.cache._usable(walk.block, walk.tokens).is_usable
            assert self.cache._usable(walk.block, walk.tokens).stop >= sequence.prefilled_tokens

    def _can_keep(self, row: PrefixRow) -> bool:
        """Return whether nothing hinders all that a row in prefill has computed from being kept."""
        pool, prompt = self.cache._pool, row.sequence.request.prompt
        walk = self.cache._tree.walk(row.root, prompt)
        costs, blocks = self.shape.costs, len(prompt) // self.shape.block_tokens + 3
        more_bytes = blocks * costs.of(self.shape.block_tokens, has_state=False)
        more_bytes += 2 * costs.of(1, has_state=True)
        max_entries = self.limits.max_entries
        has_room = pool.bytes + more_bytes <= pool.limit_bytes
        has_room = has_room and (max_entries is None or pool.entries < max_entries)
        is_splittable = walk.block.is_held or walk.tokens == walk.block.stop
        # State that is on disk alone may have to be read before more is stored behind it.
        is_in_memory = row.tip.is_usable and not (self.is_stateful and self.limits.disk_bytes)
        return has_room and is_splittable and is_in_memory and not row.sequence.is_prefilled

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        self.now_s += 1.0
        self._note(self.core.admit(self.now_s))
        plan = self.core.plan()
        assert plan == self.core.plan(), "planning changes nothing"
        assert not self.core.active_loops or not plan.is_empty, "who runs gets on"
        self._check_opening(plan)
        self._check_moves(plan.blocks)
        try:
            result = self.engine.run(plan)
        except RuntimeError:
            self._note(self.core.fail(EngineFaultError("planted"), self.now_s))
            self.engine.reset()
            return
        self._remember_computed()
        lost = set(result.lost_blocks)
        self._commit(plan, result)
        assert not lost & set(self.cache._pool._by_id), "what is lost is not kept"

    def _check_moves(self, changes: tuple[BlockChange, ...]) -> None:
        """Not more is read and written at once than a step may; what is cut is written besides."""
        assert sum(isinstance(one, LoadBlock) for one in changes) <= self.moved
        saves = sum(isinstance(one, SaveBlock) for one in changes)
        assert saves <= self.moved + 2 * sum(isinstance(one, SplitBlock) for one in changes)

    def _check_opening(self, plan: StepPlan) -> None:
        """A reused prefix was computed in the namespace, and is not the whole of what is to be computed."""
        for chunk in plan.prefill:
            sequence = self.core._running.slots.at(chunk.slot_index)
            assert sequence is not None
            if chunk.reused is None:
                continue
            assert not sequence.asks_prompt_logprobs, "a scored prompt is computed whole"
            prompt, namespace = sequence.prefill_token_ids, sequence.request.cache_namespace
            reused = chunk.reused.token_ids
            assert 0 < len(reused) < len(prompt)
            assert reused == prompt[: len(reused)]
            assert reused in self.made.get(namespace, set()), "nobody there has computed that"

    def _remember_computed(self) -> None:
        for sequence in self.core._running.slots:
            assert sequence.slot_index is not None
            row = self.engine.rows.get(sequence.slot_index)
            if row is not None:
                self.made.setdefault(sequence.request.cache_namespace, set()).update(row.texts)

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        for chunk in plan.prefill:
            if chunk.opens and not chunk.resumed_tokens:  # that is told of prompts
                sequence = self.core._running.slots.at(chunk.slot_index)
                assert sequence is not None
                self.opened += 1
                if chunk.reused is not None:
                    is_whole = chunk.start == sequence.prompt_tokens - 1
                    self.hits, self.prefix_hits = (
                        self.hits + is_whole,
                        self.prefix_hits + (not is_whole),
                    )
        self._note(self.core.commit(plan, result, self.now_s, duration_s=0.01))

    def _note(self, events: Iterable[Event]) -> None:
        records = {one.request.sequence_id: one for one in self.records}
        for event in events:
            match event:
                case OutputGenerated(sequence_id, SampledToken() as token):
                    records[sequence_id].tokens.append(token.token_id)
                case PromptLookedUp(sequence_id, diagnosis):
                    record = records[sequence_id]
                    assert not record.cached_tokens, "told once"
                    assert not record.tokens, "and before its first token"
                    record.cached_tokens = diagnosis.cached_tokens
                    self._check_cached(record)
                    self._check_diagnosis(record.request, diagnosis)
                case OutputGenerated(sequence_id, ScoredPrompt() as scored):
                    record = records[sequence_id]
                    assert not record.tokens, "before its first token"
                    told = [(one.position, one.token_id) for one in scored.logprobs]
                    assert told == [*enumerate(record.request.prompt[1:], start=1)]
                    record.scored = scored
                case SequenceFinished():
                    record = records[event.sequence_id]
                    assert record.finished is None, "a sequence ends once"
                    assert event.cached_tokens == record.cached_tokens
                    record.finished = event
                    if event.reason is FinishReason.LENGTH:
                        assert len(record.tokens) == record.request.max_tokens
                        is_scored = record.request.sampling.prompt_logprobs is not None
                        assert (record.scored is not None) == is_scored
                case _:
                    pass

    def _forget_reuse_of_waiting(self) -> None:
        """A sequence that was suspended before its first token looks its prompt up again, and tells."""
        records = {one.request.sequence_id: one for one in self.records}
        for sequence in self.core._waiting:
            for subscriber in sequence.subscribers if not sequence.completion_tokens else ():
                records[subscriber.sequence_id].cached_tokens = 0

    def _check_cached(self, record: Record) -> None:
        prompt = record.request.prompt
        assert record.cached_tokens < len(prompt)
        made = self.made.get(record.request.cache_namespace, set())
        assert not record.cached_tokens or prompt[: record.cached_tokens] in made

    def _check_diagnosis(self, request: SequenceRequest, told: CacheDiagnosis) -> None:
        """What a reason says was computed elsewhere, or before, was."""
        prompt, parted = request.prompt, told.parted_at_tokens
        here = self.made.get(request.cache_namespace, set())
        assert told.cached_tokens <= parted < len(prompt)
        assert not parted or prompt[:parted] in here
        assert told.client_reason is not CacheReason.OTHER_NAMESPACE
        others = [
            one
            for name, made in self.made.items()
            if name != request.cache_namespace
            for one in made
        ]
        goes_on = [one for one in here if len(one) > parted and one[:parted] == prompt[:parted]]
        truth = {
            CacheReason.WHOLE: told.cached_tokens == len(prompt) - 1,
            CacheReason.CONTINUED: parted > 0,
            CacheReason.FIRST_SEEN: parted == 0,
            CacheReason.DIVERGED: any(one[parted] != prompt[parted] for one in goes_on),
            CacheReason.EVICTED: prompt[: told.cached_tokens + 1] in here,
            CacheReason.KIND_CANNOT: told.cached_tokens < parted,
            CacheReason.OTHER_NAMESPACE: prompt[: parted + 1] in others,
            CacheReason.PROMPT_LOGPROBS: request.sampling.prompt_logprobs is not None,
        }
        assert truth[told.reason], "there are neither adapters nor images"

    def _lose_files(self, missing: set[int]) -> None:
        digests = list(self.engine.disk)
        for index in missing:
            if digests:
                self.engine.disk.pop(digests[index % len(digests)], None)

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(1200):
            if is_done():
                return
            self._step()
        raise AssertionError("it never ends")

    def _drain(self) -> None:
        """Without newcomers everything ends within the steps that its tokens and blocks take."""
        left = [one for one in self.records if one.finished is None]
        tokens = sum(len(one.request.prompt) + one.request.max_tokens for one in left)
        steps = 8 + 8 * len(left) + 4 * tokens + len(self.cache._pool._by_id)
        while self.core.running_count + self.core.waiting_count:
            self._step()
            steps -= 1
            assert steps > 0, "everything ends"
        while self.cache.changes or not self.core.is_at_rest:
            self._step()
            steps -= 1
            assert steps > 0, "and nothing is left to be done"
        assert all(one.finished is not None for one in self.records)
        assert self.core.plan().is_empty
        assert not any(block.pins for block in self.cache._tree)
        assert not any(root.pins for root in self.cache._tree._roots.values())
        self.books_add_up()
        self.blocks_are_the_engine_s()
        self.files_are_the_tier_s()


def _foresee(change: BlockChange, block_ids: set[int], unsettled: set[int]) -> None:
    """Make a change to the numbers of blocks."""
    match change:
        case StoreBlock() | LoadBlock():
            block_ids.add(change.block_id)
            unsettled.add(change.block_id)
        case SplitBlock():
            assert change.block_id in block_ids, "what is cut is there"
            block_ids.add(change.head_id)
            unsettled |= {change.block_id, change.head_id}
        case DropBlocks():
            block_ids.difference_update(change.block_ids)
            unsettled.update(change.block_ids)
        case _:
            pass


class StatefulPrefixMachine(PrefixMachine):
    """The same for caches of which a row can only begin where state was kept."""

    is_stateful = True


SETTINGS = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = SETTINGS
TestStatefulPrefixMachine = StatefulPrefixMachine.TestCase
TestStatefulPrefixMachine.settings = SETTINGS


class _OfManyHistories(PrefixMachine):
    """The same, of ten times as many."""


class _StatefulOfManyHistories(StatefulPrefixMachine):
    """The same, of ten times as many."""


TestManyHistories = pytest.mark.long(_OfManyHistories.TestCase)
TestManyHistories.settings = settings(SETTINGS, max_examples=500)
TestManyStatefulHistories = pytest.mark.long(_StatefulOfManyHistories.TestCase)
TestManyStatefulHistories.settings = settings(SETTINGS, max_examples=500)


class PinsNothing(BlockPool):
    """Pins no block of running rows."""

    def pin(self, block: Block) -> None:
        """Hold nothing."""

    def unpin(self, block: Block) -> None:
        """Nothing was held."""


class EvictsPinned(BlockPool):
    """Evicts pinned blocks when there is no room."""

    def _evict(self, keep: Collection[Block] = ()) -> Block | None:
        for block in sorted(self.children_first(), key=lambda one: not one.pins):
            if block.is_held and not block.memory_children and block not in keep:
                self._drop(block)
                return block.before
        return None


class SplitsElsewhere(BlockPool):
    """Tells the engine another place than the tree."""

    def split(self, block: Block, at: int) -> Block:
        """Cut one token from the end instead."""
        last = len(block.token_ids) - 1
        head = super().split(block, at)
        self.changes[:] = [
            replace(one, at=last) if isinstance(one, SplitBlock) else one for one in self.changes
        ]
        return head


class CountsTwice(BlockPool):
    """Counts what comes into memory two times."""

    def _enter_memory(self, block: Block) -> None:
        super()._enter_memory(block)
        self.counts.bytes += block.nbytes


class KnowsNoLimits(BlockPool):
    """Always has room."""

    def _make_room(self, nbytes: int, *, after: Block, besides: Block | None = None) -> bool:
        del nbytes, after, besides
        return True

    def _trim(self) -> None:
        pass


class NeverTellsTheEngine(BlockPool):
    """Counts blocks out that the engine keeps."""

    def _drop(self, block: Block) -> None:
        self._leave_memory(block, is_told=False)
        if not block.is_saved:
            self._remove(block)


class KeepsLostBlocks(BlockPool):
    """Does not listen to what went wrong."""

    def confirm(
        self, held: Iterable[HeldBlock], lost: Iterable[int], unsaved: Iterable[bytes] = ()
    ) -> None:
        """All is well."""
        lost_ones = [HeldBlock(block_id, 10) for block_id in lost if block_id in self._by_id]
        super().confirm([*held, *lost_ones], (), unsaved)


class BelievesInWrites(BlockPool):
    """Does not listen to what is not on disk."""

    def _take_as_unsaved(self, digest: bytes) -> None:
        del digest


class ReadsAllAtOnce(BlockPool):
    """A step reads as much as there is."""

    def load(self, blocks: Iterable[Block]) -> bool:
        """One step's reads after the other's."""
        self.disk_tier.max_loads = 1000
        return super().load(blocks)


class SharesNamespaces(BlockTree):
    """Has one root for all namespaces."""

    def root(self, namespace: str) -> Block:
        """The one root."""
        del namespace
        return super().root("")


class FollowsOneTokenOnly(BlockTree):
    """Believes that a block fits if its first token does."""

    def walk(self, start: Block, text: Text) -> Walk:
        """Go down without comparing."""
        block, at = start, start.stop
        while at < len(text) and text[at] in block.children:
            block = block.children[text[at]]
            at = min(block.stop, len(text))
        return Walk(block, at)


class StoresAhead(PrefixCache):
    """Takes what is not computed yet for computed."""

    def _keep_prompt(self, row: PrefixRow) -> None:
        upto = min(row.sequence.prefilled_tokens + 1, row.sequence.prompt_tokens)
        self._extend(row, row.sequence.prefill_token_ids, upto, position=None, is_end=True)


class ReusesAll(PrefixCache):
    """Leaves no token of a prompt to compute."""

    def enter(self, sequence: Sequence) -> None:
        """Look the whole prompt up."""
        super().enter(sequence)
        row = self._rows[sequence.slot_index or 0]
        row.beginning = sequence.prefill_token_ids
        self._look_up(row)


class _LeadsForGood(CommonPrefixes):
    def _is_leading(self, row: PrefixRow) -> bool:
        return row.tip.is_usable


class DropsCancelledPrompts(PrefixCache):
    """Keeps of a prompt that is cancelled what a row that failed leaves."""

    def leave(self, sequence: Sequence, *, keeps: bool) -> None:
        """Store nothing more of a prompt that is not whole."""
        super().leave(sequence, keeps=keeps and sequence.is_prefilled)


class WaitsForGood(PrefixCache):
    """Keeps a row waiting until its leader has left."""

    def __init__(
        self,
        shape: PrefixConfig,
        limits: PrefixLimits,
        saved: Iterable[SavedBlock] = (),
        *,
        observer: BlockObserver | None = None,
    ) -> None:
        """Replace the choice of leaders."""
        super().__init__(shape, limits, saved, observer=observer)
        self._common_prefixes = _LeadsForGood(self._rows, shape)


class NeverLetsGo(PrefixCache):
    """Rows hold their blocks after their end."""

    def _let_go(self, row: PrefixRow) -> None:
        self._pool.unpin(row.root)


class NeedsNoState(PrefixCache):
    """Opens rows where no state was kept."""

    def _usable(self, block: Block, tokens: int) -> Block:
        return block if block.stop <= tokens else block.before


class BeginsTooSoon(PrefixCache):
    """Does not wait for blocks that are on their way."""

    def is_ready(self, sequence: Sequence) -> bool:
        """Always."""
        del sequence
        return True


def _settled_with(more: int) -> Callable[[Sequence, int], None]:
    """Tokens that the caches are believed to hold besides."""

    def settle(sequence: Sequence, tokens: int) -> None:
        sequence.settled_tokens = sequence.completion_tokens + tokens - 1 + more

    return settle


def _settled_plainly(sequence: Sequence, tokens: int) -> None:
    """Counts no accepted token ahead as settled."""
    del tokens
    sequence.settled_tokens = sequence.completion_tokens


class KeepsStateOfMore(PrefixCache):
    """Takes the state of a row that has computed more than the text for the text's."""

    def _extend(
        self, row: PrefixRow, text: Text, upto: int, *, position: int | None, is_end: bool
    ) -> None:
        if position is not None and position > len(text):
            position, is_end = len(text), True
        super()._extend(row, text, upto, position=position, is_end=is_end)


class TellsOfNoRemoval(BlockLedger):
    """Publishes no block that leaves."""

    def left(self, block: Block) -> None:
        """Tell nothing."""


class IgnoresSplits(BlockLedger):
    """Leaves all published blocks with the tail."""

    def was_split(self, head: Block, tail: Block) -> None:  # noqa: ARG002 - of the port
        """Divide nothing."""
        self._hashes[head] = ()


class HashesWithoutNamespace(BlockLedger):
    """Continues no namespace's digest."""

    def _hash(self, previous: bytes, tokens: Text) -> int:
        return super()._hash(previous if len(previous) == 8 else b"", tokens)


POSITIONAL = [
    PinsNothing,
    EvictsPinned,
    SplitsElsewhere,
    CountsTwice,
    KnowsNoLimits,
    NeverTellsTheEngine,
    KeepsLostBlocks,
    BelievesInWrites,
    ReadsAllAtOnce,
    SharesNamespaces,
    FollowsOneTokenOnly,
    StoresAhead,
    ReusesAll,
    DropsCancelledPrompts,
    WaitsForGood,
    NeverLetsGo,
    BeginsTooSoon,
    TellsOfNoRemoval,
    IgnoresSplits,
    HashesWithoutNamespace,
]
STATEFUL = [NeedsNoState, StoresAhead, DropsCancelledPrompts, KeepsStateOfMore]
FOUND_LATE = {
    (PrefixMachine, EvictsPinned),
    (PrefixMachine, IgnoresSplits),
    (PrefixMachine, HashesWithoutNamespace),
    (PrefixMachine, ReadsAllAtOnce),
    (PrefixMachine, FollowsOneTokenOnly),
    (StatefulPrefixMachine, KeepsStateOfMore),
    (StatefulPrefixMachine, DropsCancelledPrompts),
}
"""It takes many examples to find them; another fault of each class is found in every run."""


@pytest.mark.parametrize(
    ("machine", "broken"),
    [
        pytest.param(machine, one, marks=pytest.mark.long if (machine, one) in FOUND_LATE else ())
        for machine, faults in ((PrefixMachine, POSITIONAL), (StatefulPrefixMachine, STATEFUL))
        for one in faults
    ],
)
def test_the_machine_notices_a_broken_cache(
    machine: type[PrefixMachine], broken: type[PrefixCache | BlockPool | BlockTree | BlockLedger]
) -> None:
    """Each way of being wrong shows, so a green machine means something."""

    class Broken(machine):  # type: ignore[valid-type, misc]
        cache_class = broken if issubclass(broken, PrefixCache) else PrefixCache
        pool_class = broken if issubclass(broken, BlockPool) else BlockPool
        tree_class = broken if issubclass(broken, BlockTree) else BlockTree
        ledger_class = broken if issubclass(broken, BlockLedger) else BlockLedger

    _check_that_it_fails(Broken)


@pytest.mark.parametrize(
    ("machine", "settle"),
    [
        (PrefixMachine, _settled_with(1)),
        pytest.param(StatefulPrefixMachine, _settled_plainly, marks=pytest.mark.long),  # found late
    ],
)
def test_the_machine_notices_a_wrong_count_of_what_is_computed(
    machine: type[PrefixMachine],
    settle: Callable[[Sequence, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settled tokens after drafts have to match the engine's caches."""
    monkeypatch.setattr(Sequence, "settle", settle)
    _check_that_it_fails(machine)


def test_the_machine_notices_a_prefix_that_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that would read a neighbour's tokens for its own shows."""
    right = CommonPrefixes._sharable_tokens
    monkeypatch.setattr(
        CommonPrefixes, "_sharable_tokens", lambda *rows: right(*rows) and right(*rows) + 2
    )
    _check_that_it_fails(PrefixMachine)


def _check_that_it_fails(machine: type[PrefixMachine]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=20_000,
                stateful_step_count=40,
                deadline=None,
                database=None,
                derandomize=True,
                report_multiple_bugs=False,
                phases=[Phase.generate],
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
