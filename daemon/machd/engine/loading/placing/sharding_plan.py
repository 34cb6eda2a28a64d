"""A model's shards for every number of ranks, without its weights and without other ranks.

mlx-lm's own code cuts copies of a model with lazy arrays, as :mod:`machd.engine.loading.placing.sharding` does when ranks
load, so a plan and a start cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx.nn.layers.base import Module

from machd.engine.backend.untyped import LanguageModel
from machd.engine.loading.cache_facts import layer_facts
from machd.engine.loading.formats.opened import weights_bytes
from machd.engine.loading.placing.sharding import ShardMode, shard, shard_modes
from machd.errors import ModelShardingError

PLANNED_RANKS = range(2, 9)
"""Numbers of ranks that a plan is made for."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """A model cut for a number of ranks in one way.

    Attributes:
        weights_bytes: Weights of the rank that has most of them; 0 if it cannot be cut so.
        working_bytes: The most memory of a rank's step beside weights and KV cache; 0 if it cannot be cut so.
        reason: Why it cannot be cut so; empty if it can.
    """

    mode: ShardMode
    ranks: int
    weights_bytes: int = 0
    working_bytes: int = 0
    reason: str = ""


def plan_ranks(
    model: LanguageModel, working_bytes: Callable[[Module], int]
) -> tuple[RankPlan, ...]:
    """Cut a model with lazy weights for each number of ranks, in each way that its code knows.

    Takes a few milliseconds for each. The model itself stays whole, and no array of it is read.
    """
    return tuple(
        _plan(model, mode, ranks, working_bytes)
        for mode in shard_modes(model)
        for ranks in PLANNED_RANKS
    )


def _plan(
    model: LanguageModel, mode: ShardMode, ranks: int, working_bytes: Callable[[Module], int]
) -> RankPlan:
    shards = []
    try:
        for rank in range(ranks):
            group: Any = _PlannedGroup(rank, ranks)
            shards.append(_copied(model, {}))
            shard(shards[-1], group, mode)
    except ModelShardingError as error:
        return RankPlan(mode, ranks, reason=error.message)
    kinds = {
        frozenset((one.class_name, one.window_tokens) for one in layer_facts(s)) for s in shards
    }
    if len(kinds) > 1:
        return RankPlan(mode, ranks, reason="ranks would keep different kinds of caches")
    return RankPlan(
        mode,
        ranks,
        max(weights_bytes(one) for one in shards),
        max(working_bytes(one) for one in shards),
    )


@dataclass(frozen=True, slots=True)
class _PlannedGroup:
    """A rank of a planned group: the part of ``mx.distributed.Group`` that cutting needs."""

    number: int
    ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


def _copied(part: Any, copies: dict[int, Any]) -> Any:  # noqa: ANN401 - a model holds anything
    """Copy a model's modules and their containers, and share everything else."""
    if isinstance(part, Module):
        if id(part) not in copies:
            copy = copies[id(part)] = type(part).__new__(type(part))
            vars(copy).update(vars(part))
            dict.update(copy, {name: _copied(one, copies) for name, one in part.items()})
        return copies[id(part)]
    if type(part) in {list, tuple}:
        return type(part)(_copied(one, copies) for one in part)
    if type(part) is dict:
        return {name: _copied(one, copies) for name, one in part.items()}
    return part
