"""Rows that begin alike share a prefix, and the KV budget holds it once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engines.chained_engine import TOKEN_BYTES, ChainedEngine
from support.schedulers.sequence_samples import LIMITS, batching_of, only

from machd.engine.protocol.slab_size import class_columns
from machd.engine.protocol.step import SharedPrefix, StepPlan
from machd.request.generation import SamplingParams
from machd.scheduler.config import continuous
from machd.scheduler.events import Event, SequenceFinished
from machd.scheduler.pacing import StepPace
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest

SYSTEM = tuple(7 + number % 90 for number in range(500))
SHARED_TOKENS = 448
"""The system prompt's whole blocks of 64 tokens."""

OWN_TOKENS = 500 + 4 + 40 - SHARED_TOKENS
"""What a row has for itself, of four prompt tokens and forty of an answer."""


class Daemon:
    """A scheduler with a prefix cache and an engine that checks what rows share."""

    def __init__(
        self,
        *,
        max_b: int = 16,
        budget_columns: int = 100_000,
        has_cache: bool = True,
    ) -> None:
        """Start idle."""
        self.engine = ChainedEngine(
            is_stateful=False, alphabet=200, is_late=False, looks_ahead=False
        )
        costs = BlockCosts(TOKEN_BYTES, 0, 0, 0)
        shape = PrefixConfig(b"model", 64, costs)
        cache = PrefixCache(shape, PrefixLimits(1_000_000)) if has_cache else None
        batching = batching_of(max_b=max_b, budget_tokens=budget_columns, shares_prefixes=True)
        config = replace(continuous(LIMITS, batching), pace=StepPace(beside_decode=100, alone=1000))
        self.core = Scheduler(config, cache)
        self.events: list[Event] = []
        self.shared: list[SharedPrefix | None] = []
        self.count = 0

    def submit(
        self, *tail: int, begin: tuple[int, ...] = SYSTEM, namespace: str = "", max_tokens: int = 40
    ) -> str:
        """Ask for a completion of the system prompt and a few tokens more."""
        sequence_id = f"s{self.count}"
        self.count += 1
        request = SequenceRequest(
            sequence_id,
            sequence_id,
            (*begin, *tail),
            SamplingParams(temperature=0.0),
            max_tokens,
            frozenset(),
            0.0,
            cache_namespace=namespace,
        )
        self.events += self.core.submit((request,), 0.0)
        return sequence_id

    def submit_all(self, count: int, *, namespace: str = "") -> list[str]:
        """Ask for so many completions whose prompts part behind the system prompt."""
        return [self.submit(one, 1, 2, 3, namespace=namespace) for one in range(100, 100 + count)]

    def step(self, count: int = 1) -> None:
        """Run some steps."""
        for _ in range(count):
            self.events += self.core.admit(0.0)
            plan = self.core.plan()
            self.shared += [one.shared for one in plan.prefill if one.is_last]
            self.run(plan)

    def run(self, plan: StepPlan) -> None:
        """Run a step."""
        self.events += self.core.commit(plan, self.engine.run(plan), 0.0, duration_s=0.01)
        self.core.check_invariants()

    def step_until_decoding(self) -> None:
        """Step until every running row is past its prompt."""
        for _ in range(60):
            self.step()
            if all(one.is_prefilled for one in self.core._running):
                return
        raise AssertionError("a prompt is never computed")

    def finish(self) -> None:
        """Step until nothing is left."""
        for _ in range(600):
            if not self.core.running_count + self.core.waiting_count:
                return
            self.step()
        raise AssertionError("it never ends")

    @property
    def reserved_columns(self) -> int:
        """Columns that are promised."""
        return self.core.kv_reserved_bytes // 10


def test_rows_that_begin_alike_reserve_the_beginning_once() -> None:
    """All share one prefix, the first included, whose prompt the others wait for."""
    daemon = Daemon()
    daemon.submit_all(16)
    daemon.step_until_decoding()

    assert daemon.shared == [SharedPrefix(1, SHARED_TOKENS)] * 16
    assert daemon.reserved_columns == SHARED_TOKENS + 16 * class_columns(OWN_TOKENS)
    daemon.finish()
    assert daemon.reserved_columns == 0
    ends = only(SequenceFinished, daemon.events)
    assert [one.error for one in ends] == [None] * 16


def test_a_budget_holds_more_rows_that_share() -> None:
    """Ten rows that share fit a budget for four that do not."""
    budget_columns = 4 * class_columns(SHARED_TOKENS + OWN_TOKENS)
    alone, together = (
        Daemon(budget_columns=budget_columns, has_cache=has_cache) for has_cache in (False, True)
    )
    for daemon in (alone, together):
        daemon.submit_all(16)
        daemon.step()
    assert alone.core.active_loops == 4
    assert together.core.active_loops == (budget_columns - SHARED_TOKENS) // 256
    for daemon in (alone, together):
        daemon.finish()


def test_a_prefix_is_reserved_until_its_last_row_leaves() -> None:
    """Whichever row was the first."""
    daemon = Daemon()
    first, second, _ = daemon.submit_all(3)
    daemon.step_until_decoding()
    for sequence_id, rows in ((first, 2), (second, 1)):
        daemon.events += daemon.core.abort((sequence_id,), None, 0.0)
        daemon.step()
        assert daemon.reserved_columns == SHARED_TOKENS + rows * class_columns(OWN_TOKENS)
    daemon.finish()
    assert daemon.reserved_columns == 0


def test_a_row_that_decodes_keeps_its_columns() -> None:
    """Later rows share with one another what they have in common with it."""
    daemon = Daemon()
    whole = class_columns(SHARED_TOKENS + OWN_TOKENS)
    daemon.submit_all(1)
    daemon.step_until_decoding()
    assert daemon.reserved_columns == whole
    for number, rows in ((200, 1), (201, 2)):
        daemon.submit(number, 1, 2, 3)
        daemon.step_until_decoding()
        assert daemon.reserved_columns == whole + SHARED_TOKENS + rows * class_columns(OWN_TOKENS)
    assert daemon.shared == [None, SharedPrefix(1, SHARED_TOKENS), SharedPrefix(1, SHARED_TOKENS)]


@pytest.mark.parametrize("has_cache", [True, False])
def test_namespaces_share_nothing(has_cache: bool) -> None:  # noqa: FBT001
    """Nor do rows without a prefix cache, short prefixes, and prompts without a completion."""
    daemon = Daemon(has_cache=has_cache)
    daemon.submit_all(1, namespace="a")
    daemon.submit_all(1, namespace="b")
    daemon.submit(1, begin=SYSTEM[:255], namespace="c")
    daemon.submit(2, begin=SYSTEM[:255], namespace="c")
    daemon.submit(1, begin=SYSTEM, namespace="d", max_tokens=0)
    daemon.submit(2, begin=SYSTEM, namespace="d")
    if not has_cache:
        daemon.submit_all(2, namespace="e")
    daemon.step_until_decoding()

    assert set(daemon.shared) == {None}


def test_a_prompts_last_token_is_not_shared() -> None:
    """A row decodes from it on, so equal prompts of whole blocks share one block less."""
    daemon = Daemon()
    for _ in range(2):
        daemon.submit(begin=SYSTEM[:SHARED_TOKENS])
    daemon.step_until_decoding()

    assert daemon.shared == [SharedPrefix(1, SHARED_TOKENS - 64)] * 2
    daemon.finish()


def test_a_sequence_that_waits_again_may_share_nothing() -> None:
    """The row with which it shared is gone when it gets a slot again."""
    daemon = Daemon()
    first, _ = daemon.submit_all(2)
    daemon.events += daemon.core.admit(0.0)
    daemon.core.yield_memory(1, 0.0)
    daemon.events += daemon.core.abort((first,), None, 0.0)
    daemon.step_until_decoding()

    assert daemon.shared == [None]
    assert daemon.reserved_columns == class_columns(SHARED_TOKENS + OWN_TOKENS)


def test_a_sequence_that_waits_again_shares_anew() -> None:
    """Memory that is too little for a step takes a row's slot, and its part of the prefix."""
    daemon = Daemon()
    daemon.submit_all(2)
    daemon.events += daemon.core.admit(0.0)
    daemon.core.yield_memory(1, 0.0)
    daemon.core.check_invariants()
    assert daemon.reserved_columns == SHARED_TOKENS + class_columns(OWN_TOKENS)

    daemon.finish()

    assert [one.error for one in only(SequenceFinished, daemon.events)] == [None] * 2
