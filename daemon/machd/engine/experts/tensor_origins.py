"""Trace the arrays of a lazily loaded model back to tensors of the checkpoint's files.

mlx-lm lets each model rename, split and stack the tensors of a checkpoint (``sanitize``). An array that passes
through unchanged is the same object afterwards, and a stack is recorded as ``mx.stack`` makes it; the two cover
mlx-lm's own layout and most published ones. An array that the model computes from its tensors has no
location in a file: such a checkpoint has to be stored in mlx-lm's layout by ``mlx_lm.convert`` first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.safetensors_header import StoredTensor
from machd.engine.backend.untyped import LanguageModel
from machd.engine.experts.stored_layer import ExpertParameter, Location, StoredLayer
from machd.errors import ModelFormatError

_PARAMETERS = ("weight", "scales", "biases", "bias", "global_scale")


class TensorOrigins:
    """Records which tensors a model's arrays are, while mlx-lm builds the model.

    It keeps every tensor of the checkpoint alive: :meth:`release` them before the weights are computed.
    """

    def __init__(self, tensors: Mapping[str, tuple[Path, StoredTensor]]) -> None:
        self._tensors = tensors
        self._names: dict[int, str] = {}
        self._stacks: dict[int, list[int]] = {}
        self._kept: list[object] = []
        self._model_class: type | None = None

    def model_classes(self, config: dict[str, object]) -> tuple[type, type]:
        """Return a model's class, which records its tensors, and its arguments' class.

        For the parameter ``get_model_classes`` of mlx-lm's ``load_model``.
        """
        from mlx_lm import utils  # noqa: PLC0415 - after import_mlx_lm()

        model_class, arguments_class = utils._get_classes(config)  # noqa: SLF001 - the default of load_model
        self._model_class = model_class
        origins = self

        class Recorded(model_class):  # type: ignore[misc, valid-type]
            """The model's class, whose ``sanitize`` is recorded."""

            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                with origins.recording(weights):
                    changed = getattr(super(), "sanitize", lambda same: same)(weights)
                return dict(changed)

        return Recorded, arguments_class

    def restore_class(self, model: LanguageModel) -> None:
        """Give the model its own class again."""
        assert self._model_class is not None, "the model was built with these classes"
        model.__class__ = self._model_class

    @contextmanager
    def recording(self, weights: Mapping[str, mx.array]) -> Iterator[None]:
        """Record these tensors by name, and the stacks that are made of them."""
        self._names = {id(array): name for name, array in weights.items()}
        self._kept.extend(weights.values())
        stack = mx.stack

        def recorded_stack(arrays: Sequence[mx.array], axis: int = 0, **named: object) -> mx.array:
            arrays = list(arrays)
            stacked: mx.array = stack(arrays, axis, **named)  # type: ignore[arg-type]
            if axis == 0:
                self._stacks[id(stacked)] = [id(array) for array in arrays]
                self._kept += [stacked, *arrays]
            return stacked

        mx.stack = recorded_stack  # type: ignore[assignment]
        try:
            yield
        finally:
            mx.stack = stack

    def release(self) -> None:
        """Drop the arrays that were recorded."""
        self._names.clear()
        self._stacks.clear()
        self._kept.clear()

    def stored_layers(
        self, model: LanguageModel, dense_dtype: mx.Dtype | None, *, backend: str
    ) -> list[StoredLayer]:
        """Locate the experts of every layer of a lazily loaded model that has some.

        Raises:
            ModelFormatError: The files do not hold the experts one by one.
        """
        return [
            self._stored_layer(path, switch, dense_dtype, backend)
            for path, switch in switch_layers(model)
        ]

    def _stored_layer(
        self, path: str, switch: Module, dense_dtype: mx.Dtype | None, backend: str
    ) -> StoredLayer:
        locations: dict[ExpertParameter, tuple[Location, ...]] = {}
        for parameter, array in expert_parameters(switch, dense_dtype, backend=backend):
            found = self._locations(array, parameter)
            if found is None:
                raise ModelFormatError(
                    f"the experts of {path} cannot be read one by one: the model computes "
                    f"{parameter.projection}.{parameter.name} from what the files hold. Store it in "
                    "mlx-lm's layout with `mlx_lm.convert --hf-path THIS --mlx-path NEW`, or serve it "
                    "without `--experts-resident-gb`"
                )
            locations[parameter] = found
        return StoredLayer(path, locations)

    def _locations(
        self, array: mx.array, parameter: ExpertParameter
    ) -> tuple[Location, ...] | None:
        """Locate each expert of an array [experts, *shape]; None if the files do not hold it."""
        experts, size_bytes = array.shape[0], parameter.stored_bytes
        if (whole := self._tensor(id(array))) is not None:
            file, tensor = whole
            if tensor.size_bytes != experts * size_bytes:
                return None
            return tuple(Location(file, tensor.offset + i * size_bytes) for i in range(experts))
        parts = [self._tensor(part) for part in self._stacks.get(id(array), ())]
        found = [
            Location(part[0], part[1].offset)
            for part in parts
            if part is not None and part[1].size_bytes == size_bytes
        ]
        return tuple(found) if len(found) == experts else None

    def _tensor(self, array_id: int) -> tuple[Path, StoredTensor] | None:
        name = self._names.get(array_id)
        return None if name is None else self._tensors.get(name)


def switch_layers(model: LanguageModel) -> list[tuple[str, Module]]:
    """List a model's switch layers with their paths, in the order of the layers."""
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP  # noqa: PLC0415 - after import_mlx_lm()

    found = [
        (path, one) for path, one in model.named_modules() if isinstance(one, SwitchGLU | SwitchMLP)
    ]
    return sorted(found, key=lambda pair: _layer_order(pair[0]))


def projections(switch: Module) -> list[tuple[str, Any]]:
    """List the projections of a switch layer, plain or quantised, with their names."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear  # noqa: PLC0415

    kinds = (SwitchLinear, QuantizedSwitchLinear)
    return [(name, one) for name, one in switch.children().items() if isinstance(one, kinds)]


def expert_parameters(
    switch: Module, dense_dtype: mx.Dtype | None, *, backend: str
) -> Iterator[tuple[ExpertParameter, mx.array]]:
    """Yield the parameters that each expert of a switch layer has, and their arrays [experts, *shape]."""
    for name, projection in projections(switch):
        is_quantised = "scales" in projection
        for parameter_name in _PARAMETERS:
            array = projection.get(parameter_name)
            if array is None:
                continue
            dtype = array.dtype
            if mx.issubdtype(dtype, mx.floating) and parameter_name != "global_scale":
                # mlx's gather_mm on the CPU computes float32 only.
                only = mx.float32 if backend == "cpu" and not is_quantised else None
                dtype = only or dense_dtype or dtype
            shape = tuple(array.shape[1:])
            yield ExpertParameter(name, parameter_name, shape, array.dtype, dtype), array


def _layer_order(path: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that compares the numbers in a path as numbers.

    >>> sorted(["layers.10", "layers.9"], key=_layer_order)
    ['layers.9', 'layers.10']
    """
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split(".")]
