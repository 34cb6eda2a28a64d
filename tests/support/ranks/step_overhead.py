"""Cost of a step of ranks beyond mlx-lm's own sharded loop, measured in turns in one group.

On each rank, with ``MLX_RANK`` and ``MLX_HOSTFILE`` set and one thread for products::

    python -m support.ranks.step_overhead ROWS ROUNDS

Rank 0 prints a JSON line for each round. Without ``mlx.launch``: it takes a core of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx

from machd.engine.assembly import make_engine
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.description import describe_model
from machd.engine.loading.loader import LoadedModel
from machd.engine.loading.placing.sharding import Sharding, cut
from machd.engine.protocol.step import DecodeRow, PrefillChunk, StepPlan
from machd.engine.ranks.deciding import decider_of
from machd.engine.ranks.following import follow
from machd.engine.ranks.joining import join, rank_place
from machd.engine.ranks.leading_engine import LeadingEngine
from machd.engine.ranks.rank_group import RankGroup
from machd.request.generation import SamplingParams

_LAYERS = 30
_WIDTH = 576
_STEPS = 12
_PROMPT_TOKENS = 32
_RESERVED_TOKENS = 200
_SUMS_PER_LAYER = 2


class TimedGroup(RankGroup):
    """Knows how long each order took to tell, in milliseconds."""

    orders_ms: list[float]

    def tell(self, message: bytes) -> bytes:
        """Return the message of rank 0."""
        started_s = time.perf_counter()
        told = super().tell(message)
        self.orders_ms.append((time.perf_counter() - started_s) * 1e3)
        return told


def median_ms(step: Callable[[], object]) -> float:
    """Return the median of several steps."""
    steps_ms = []
    for _ in range(_STEPS):
        started_s = time.perf_counter()
        step()
        steps_ms.append((time.perf_counter() - started_s) * 1e3)
    return median(steps_ms)


def sharded_llama(group: RankGroup) -> Any:
    """Return this rank's shard of a llama of the embedded model's size, with heads that two ranks can share."""
    from mlx_lm.models import llama  # noqa: PLC0415 - imported in the one way

    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        rms_norm_eps=1e-5,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    model = cut(lambda: llama.Model(arguments), Sharding(group.group, "tensor"))
    mx.eval(model.parameters())
    return model


def bare_ms(model: Any, rows: int) -> float:
    """Return what a decode step of a loop over mlx-lm's model and cache takes."""
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - imported in the one way

    caches = make_prompt_cache(model)
    prompt = mx.array([list(range(3, 3 + _PROMPT_TOKENS))] * rows)
    said = [mx.argmax(model(prompt, cache=caches)[:, -1], axis=-1)]

    def step() -> None:
        said[0] = mx.argmax(model(said[0][:, None], cache=caches)[:, -1], axis=-1)
        mx.eval(said)

    mx.eval(said)
    return median_ms(step)


def engine_ms(model: Any, rows: int, group: RankGroup) -> float:
    """Return what the same step takes through orders and the engine of each rank; 0 on those that follow."""
    description = describe_model(
        model,
        model_id="llama",
        architecture="llama",
        context_tokens=2048,
        eos_token_ids=frozenset(),
    )
    engine = make_engine(
        LoadedModel(model, FakeTokenizer(), description), decider=decider_of(group)
    )
    if not group.leads:
        follow(engine, group, lambda: None)
        engine.close()
        return 0.0
    leading = LeadingEngine(engine, group, time.time)
    prompt, greedy = tuple(range(3, 4 + _PROMPT_TOKENS)), SamplingParams(temperature=0.0)
    for row in range(rows):
        chunk = PrefillChunk(
            row, prompt, 0, is_last=True, sampling=greedy, reserved_tokens=_RESERVED_TOKENS
        )
        leading.run(StepPlan(prefill=(chunk,)))
    plan = StepPlan(decode=tuple(DecodeRow(row) for row in range(rows)))
    step_ms = median_ms(lambda: leading.run(plan))
    leading.close()
    return step_ms


def sums_ms(rows: int, group: RankGroup) -> float:
    """Return what as many sums over the ranks take as a step has."""

    def step() -> None:
        array = mx.ones((rows, 1, _WIDTH))
        for _ in range(_SUMS_PER_LAYER * _LAYERS):
            array = mx.distributed.all_sum(array, group=group.group) * 0.5
        mx.eval(array)

    return median_ms(step)


def main() -> None:
    """Measure round by round, the bare loop before and after the engine."""
    rows, rounds = (int(argument) for argument in sys.argv[1:])
    place = rank_place(os.environ)
    assert place is not None, "MLX_RANK and MLX_HOSTFILE say which rank this is"
    import_mlx_lm()
    joined = join(place)
    assert joined is not None, "there are several ranks"
    group = TimedGroup(joined.group)
    model = sharded_llama(group)
    for _ in range(rounds):
        group.orders_ms = []
        before_ms, step_ms = bare_ms(model, rows), engine_ms(model, rows, group)
        after_ms, all_sums_ms = bare_ms(model, rows), sums_ms(rows, group)
        if group.leads:
            round_ = {
                "bare_ms": (before_ms + after_ms) / 2,
                "step_ms": step_ms,
                "sums_ms": all_sums_ms,
                "order_ms": median(group.orders_ms),
            }
            print(json.dumps(round_), flush=True)  # noqa: T201 - what it is started for


if __name__ == "__main__":
    main()
