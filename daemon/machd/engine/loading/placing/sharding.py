"""A model's shard: the part of its layers, or of every layer, that one rank computes.

mlx-lm's own model code cuts a model. machd checks the result, because some of that code divides numbers
of heads and ignores a remainder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.untyped import LanguageModel
from machd.errors import ModelShardingError


class ShardMode(StrEnum):
    """Way to cut a model; the values of ``distributed.mode`` but for ``auto``."""

    TENSOR = "tensor"
    """Every rank computes a part of the heads and of the hidden units of each layer."""

    PIPELINE = "pipeline"
    """Every rank computes some of the layers."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The ranks that a model is cut for."""

    group: mx.distributed.Group
    mode: str

    def modes(self, model: LanguageModel) -> tuple[ShardMode, ...]:
        """Return the ways to try, the better one first.

        Raises:
            ModelShardingError: mlx-lm has no way for this model, or not the requested one.
        """
        known = shard_modes(model)
        name = type(model).__module__.rpartition(".")[2]
        if not known:
            raise ModelShardingError(
                f"mlx-lm cannot cut {name} for several ranks; serve it with one"
            )
        if self.mode == "auto":
            return known
        if self.mode not in known:
            raise ModelShardingError(
                f"distributed.mode: mlx-lm cannot cut {name} by {self.mode}, only by {known[0]}"
            )
        return (ShardMode(self.mode),)


def least(group: mx.distributed.Group, value: int) -> int:
    """Return the least of the ranks' values. A collective."""
    values = mx.distributed.all_gather(
        mx.array([value], dtype=mx.int64), group=group, stream=mx.cpu
    )
    every: list[int] = values.tolist()  # type: ignore[assignment]
    return min(every)


def shard_modes(model: LanguageModel) -> tuple[ShardMode, ...]:
    """Return the ways in which the model's code can cut it, the better one first."""
    inner = getattr(model, "model", None)
    modes = {
        ShardMode.TENSOR: hasattr(model, "shard"),
        ShardMode.PIPELINE: hasattr(inner, "pipeline"),
    }
    return tuple(mode for mode, is_there in modes.items() if is_there)


def cut(build: Callable[[], Module], sharding: Sharding) -> Module:
    """Build a model and cut it to this rank's shard, in the first way that works.

    Raises:
        ModelShardingError: None does; the reason is the first one's.
    """
    model = build()
    first: ModelShardingError | None = None
    for mode in sharding.modes(model):
        try:
            shard(model, sharding.group, mode)
        except ModelShardingError as error:
            first = first or error
            model = build()
        else:
            return model
    assert first is not None, "at least one way was tried"
    raise first


def shard(model: LanguageModel, group: mx.distributed.Group, mode: ShardMode) -> None:
    """Cut a model with lazy weights to this rank's shard, in place.

    Args:
        model: mlx-lm's model; unusable if this raises.
        group: The ranks.
        mode: One of its :func:`shard_modes`.

    Raises:
        ModelShardingError: It cannot be cut evenly.
    """
    before = _counts(model)
    try:
        if mode is ShardMode.TENSOR:
            model.shard(group)
        else:
            model.model.pipeline(group)
    # Some of its code asserts, or leaves a layer without heads.
    except (ValueError, AssertionError, ZeroDivisionError) as error:
        raise ModelShardingError(f"{_ways(mode, group)}: {error}") from error
    if mode is ShardMode.TENSOR:
        _check_even(before, _counts(model), group)


def _check_even(before: dict[str, int], after: dict[str, int], group: mx.distributed.Group) -> None:
    """Refuse a number of heads that was divided with a remainder: slices would then cross heads.

    Raises:
        ModelShardingError: One was.
    """
    for name, count in before.items():
        if after.get(name, count) not in (count, count / group.size()):
            raise ModelShardingError(
                f"{_ways(ShardMode.TENSOR, group)}: {name.rpartition('.')[2]} is {count}, which "
                f"{group.size()} ranks cannot share evenly"
            )


def _counts(model: LanguageModel) -> dict[str, int]:
    """Return the numbers in a model's layers, such as those of heads, by path."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _ways(mode: ShardMode, group: mx.distributed.Group) -> str:
    return f"the model cannot be cut for {group.size()} ranks by {mode}"
