"""Dense layers behind pooling, with the weights of their own folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
from mlx.nn.layers import activations
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from machd.engine.backend.safetensors_header import read_safetensors_header
from machd.engine.encoding.sentence_modules import DenseModule
from machd.engine.encoding.weights import fit
from machd.errors import ModelFormatError

_WEIGHTS = "model.safetensors"

_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
    "ReLU": activations.relu,
    "GELU": activations.gelu,
    "Sigmoid": mx.sigmoid,
    "SiLU": activations.silu,
}


class Dense(Module):
    """``activation(linear(x))``, perhaps with ``x`` added; in float32."""

    def __init__(self, module: DenseModule) -> None:
        """Make one with weights that are to be read."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = Linear(module.in_features, module.out_features, bias=module.has_bias)
        self._activation = _ACTIVATIONS[module.activation]
        self._is_residual = module.is_residual

    def __call__(self, vectors: mx.array) -> mx.array:
        """Compute [rows, in_features] to [rows, out_features]."""
        made = self._activation(self.linear(vectors))
        return made + vectors if self._is_residual else made


def load_dense(
    module: DenseModule, beside: Mapping[str, mx.array], config: Mapping[str, object]
) -> Dense:
    """Read a dense layer's weights.

    Args:
        module: Its configuration.
        beside: Tensors among the model's own that are named after dense layers, as mlx-vlm's converter writes them.
        config: The checkpoint's, for the packing of those.

    Raises:
        ModelFormatError: The weights are missing, broken, or of other shapes than the configuration says.
    """
    path = module.folder / _WEIGHTS
    prefix = f"dense.{module.index}."
    name = f"{module.name}/{_WEIGHTS}"
    if path.is_file():
        read_safetensors_header(path)
        tensors = mx.load(str(path))
        assert isinstance(tensors, dict)
    else:
        tensors = {
            f"linear.{key.removeprefix(prefix)}": one
            for key, one in beside.items()
            if key.startswith(prefix)
        }
        name = "the weights"
    if not tensors:
        raise ModelFormatError(
            f"{module.name} holds no {_WEIGHTS}: fetch the model again with its folders, or convert pickled weights"
        )
    layer = Dense(module)
    fit(layer, tensors, config, name=name)
    layer.set_dtype(mx.float32)
    return layer
