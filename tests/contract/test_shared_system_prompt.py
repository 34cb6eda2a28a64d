"""Requests with one system prompt, from the scheduler to the engine: they share it, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engines.block_rows import ASKED
from support.engines.parity import differences
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import TinyKind, each_kind
from support.schedulers.sequence_samples import LIMITS, batching_of, only, outputs_of, run_step

from machd.engine.assembly import make_engine
from machd.engine.protocol.step import SampledToken
from machd.scheduler.config import continuous
from machd.scheduler.events import SequenceFinished
from machd.scheduler.pacing import StepPace
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest
from machd_probes.play import Join
from machd_probes.scripts import random_prompt

_SYSTEM = random_prompt(300, 1)
_SHARED_TOKENS = 256
_USERS, _TOKENS = 12, 16


class _Answers:
    """Answers to requests of one system prompt, and the most bytes that their rows held."""

    def __init__(self, *, shares: bool) -> None:
        """Run them, in two waves on the slots of one."""
        engine = make_engine(loaded(TinyKind.STANDARD))
        bytes_per_token = engine.model.cache.bytes_per_token
        batching = batching_of(max_b=8, prefill_chunk_tokens=100, shares_prefixes=True)
        kv = replace(batching.kv, shares_prefixes=shares and engine.model.shares_prefixes)
        limits = replace(LIMITS, max_queue=_USERS, max_queue_tokens=1 << 20)
        config = continuous(limits, replace(batching, kv=kv))
        costs = BlockCosts(bytes_per_token, 0, 0, 0)
        cache = PrefixCache(PrefixConfig(b"model", 64, costs), PrefixLimits(1 << 30))
        scheduler = Scheduler(replace(config, pace=StepPace(beside_decode=100, alone=400)), cache)
        for number, prompt in enumerate(PROMPTS):
            request = SequenceRequest(
                str(number), str(number), prompt, ASKED, _TOKENS, frozenset(), 0.0
            )
            assert not only(SequenceFinished, scheduler.submit((request,), 0.0))
        self.tokens: dict[str, list[SampledToken]] = {}
        self.kv_columns = 0
        while scheduler.running_count + scheduler.waiting_count or not scheduler.plan().is_empty:
            events = run_step(scheduler, engine, 0.0)
            scheduler.check_invariants()
            held_columns = engine.memory().kv_used_bytes // bytes_per_token
            if all(one.is_prefilled for one in scheduler._running):
                self.kv_columns = max(self.kv_columns, held_columns)
            for number in range(_USERS):
                said = outputs_of(SampledToken, events, str(number))
                self.tokens.setdefault(str(number), []).extend(said)
            assert all(one.error is None for one in only(SequenceFinished, events))
        assert engine.memory().kv_used_bytes == 0


PROMPTS = [_SYSTEM + random_prompt(3 + number, number) for number in range(_USERS)]


@pytest.mark.parametrize("shares", [True, False])
def test_requests_of_one_system_prompt_get_their_answers(shares: bool) -> None:  # noqa: FBT001
    """Tokens are those of each row alone; rows that share hold what is their own, and the prefix once."""
    answers = _Answers(shares=shares)

    for number, prompt in enumerate(PROMPTS):
        expected = alone(TinyKind.STANDARD).tokens(Join(prompt, _TOKENS, ASKED))
        assert differences(expected, answers.tokens[str(number)], ASKED) == []
    if shares:
        # Slabs may have a quarter to spare.
        assert answers.kv_columns <= _SHARED_TOKENS + 8 * 256 * 5 // 4
    else:
        assert answers.kv_columns >= 8 * 384


@each_kind()
@pytest.mark.parametrize("kv_format", ["none", "affine8"])
def test_only_attention_of_machds_own_shares(kind: TinyKind, kv_format: str) -> None:
    """Other layers, and keys and values in fewer bits, read a row's columns alone."""
    engine = make_engine(loaded(kind, kv_format))

    is_expected = kind is TinyKind.STANDARD and kv_format == "none"
    assert engine.model.shares_prefixes == is_expected
