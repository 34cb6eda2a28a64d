"""Scores are the same in both forms of their product, and the faster one is taken."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.clocks.manual_clock import ManualClock
from support.engines.cpu_layers import for_cpu_layers

from machd.engine.kernels import score_product
from machd.engine.kernels.score_product import ScoreProduct, fastest_score_product

pytestmark = for_cpu_layers


@pytest.mark.parametrize("shape", [(1, 1, 1, 8, 5), (3, 2, 3, 64, 100), (2, 4, 1, 16, 33)])
def test_both_forms_give_the_same_scores(shape: tuple[int, ...]) -> None:
    """Heads that share keys have the same scores in both, and so have heads with keys of their own."""
    rows, kv_heads, repeats, head_dim, width = shape
    queries = mx.random.normal((rows, kv_heads, repeats, head_dim), key=mx.random.key(1))
    keys = mx.random.normal((rows, kv_heads, width, head_dim), key=mx.random.key(2))
    columns, heads = (one(queries, keys) for one in ScoreProduct)
    assert columns.shape == heads.shape == (rows, kv_heads, repeats, width)
    assert mx.allclose(columns, heads, atol=1e-5)


@pytest.mark.parametrize(
    ("heads_s", "expected"),
    [(0.5, ScoreProduct.HEADS), (0.9, ScoreProduct.COLUMNS), (3.0, ScoreProduct.COLUMNS)],
)
def test_the_faster_form_is_taken_where_it_is_worth_it(
    heads_s: float, expected: ScoreProduct, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth may be noise, and every machine is to find the same on its next start."""
    clock = ManualClock()
    right = ScoreProduct.__call__

    def timed(self: ScoreProduct, queries: mx.array, keys: mx.array) -> mx.array:
        clock.advance(heads_s if self is ScoreProduct.HEADS else 1.0)
        return right(self, queries, keys)

    monkeypatch.setattr(ScoreProduct, "__call__", timed)
    assert score_product._measured(2, 3, 16, clock) is expected


def test_it_is_measured_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one process add in the same order, whatever the machine does meanwhile."""
    first = fastest_score_product(2, 3, 24)
    monkeypatch.setattr(score_product, "_measured", lambda *_: pytest.fail("measured again"))
    assert fastest_score_product(2, 3, 24) is first
