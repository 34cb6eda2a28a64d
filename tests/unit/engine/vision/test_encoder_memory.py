"""What an encoder's graph takes is known before it is computed, and attention over many patches takes little."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from support.engines.probing import without_compilation

from machd.engine.vision import encoder_stages
from machd.engine.vision.encoder_memory import encoder_need
from machd.engine.vision.encoder_stages import record_outputs, recording

mlx_nn: Any = import_module("mlx.nn")  # without types

_SLACK_BYTES = 1 << 20
"""mlx rounds allocations up to pages."""


class _Layer(Module):
    """Attention and a feed-forward layer, as vision towers have them."""

    def __init__(self, dim: int, heads: int, wide: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads = heads
        self.norm = mlx_nn.LayerNorm(dim)
        self.qkv = mlx_nn.Linear(dim, 3 * dim)
        self.up, self.down = mlx_nn.Linear(dim, wide), mlx_nn.Linear(wide, dim)

    def __call__(self, patches: mx.array, mask: mx.array | None) -> mx.array:
        rows, tokens, dim = patches.shape
        parts = self.qkv(self.norm(patches)).reshape(rows, tokens, 3, self.heads, -1)
        queries, keys, values = parts.transpose(2, 0, 3, 1, 4)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
        patches = patches + out.transpose(0, 2, 1, 3).reshape(rows, tokens, dim)
        output: mx.array = patches + self.down(mlx_nn.gelu_approx(self.up(patches)))
        return output


class _Tower(Module):
    def __init__(self, source: random.Random) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        heads = source.choice([1, 2, 4])
        dim = heads * source.choice([8, 16])
        self.patches = mlx_nn.Conv2d(3, dim, kernel_size=8, stride=8)
        self.layers = [_Layer(dim, heads, 4 * dim) for _ in range(source.randint(1, 3))]
        self.has_mask = source.random() < 0.5

    def __call__(self, pixels: mx.array) -> mx.array:
        patches = self.patches(pixels)
        patches = patches.reshape(patches.shape[0], -1, patches.shape[-1])
        tokens = patches.shape[1]
        mask = mx.zeros((1, 1, tokens, tokens)) if self.has_mask else None
        for layer in self.layers:
            patches = layer(patches, mask)
        output: mx.array = patches
        return output


def _sides(source: random.Random) -> tuple[int, int]:
    return source.randrange(64, 480, 8), source.randrange(64, 480, 8)


@pytest.fixture(name="_as_on_a_cpu", autouse=True)
def _without_compilation() -> Iterator[None]:
    with without_compilation():
        yield


@pytest.mark.parametrize(
    "seed", [pytest.param(one, marks=pytest.mark.long if one > 2 else ()) for one in range(48)]
)
@pytest.mark.parametrize("max_score_bytes", [1 << 18, 1 << 40])
def test_a_graph_takes_no_more_than_it_shows(
    seed: int, max_score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of generated towers and sizes each stage keeps to its own bound, and the whole to its peak, with the encoder's margin."""
    monkeypatch.setattr(encoder_stages, "_MAX_SCORE_BYTES", max_score_bytes)
    source = random.Random(seed)
    tower: Any = _Tower(source)
    record_outputs(module for path, module in tower.named_modules() if path)
    mx.eval(tower.parameters())
    pixels = mx.random.normal((source.randint(1, 2), *_sides(source), 3))
    mx.eval(pixels)

    def graph() -> tuple[deque[mx.array], mx.array]:
        with recording() as stages:
            return stages, tower(pixels)

    stages, result = graph()
    need = encoder_need(list(stages), [result])
    assert len(need.stage_bytes) == len(stages) + 1
    start_bytes, peak_bytes = mx.get_active_memory(), 0
    for bound in need.stage_bytes:
        held_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(stages.popleft() if stages else result)
        assert mx.get_peak_memory() - held_bytes <= 1.25 * bound + _SLACK_BYTES
        peak_bytes = max(peak_bytes, mx.get_peak_memory() - start_bytes)
    assert peak_bytes <= 1.25 * need.peak_bytes + _SLACK_BYTES


@pytest.mark.parametrize("has_mask", ["no mask", "a mask", "one row of mask"])
def test_attention_in_blocks_is_attention(has_mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of some queries at a time give what all scores at once give, and mlx's function is its own again behind it."""
    mx.random.seed(0)
    queries, keys, values = (mx.random.normal((2, 3, 70, 16)) for _ in range(3))
    shape = {"no mask": None, "a mask": (1, 1, 70, 70), "one row of mask": (1, 1, 1, 70)}[has_mask]
    mask = None if shape is None else mx.where(mx.random.uniform(shape=shape) < 0.3, -1e9, 0.0)
    attend = mx.fast.scaled_dot_product_attention
    whole = attend(queries, keys, values, scale=0.25, mask=mask)
    monkeypatch.setattr(encoder_stages, "_MAX_SCORE_BYTES", 16 * 2 * 3 * 70 * 4)
    with recording() as stages:
        inside = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
    assert len(stages) == 5, "16 queries a block"
    assert mx.allclose(whole, inside, atol=1e-5).item()
    assert mx.fast.scaled_dot_product_attention is attend


def test_attention_over_many_patches_takes_no_square_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four times the patches take about four times the memory, not sixteen."""
    monkeypatch.setattr(encoder_stages, "_MAX_SCORE_BYTES", 1 << 23)

    def peak_bytes(tokens: int) -> int:
        queries = mx.zeros((1, 2, tokens, 16))
        with recording() as stages:
            out = mx.fast.scaled_dot_product_attention(queries, queries, queries, scale=1.0)
            return encoder_need(list(stages), [out]).peak_bytes

    assert peak_bytes(16_000) < 5 * peak_bytes(4_000)
