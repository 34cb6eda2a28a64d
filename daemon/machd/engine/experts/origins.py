"""From the arrays of a lazily loaded model back to the tensors of its files.

mlx-lm lets each model rename, split and stack the tensors of a checkpoint (``sanitize``). Arrays that
come through unchanged are the same objects afterwards, and a stack of them is noted while it is made; with
both, most checkpoints tell where each expert lies. What a model computes from its tensors has no place
in a file: such checkpoints are stored in mlx-lm's own layout by ``mlx_lm.convert``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.safetensors_header import StoredTensor
from machd.engine.backend.untyped import LanguageModel, Layer
from machd.engine.experts.stored_layer import ParameterForm, Place, StoredLayer
from machd.errors import ModelFormatError

ChooseDtype = Callable[[str, mx.Dtype, Layer], mx.Dtype]
"""Parameter name, stored dtype, and projection, to the dtype in memory."""

_PARAMETERS = ("weight", "scales", "biases", "bias", "global_scale")


class Origins:
    """Notes what becomes of a checkpoint's tensors while mlx-lm builds the model.

    It keeps every tensor of the checkpoint alive, lazy as they are: drop it before weights are computed.
    """

    def __init__(self, tensors: Mapping[str, tuple[Path, StoredTensor]]) -> None:
        """Begin with the tensors of all weight files, by name."""
        self._tensors = tensors
        self._names: dict[int, str] = {}
        self._stacks: dict[int, list[int]] = {}
        self._kept: list[object] = []
        self._model_class: type | None = None

    def model_classes(self, config: dict[str, object]) -> tuple[type, type]:
        """Find the classes of a model, as ``get_model_classes`` of mlx-lm's ``load_model``."""
        from mlx_lm import utils  # noqa: PLC0415 - after import_mlx_lm()

        model_class, arguments_class = utils._get_classes(config)  # noqa: SLF001 - the default of load_model
        self._model_class = model_class
        origins = self

        class Noted(model_class):  # type: ignore[misc, valid-type]
            """The model, whose tensors are noted on their way through ``sanitize``."""

            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                with origins.noting(weights):
                    changed = getattr(super(), "sanitize", lambda same: same)(weights)
                return dict(changed)

        return Noted, arguments_class

    def give_back_class(self, model: LanguageModel) -> None:
        """Let the model have its own class again."""
        assert self._model_class is not None, "the model was built with these classes"
        model.__class__ = self._model_class

    @contextmanager
    def noting(self, weights: Mapping[str, mx.array]) -> Iterator[None]:
        """Note the tensors that go in, and the stacks that are made of them."""
        self._names = {id(array): name for name, array in weights.items()}
        self._kept.extend(weights.values())
        stack = mx.stack

        def noted_stack(arrays: Sequence[mx.array], axis: int = 0, **named: object) -> mx.array:
            arrays = list(arrays)
            stacked: mx.array = stack(arrays, axis, **named)  # type: ignore[arg-type]
            if axis == 0:
                self._stacks[id(stacked)] = [id(array) for array in arrays]
                self._kept += [stacked, *arrays]
            return stacked

        mx.stack = noted_stack  # type: ignore[assignment]
        try:
            yield
        finally:
            mx.stack = stack

    def layer(self, path: str, switch: Module, choose_dtype: ChooseDtype) -> StoredLayer:
        """Locate the experts of one layer.

        Args:
            path: Of the layer.
            switch: Holds the projections.
            choose_dtype: Chooses the dtype in memory.

        Raises:
            ModelFormatError: The files do not hold them one by one.
        """
        places: dict[ParameterForm, tuple[Place, ...]] = {}
        for name, linear in projections(switch):
            for parameter in _PARAMETERS:
                array = linear.get(parameter)
                if array is None:
                    continue
                shape = tuple(array.shape[1:])
                dtype = choose_dtype(parameter, array.dtype, linear)
                form = ParameterForm(name, parameter, shape, array.dtype, dtype)
                found = self._places(array, form)
                if found is None:
                    raise ModelFormatError(
                        f"the experts of {path} cannot be read one by one: the model computes "
                        f"{name}.{parameter} from what the files hold. Store it in mlx-lm's layout with "
                        "`mlx_lm.convert --hf-path THIS --mlx-path NEW`, or serve it without "
                        "`--experts-resident-gb`"
                    )
                places[form] = found
        return StoredLayer(path, places)

    def _places(self, array: mx.array, form: ParameterForm) -> tuple[Place, ...] | None:
        experts, size_bytes = array.shape[0], form.stored_bytes
        if (whole := self._stored(id(array))) is not None:
            file, tensor = whole
            if tensor.size_bytes != experts * size_bytes:
                return None
            return tuple(Place(file, tensor.offset + i * size_bytes) for i in range(experts))
        parts = [self._stored(part) for part in self._stacks.get(id(array), ())]
        found = [Place(file, one.offset) for file, one in _known(parts, size_bytes)]
        return tuple(found) if len(found) == experts else None

    def _stored(self, array_id: int) -> tuple[Path, StoredTensor] | None:
        name = self._names.get(array_id)
        return None if name is None else self._tensors.get(name)


def switch_layers(model: LanguageModel) -> list[tuple[str, Module]]:
    """List the modules that compute experts, in the order of the layers."""
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP  # noqa: PLC0415 - after import_mlx_lm()

    found = [
        (path, one) for path, one in model.named_modules() if isinstance(one, SwitchGLU | SwitchMLP)
    ]
    return sorted(found, key=lambda pair: _layer_order(pair[0]))


def projections(switch: Module) -> list[tuple[str, Any]]:
    """List the projections of a module that computes experts, plain or packed."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear  # noqa: PLC0415

    kinds = (SwitchLinear, QuantizedSwitchLinear)
    return [(name, one) for name, one in switch.children().items() if isinstance(one, kinds)]


def _known(
    parts: Sequence[tuple[Path, StoredTensor] | None], size_bytes: int
) -> Iterator[tuple[Path, StoredTensor]]:
    for part in parts:
        if part is not None and part[1].size_bytes == size_bytes:
            yield part


def _layer_order(path: str) -> list[tuple[bool, int, str]]:
    """Sort paths with their numbers as numbers.

    >>> sorted(["layers.10", "layers.9"], key=_layer_order)
    ['layers.9', 'layers.10']
    """
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split(".")]
