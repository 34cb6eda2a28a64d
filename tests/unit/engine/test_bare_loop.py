"""The bare loop's own arithmetic, with a model that costs made-up time."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.base import Module
from support.clocks.manual_clock import ManualClock

from machd.engine.ceiling import BareLoop, equal_lengths


class CountedModel(Module):
    """Takes a second for each token position, and notes the shapes that it saw."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: list[Module] = []
        self._clock = clock
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, token_ids: mx.array, cache: list[object]) -> mx.array:
        """Logits that always prefer token 3."""
        assert cache == []
        self.shapes.append(tuple(token_ids.shape))
        self._clock.advance(token_ids.shape[1])
        return mx.broadcast_to(mx.arange(4), (*token_ids.shape, 4))


def test_prefill_and_steps_are_told_apart() -> None:
    """The prefill ends with the first token; each step after it has a time of its own."""
    clock = ManualClock()
    loop = BareLoop(CountedModel(clock), clock=clock)

    reading = loop.measure([[0, 1, 2, 3, 0, 1]] * 3, steps=4)

    assert reading.prefill_s == 6.0
    assert reading.step_s == (1.0,) * 4
    assert (reading.batch_width, reading.prompt_tokens) == (3, 6)


def test_every_row_is_in_every_call() -> None:
    """A batch is prefilled in one call and then stepped as one, after one warm-up a width."""
    clock = ManualClock()
    model = CountedModel(clock)
    loop = BareLoop(model, clock=clock)
    prompts = [[0, 1, 2, 3, 0], [3, 2, 1, 0, 3]]

    loop.measure(prompts, steps=1)
    warm_up, model.shapes = model.shapes, []
    loop.measure(prompts, steps=1)

    assert model.shapes == [(2, 4), (2, 1), (2, 1)]
    assert len(warm_up) > len(model.shapes)


def test_a_prompt_of_one_token_needs_no_fill() -> None:
    """The shortest prompt goes straight to its first token."""
    clock = ManualClock()
    reading = BareLoop(CountedModel(clock), clock=clock).measure([[2]], steps=0)

    assert reading.prefill_s == 1.0
    assert reading.step_s == ()


def test_prompts_of_one_length_are_as_much_work_as_before() -> None:
    """Rows get the mean length by being cut or begun again, and rows of that length are kept."""
    assert equal_lengths([[1, 2], [3, 4, 5, 6], [7, 8, 9]]) == [[1, 2, 1], [3, 4, 5], [7, 8, 9]]
    assert equal_lengths([[5]]) == [[5]]
