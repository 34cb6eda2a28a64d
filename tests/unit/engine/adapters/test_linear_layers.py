"""Linear layers of a model by path, whether machd has merged them or not."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.engines.adapters import TinyBase
from support.engines.cpu_layers import for_cpu_layers

from machd.engine.adapters.linear_layers import base_layers, linear_parts
from machd.engine.adapters.low_rank import BaseLayer
from machd.engine.assembly import make_engine


@for_cpu_layers
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("is_quantised", [True, False])
def test_layers_are_known_by_the_same_paths_after_machd_merges_them(
    is_native: bool,  # noqa: FBT001
    is_quantised: bool,  # noqa: FBT001
) -> None:
    """Their shapes and their weights are those before, each as a part of the merged layer's outputs."""
    loaded = TinyBase("llama", is_quantised, is_native).loaded()
    before = {path: part.dense() for path, part in linear_parts(loaded.model).items()}
    shapes = base_layers(loaded.model)
    mx.eval(before)

    make_engine(loaded)

    after = linear_parts(loaded.model)
    assert base_layers(loaded.model) == shapes
    assert shapes["model.layers.1.self_attn.k_proj"] == BaseLayer(64, 128, heads=2)
    assert after["model.layers.1.self_attn.k_proj"].begin == 128, "behind the queries"
    assert all(bool(mx.array_equal(after[path].dense(), dense)) for path, dense in before.items())


def test_layers_of_experts_and_embeddings_are_left_out() -> None:
    """Their shared expert, their router and the attention are there."""
    layers = base_layers(TinyBase("qwen3_next").loaded().model)

    assert not any("switch_mlp" in path or "embed" in path for path in layers)
    assert {"gate", "shared_expert_gate", "q_proj", "out_proj"} <= {
        path.rpartition(".")[2] for path in layers
    }


@pytest.mark.parametrize(
    ("variant", "left_out"),
    [("dbrx", "experts"), ("kimi_k3", "mlp_res_proj"), ("afm7", "qkv_proj")],
)
def test_layers_that_are_not_called_with_the_rows_of_a_pass_are_left_out(
    variant: str, left_out: str
) -> None:
    """An adapter that changes one is refused, and not computed wrongly or in part."""
    layers = base_layers(TinyBase(variant).loaded().model)

    assert layers
    assert not any(left_out in path.split(".") for path in layers)


def test_paths_of_other_parts_can_be_left_out() -> None:
    """As of a model with vision, whose language model alone takes adapters."""
    model = TinyBase("llama").loaded().model

    assert all(path.startswith("model.layers.0.") for path in base_layers(model, "model.layers.0."))
