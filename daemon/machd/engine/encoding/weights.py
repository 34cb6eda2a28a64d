"""Tensors of a checkpoint put into a module, name by name, so that what does not fit is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from machd.engine.backend.model_files import shortened
from machd.engine.backend.untyped import Layer
from machd.errors import ModelFormatError

_MAX_NAMED = 3


def fit(
    model: Module,
    tensors: Mapping[str, mx.array],
    config: Mapping[str, object],
    *,
    name: str = "the weights",
) -> None:
    """Quantise the layers that the tensors have packed, and put lazy tensors in the place of all parameters.

    Args:
        model: Its parameters are replaced.
        tensors: By the names of the parameters.
        config: The checkpoint's, for the packing of layers.
        name: Where the tensors are from, for messages.

    Raises:
        ModelFormatError: Tensors are missing, too many, or of other shapes.
    """
    if any(key.endswith(".scales") for key in tensors):
        _quantise(model, tensors, config)
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    parameters = dict(flat)
    missing, extra = parameters.keys() - tensors.keys(), tensors.keys() - parameters.keys()
    if missing or extra:
        problems = [
            f"{what} {_named(names)}"
            for what, names in (("lacks", missing), ("has too much:", extra))
            if names
        ]
        raise ModelFormatError(f"{name} of the checkpoint {' and '.join(problems)}")
    for key, parameter in parameters.items():
        if tensors[key].shape != parameter.shape:
            raise ModelFormatError(
                f"{name}: {shortened(key)} is {list(tensors[key].shape)}, and config.json makes it {list(parameter.shape)}"
            )
    model.load_weights(list(tensors.items()), strict=True)


def _quantise(model: Module, tensors: Mapping[str, mx.array], config: Mapping[str, object]) -> None:
    """Replace the layers whose tensors are packed by mlx with quantised ones."""
    from mlx_lm.utils import infer_quant_config  # noqa: PLC0415 - after import_mlx_lm()

    packing = config.get("quantization")
    if not isinstance(packing, dict):
        raise ModelFormatError(
            "the weights are packed, and config.json has no quantization that says how: take a checkpoint that mlx_lm.convert "
            "or mlx_vlm.convert made"
        )

    def predicate(path: str, layer: Layer) -> bool | dict[str, object]:
        if not hasattr(layer, "to_quantized") or f"{path}.scales" not in tensors:
            return False
        found: dict[str, object] = infer_quant_config(path, layer, tensors)
        return found

    quantize(model, class_predicate=predicate)


def refuse_not_finite(model: Module) -> None:
    """Refuse weights that hold NaN or infinity: they reach every vector.

    Raises:
        ModelFormatError: It names the first such tensor.
    """
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    for name, array in flat:
        if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(array).all().item():
            raise ModelFormatError(
                f"{shortened(name)} of the weights holds NaN or infinity: no text can be computed; fetch or convert the model again"
            )


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(shortened(one) for one in ordered[:_MAX_NAMED])
    return shown if len(ordered) <= _MAX_NAMED else f"{shown} and {len(ordered) - _MAX_NAMED} more"
