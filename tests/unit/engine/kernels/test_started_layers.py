"""Layers are begun as soon as they are built, and compute what they computed before."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.engines.cpu_layers import for_cpu_layers
from support.engines.tiny_models import TinyKind, tiny_model

from machd.engine.kernels.started_layers import start_layers

pytestmark = for_cpu_layers

_KINDS = pytest.mark.parametrize("kind", list(TinyKind), ids=str)
_TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


@_KINDS
def test_a_started_model_computes_the_same(kind: TinyKind) -> None:
    """Bit for bit, and its layers are still of their own class."""
    model = tiny_model(kind).model
    classes = [type(layer) for layer in model.layers]
    right = model(_TOKENS)
    mx.eval(right)
    start_layers(model)
    assert mx.array_equal(model(_TOKENS), right)
    assert all(
        isinstance(layer, former) for layer, former in zip(model.layers, classes, strict=True)
    )


def test_each_layer_is_begun_before_the_next_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the layers, each once with the hidden states that it hands on, however many engines a model had."""
    model = tiny_model(TinyKind.STANDARD).model
    for _ in range(3):
        start_layers(model)
    begun: list[tuple[int, ...]] = []
    monkeypatch.setattr(mx, "async_eval", lambda hidden: begun.append(hidden.shape))
    model(_TOKENS)
    assert begun == [(1, 8, model.args.hidden_size)] * len(model.layers)
