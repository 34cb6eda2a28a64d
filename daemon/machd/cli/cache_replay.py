"""Prompts looked up one after the other in a prefix cache of the daemon's own, without a model.

The scheduler and the cache are those of a daemon. Only the engine is missing: its steps are answered at once, as if they had computed
what the plan says. Each prompt is answered by a single token.
"""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.protocol.blocks import (
    BlockChange,
    DropBlocks,
    HeldBlock,
    LoadBlock,
    SplitBlock,
    StoreBlock,
)
from machd.engine.protocol.media import MediaSpan
from machd.engine.protocol.step import SampledToken, StepPlan, StepResult
from machd.request.generation import SamplingParams
from machd.scheduler.config import single_flight
from machd.scheduler.events import CacheDiagnosis, PromptLookedUp
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest
from machd.scheduler.waiting import QueueLimits

_NO_LIMIT = 1 << 62
_LIMITS = QueueLimits(
    max_queue=1, max_queue_tokens=_NO_LIMIT, queue_timeout_s=_NO_LIMIT, request_timeout_s=_NO_LIMIT
)


class CacheReplay:
    """A prefix cache that prompts are looked up in, and then kept in."""

    def __init__(self, shape: PrefixConfig, limits: PrefixLimits) -> None:
        """Start with an empty cache."""
        self._scheduler = Scheduler(single_flight(_LIMITS), PrefixCache(shape, limits))
        self._engine = _NoEngine(shape.costs)
        self._count = 0

    def look_up(
        self, prompt: tuple[int, ...], namespace: str, media: tuple[MediaSpan, ...] = ()
    ) -> CacheDiagnosis:
        """Look a prompt up in a namespace, and keep it there."""
        self._count += 1
        request = SequenceRequest(
            sequence_id=str(self._count),
            group_id=str(self._count),
            prompt=prompt,
            sampling=SamplingParams(),
            max_tokens=1,
            stop_token_ids=frozenset(),
            arrived_s=0.0,
            cache_namespace=namespace,
            media=media,
        )
        scheduler = self._scheduler
        events = scheduler.submit((request,), 0.0) + scheduler.admit(0.0)
        while not (plan := scheduler.plan()).is_empty:
            events += scheduler.commit(plan, self._engine.run(plan), 0.0, duration_s=0.0)
        (looked_up,) = (one for one in events if isinstance(one, PromptLookedUp))
        return looked_up.diagnosis


@dataclass(frozen=True, slots=True)
class _Block:
    tokens: int
    has_state: bool


class _NoEngine:
    """Sizes of the blocks that an engine would have, and a token where it would sample one."""

    def __init__(self, costs: BlockCosts) -> None:
        self._costs = costs
        self._blocks: dict[int, _Block] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Answer a step."""
        changed = [number for one in plan.blocks for number in self._change(one)]
        held = [
            HeldBlock(number, self._nbytes(block), block.has_state)
            for number in dict.fromkeys(changed)
            if (block := self._blocks.get(number)) is not None
        ]
        lost = tuple(one.block_id for one in plan.blocks if isinstance(one, LoadBlock))
        tokens = [SampledToken(one.slot_index, 0) for one in plan.prefill if one.is_last]
        encoded = tuple(one.media.digest for one in plan.encode)
        return StepResult(tuple(tokens), held_blocks=tuple(held), lost_blocks=lost, encoded=encoded)

    def _change(self, change: BlockChange) -> tuple[int, ...]:
        """Make a change; returns the numbers of blocks that it made or cut."""
        is_stateful = self._costs.is_stateful
        match change:
            case StoreBlock(block_id, _, start, stop, has_state):
                self._blocks[block_id] = _Block(stop - start, has_state or not is_stateful)
                return (block_id,)
            case SplitBlock(block_id, head_id, at):
                block = self._blocks[block_id]
                self._blocks[head_id] = _Block(at, not is_stateful)
                self._blocks[block_id] = _Block(block.tokens - at, block.has_state)
                return (head_id, block_id)
            case DropBlocks(block_ids):
                for one in block_ids:
                    self._blocks.pop(one, None)
            case _:  # there is no disk tier
                pass
        return ()

    def _nbytes(self, block: _Block) -> int:
        state_bytes = self._costs.bytes_per_state if block.has_state else 0
        return block.tokens * self._costs.bytes_per_token + state_bytes
