"""Fused layers compute the same as the layers they replace."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from support.engines.cpu_layers import for_cpu_layers
from support.engines.tiny_models import TinyKind, tiny_model

from machd.engine.backend.untyped import LanguageModel
from machd.engine.kernels.fused_llama import fuse_layers
from machd.engine.loading.formats.opened import weights_bytes
from machd_probes.scripts import random_prompt
from machd_probes.tiny import tiny_configuration
from machd_probes.tiny import tiny_model as tiny_architecture

pytestmark = for_cpu_layers


def _logits(model: LanguageModel, token_ids: Sequence[Sequence[int]]) -> mx.array:
    """After a prompt and one step, as decoding computes them."""
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - after import_mlx_lm()

    caches = make_prompt_cache(model)
    tokens = mx.array([list(row) for row in token_ids])
    model(tokens[:, :-1], cache=caches)
    logits: mx.array = model(tokens[:, -1:], cache=caches)
    return logits


@pytest.mark.parametrize("length", [6, 200])
def test_fused_model_gives_the_same_logits_in_the_same_memory(length: int) -> None:
    """Prompt and step agree within float32 rounding, biases included; nothing is held twice.

    A short prompt's softmax and activation are left to MLX, a long one's are not.
    """
    model = tiny_model(TinyKind.STANDARD).model
    tokens = [random_prompt(length, 1), random_prompt(length, 2)]
    before, before_bytes = _logits(model, tokens), weights_bytes(model)
    mx.eval(before)
    assert fuse_layers(model) == len(model.layers)
    assert mx.allclose(_logits(model, tokens), before, rtol=1e-4, atol=1e-4)
    assert weights_bytes(model) == before_bytes


def test_fused_model_is_not_fused_again() -> None:
    """A second fuse_layers changes nothing."""
    model = tiny_model(TinyKind.STANDARD).model
    fuse_layers(model)
    assert fuse_layers(model) == 0


@pytest.mark.parametrize("kind", [kind for kind in TinyKind if kind is not TinyKind.STANDARD])
def test_other_layers_are_left_alone(kind: TinyKind) -> None:
    """Only mlx-lm's own llama layers are replaced."""
    assert fuse_layers(tiny_model(kind).model) == 0


def test_a_model_whose_layers_are_no_list_is_left_alone() -> None:
    """PLaMo's are a module of their own."""
    assert fuse_layers(tiny_architecture(tiny_configuration("plamo"))) == 0


def test_quantised_layers_are_left_alone() -> None:
    """Quantised weights are not merged."""
    from mlx.nn.layers.quantized import quantize  # noqa: PLC0415 - only here

    model = tiny_model(TinyKind.STANDARD).model
    quantize(model, group_size=32, bits=8)
    assert fuse_layers(model) == 0


def test_rotation_table_agrees_with_the_layer() -> None:
    """The table rotates rows at different positions as the layer does."""
    model = tiny_model(TinyKind.STANDARD).model
    rope = model.layers[0].self_attn.rope
    fuse_layers(model)
    rotation = model.layers[0].self_attn._rotation
    width = model.layers[0].self_attn.o_proj.weight.shape[1] // 4
    heads = mx.random.normal((3, 4, 1, width))
    positions = mx.array([0, 3, 4000], dtype=mx.int32)
    assert mx.allclose(rotation(heads, positions), rope(heads, offset=positions), atol=1e-5)
    assert model.layers[1].self_attn._rotation is rotation, "one table for all layers"
