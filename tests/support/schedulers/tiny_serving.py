"""A scheduler with a prefix cache on an engine of a tiny model, whose prompts are cut into equal chunks."""

from __future__ import annotations

from dataclasses import replace

from machd.engine.assembly import make_engine
from machd.engine.protocol.step import SampledToken
from machd.engine.step.mlx_engine import MlxEngine
from machd.engine_process.scheduling import prefix_shape
from machd.scheduler.config import SchedulerConfig, continuous, single_flight
from machd.scheduler.events import (
    CacheDiagnosis,
    Event,
    FinishReason,
    PromptLookedUp,
    SequenceFinished,
)
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest
from machd.settings.cache import CacheSettings
from support.engines.block_rows import ASKED, BlockRows
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import TinyKind
from support.schedulers.sequence_samples import (
    LIMITS,
    EagerPace,
    batching_of,
    only,
    outputs_of,
    run_step,
)

CHUNK_TOKENS = 20
BLOCK_TOKENS = 16
"""Not a divisor of the chunk's tokens, so that cancelled prompts end inside blocks."""

TOKENS = 8
"""Of each completion."""


class TinyServing:
    """A scheduler with a prefix cache, and an engine of one tiny model."""

    def __init__(
        self, kind: TinyKind, kv_format: str, *, batched: bool, looks_ahead: bool = False
    ) -> None:
        self.engine: MlxEngine = make_engine(loaded(kind, kv_format), looks_ahead=looks_ahead)
        shape = replace(prefix_shape(CacheSettings(), self.engine.model), block_tokens=BLOCK_TOKENS)
        self.prefixes = PrefixCache(shape, PrefixLimits(100_000_000))
        self.scheduler = Scheduler(_config(batched=batched), self.prefixes)
        self.events: list[Event] = []

    def submit(self, name: str, prompt: tuple[int, ...]) -> None:
        """Ask for a completion."""
        self.events += self.scheduler.submit(
            (SequenceRequest(name, name, prompt, ASKED, TOKENS, frozenset(), 0.0),), 0.0
        )

    def step(self, count: int = 1) -> None:
        """Run some steps."""
        for _ in range(count):
            self.events += run_step(self.scheduler, self.engine, 0.0)
            self.scheduler.check_invariants()

    def cancel(self, name: str) -> None:
        """End a sequence as its client's leaving does."""
        (ended,) = only(SequenceFinished, self.scheduler.abort((name,), None, 0.0))
        assert ended.reason is FinishReason.ABORT

    def finish(self) -> None:
        """Run until nothing is left to do."""
        while self.scheduler.running_count + self.scheduler.waiting_count or self.prefixes.changes:
            self.step()

    def looked_up(self, name: str) -> CacheDiagnosis:
        """What a prompt's lookup found."""
        (event,) = [one for one in only(PromptLookedUp, self.events) if one.sequence_id == name]
        return event.diagnosis

    def tokens(self, name: str) -> list[SampledToken]:
        """Return a completion's tokens."""
        return outputs_of(SampledToken, self.events, name)

    def said(self, name: str) -> list[tuple[object, ...]]:
        """Tokens with all bits of their log-probabilities."""
        return [(one.token_id, one.logprob, one.top_logprobs) for one in self.tokens(name)]


def _config(*, batched: bool) -> SchedulerConfig:
    config = single_flight(LIMITS)
    if batched:
        batching = batching_of(max_b=4, prefill_chunk_tokens=CHUNK_TOKENS, coalesce=True)
        config = continuous(LIMITS, batching)
    return replace(config, pace=EagerPace(beside_decode=CHUNK_TOKENS, alone=CHUNK_TOKENS))


def row_alone(kind: TinyKind, prompt: tuple[int, ...]) -> list[SampledToken]:
    """Return the tokens of a prompt that is computed in one chunk, without a cache."""
    return BlockRows(make_engine(loaded(kind))).alone(prompt, TOKENS)
