"""A step that memory has no room for is refused whole, on every engine; estimates come near what steps take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx
import pytest
from support.engines.fake_engine import FakeEngine
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import EVERY_RUN, TinyKind
from support.every_run import sampled

from machd.engine.assembly import make_engine
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.memory import StepMemoryError
from machd.engine.protocol.step import DecodeRow, Lane, PrefillChunk, StepPlan
from machd.engine.step.memory import StepMemory, StepNeed
from machd.request.generation import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)


@dataclass
class _Limited:
    """An engine, and how to take its memory away and give it back."""

    engine: Engine
    set_left_bytes: Callable[[int | None], None]


@pytest.fixture(name="limited", params=["fake", "mlx"])
def _limited(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Limited]:
    """Each engine, with as much memory as the machine has."""
    if request.param == "fake":
        fake = FakeEngine()

        def limit_fake(left_bytes: int | None) -> None:
            used_bytes = fake.memory().kv_used_bytes
            fake.memory_bytes = None if left_bytes is None else used_bytes + left_bytes

        yield _Limited(fake, limit_fake)
        return
    engine = make_engine(loaded(TinyKind.STANDARD))
    plenty = engine._memory._read_available

    def limit_mlx(left_bytes: int | None) -> None:
        reserved_bytes = engine._memory._reserved_bytes
        read = plenty if left_bytes is None else lambda: reserved_bytes + left_bytes
        monkeypatch.setattr(engine._memory, "_read_available", read)
        monkeypatch.setattr(engine._memory, "_read_s", 0.0)

    yield _Limited(engine, limit_mlx)
    engine.close()


def _chunk(slot_index: int, tokens: int) -> PrefillChunk:
    return PrefillChunk(
        slot_index, (5,) * tokens, 0, is_last=True, sampling=_GREEDY, reserved_tokens=tokens + 8
    )


def _said(engine: Engine, plan: StepPlan) -> list[tuple[int, int]]:
    return [(token.slot_index, token.token_id) for token in engine.run(plan).tokens]


def test_a_refused_step_leaves_the_engine_as_it_was(limited: _Limited) -> None:
    """The same plan gives the same tokens afterwards, and its release is made only then."""
    engine = limited.engine
    for slot in (0, 1):
        engine.run(StepPlan(prefill=(_chunk(slot, 6 + slot),)))
    plan = StepPlan(release=(1,), prefill=(_chunk(2, 40),), decode=(DecodeRow(0),))

    limited.set_left_bytes(1)
    with pytest.raises(StepMemoryError) as refused:
        engine.run(plan)
    assert refused.value.needed_bytes > refused.value.left_bytes
    with pytest.raises(StepMemoryError):
        engine.run(plan)

    limited.set_left_bytes(None)
    said = _said(engine, plan)
    engine.reset()
    for slot in (0, 1):
        engine.run(StepPlan(prefill=(_chunk(slot, 6 + slot),)))
    assert _said(engine, plan) == said


def test_steps_that_compute_nothing_are_never_refused(limited: _Limited) -> None:
    """A plan that only releases rows runs with no memory left."""
    limited.engine.run(StepPlan(prefill=(_chunk(0, 6),)))
    limited.set_left_bytes(0)
    limited.engine.run(StepPlan(release=(0,)))
    assert limited.engine.memory().kv_used_bytes == 0


@pytest.mark.parametrize(
    ("lane", "kind"),
    sampled(
        product(Lane, TinyKind),
        [*product(Lane, [TinyKind.STANDARD]), *product([Lane.BATCH], EVERY_RUN[1:])],
    ),
)
def test_steps_take_at_most_twice_their_estimate(
    kind: TinyKind, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once steps of its kind were seen; attention over a prompt of twice the length is what may be missing.

    Beyond its memory limit mlx finishes what runs before it allocates for the next operation. A limit of nothing makes
    a step's peak what its operations need, and not how far mlx's threads lag behind on a busy machine: that came to
    three times the estimate. A daemon's limit is what is left to it.
    """
    engine = make_engine(loaded(kind))
    limit_bytes = mx.set_memory_limit(0)
    short: list[str] = []
    end = StepMemory.end
    seen: set[bool] = set()

    def compare(self: StepMemory, need: StepNeed, *, has_decoded: bool) -> None:
        estimate_bytes = self.needed_bytes(need)
        taken_bytes = mx.get_peak_memory() - self._active_bytes
        if (is_prompt := need.prompt_tokens > 0) in seen and taken_bytes > 2 * estimate_bytes:
            short.append(f"{need}: {taken_bytes} of {estimate_bytes}")
        seen.add(is_prompt)
        end(self, need, has_decoded=has_decoded)

    monkeypatch.setattr(StepMemory, "end", compare)
    rows: list[int] = []
    for slot_index, tokens in enumerate((100, 70, 200, 64)):
        chunk = replace(_chunk(slot_index, tokens), reserved_tokens=700, lane=lane)
        engine.run(StepPlan(prefill=(chunk,)))
        rows.append(slot_index)
        for _ in range(2):
            decoding = rows if lane is Lane.BATCH else rows[-1:]
            engine.run(StepPlan(decode=tuple(DecodeRow(one) for one in decoding)))
    engine.close()
    mx.set_memory_limit(limit_bytes)
    assert short == []
