"""Experts computed by machd's own kernels: with their weights as they are stored, and the same bits in every company."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_map
from support.engines.cpu_layers import for_cpu_layers
from support.engines.native import without_kernels
from support.engines.rounding import is_equal_but_for_rounding

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.experts.tensor_origins import projections, switch_layers
from machd.engine.kernels.native_layers import has_native_product, is_native
from machd.engine.loading.formats.opened import weights_bytes
from machd.engine.loading.placing.precision import Conversion, model_dtype, native_layers
from machd.engine.loading.placing.weight_formats import WEIGHT_FORMATS
from machd.engine.loading.placing.whole import materialise
from machd.engine.protocol.progress import SilentProgress
from machd_probes.tiny import tiny_configuration, tiny_model

pytestmark = [
    for_cpu_layers,
    pytest.mark.skipif(native_kernels() is None, reason="make setup has found no compiler"),
]

_FORMS = ("bfloat16", "float16", "affine4", "mxfp4")
_IDS = mx.array([[5, 80, 200, 7, 9], [3, 1, 4, 1, 5]])


def _stored(architecture: str, form: str) -> Module:
    """Build a tiny model with weights as a checkpoint stores them."""
    import_mlx_lm()
    model = tiny_model(tiny_configuration(architecture))
    if form in ("bfloat16", "float16"):
        dtype = getattr(mx, form)
        model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
    else:
        mode = "affine" if form == "affine4" else form
        quantize(model, group_size=32, bits=4, mode=mode)
    return model


def _converted(model: Module) -> Module:
    native = native_layers("auto")
    dtype = model_dtype(model, "auto", None, backend="cpu", available_bytes=1 << 40, native=native)
    assert dtype is mx.float32
    materialise(model, Conversion(dtype, native=native), SilentProgress())
    return model


def _experts(model: Module) -> list[tuple[str, Any]]:
    return [pair for _, switch in switch_layers(model) for pair in projections(switch)]


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_stay_as_stored_and_compute_as_mlxs_in_float32(
    architecture: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases of experts included, which gpt_oss has."""
    stored_bytes = sum(weights_bytes(one) for _, one in _experts(_stored(architecture, form)))
    model = _converted(_stored(architecture, form))
    experts = [one for _, one in _experts(model)]
    assert experts
    assert all(is_native(one) for one in experts)
    biases_bytes = sum(one.bias.nbytes for one in experts if "bias" in one)
    # A bias is float32, as what it is added to.
    assert sum(weights_bytes(one) for one in experts) <= stored_bytes + biases_bytes
    with monkeypatch.context() as patch:
        without_kernels(patch)
        expanded = _converted(_stored(architecture, form))
        assert not any(is_native(one) for _, one in _experts(expanded))
    assert is_equal_but_for_rounding(model(_IDS), expanded(_IDS))


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_a_tokens_bits_depend_on_no_other_token(architecture: str, form: str) -> None:
    """Alone, among few, and among so many that mlx-lm sorts them by their experts."""
    (_, switch), *_ = switch_layers(_converted(_stored(architecture, form)))
    tokens = 40
    mx.random.seed(1)
    x = mx.random.normal((tokens, 1, 128))
    indices = mx.argsort(mx.random.normal((tokens, 1, 4)), axis=-1)[..., :2]
    alone = [switch(x[at : at + 1], indices[at : at + 1]) for at in range(tokens)]
    for count in (2, 9, 31, 32, tokens):
        together = switch(x[:count], indices[:count])
        assert mx.array_equal(together, mx.concatenate(alone[:count])), count


def test_quantised_plain_experts_are_native_too() -> None:
    """``model.quantize`` packs them, and machd's kernels read what it packed."""
    model = _stored("mixtral", "bfloat16")
    conversion = Conversion(mx.float32, WEIGHT_FORMATS["mxfp8"], native_layers("auto"))
    materialise(model, conversion, SilentProgress())
    packed = [one for _, one in _experts(model)]
    assert all("scales" in one and is_native(one) for one in packed)
    assert mx.isfinite(model(_IDS)).all()


def test_experts_with_a_scale_of_their_own_are_mlxs() -> None:
    """No kernel of machd's applies an expert's global scale."""
    import_mlx_lm()
    from mlx_lm.models.switch_layers import SwitchLinear  # noqa: PLC0415 - after import_mlx_lm()

    plain = SwitchLinear(64, 32, 4)
    assert has_native_product(plain)
    assert has_native_product(plain.to_quantized(16, 4, "nvfp4"))
    assert not has_native_product(plain.to_quantized(16, 4, "nvfp4", global_scale=True))
    plain.weight = plain.weight[0]
    assert not has_native_product(plain), "weights without an axis of experts"
