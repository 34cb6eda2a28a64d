"""A family of GGUF files: what it is called in mlx-lm, and how its tensors become parameters there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from machd.engine.loading.formats.gguf.header import GgufHeader, GgufTensor
from machd.errors import ModelFormatError

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module

Change: TypeAlias = Callable[..., "mx.array"]
"""Takes the header and a parameter's stored arrays, one of each tensor in the order of the family's names, and returns mlx-lm's
array. Of packed weights it gets weights, scales and biases one after the other."""

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>[\w.]+?)(?:\.(?P<part>weight|bias))?")

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor with one divisor for each rotary frequency."""

_ROPE_FACTORS = frozenset({ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight"})


def _same_at_each_length(
    config: Mapping[str, object], factors: Mapping[str, list[float]]
) -> dict[str, object]:
    # mlx-lm's "longrope" takes a factor for each frequency; with equal context lengths it scales nothing else.
    return {
        "type": "longrope",
        "original_max_position_embeddings": config["max_position_embeddings"],
        "short_factor": factors[ROPE_FACTORS],
        "long_factor": factors[ROPE_FACTORS],
    }


@dataclass(frozen=True, slots=True)
class Family:
    """One family, as a table.

    Attributes:
        architecture: The file's ``general.architecture``.
        model_type: mlx-lm's.
        names: ggml's module to mlx-lm's path; ``*`` is the layer's number, and a layer's module begins with ``blk.*.``.
            With ``.weight`` or ``.bias`` at its end, a name is that of one parameter, whose whole path is given. A module
            whose rows are several modules in mlx-lm has their paths, and a change for each. Modules of the same path are
            joined along their rows, in this order, or by their change.
        config: Makes the configuration that mlx-lm's ``ModelArgs.from_dict`` takes, without ``model_type``.
        changes: By the end of mlx-lm's path of a module or of a parameter: arrays that ggml stores in another way.
        expands: ggml's modules that never stay packed, because their columns become rows.
        leaves_out: Tensors that are no parameters of the model.
        rope_of_factors: Makes mlx-lm's ``rope_scaling`` of the configuration and the divisors of rotary frequencies, by tensor.
        finish: What mlx-lm's ``sanitize`` does to the model itself for such weights.
        variant: Finds the table of a file, where files of one architecture become several of mlx-lm's.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str | tuple[str, ...]]
    config: Callable[[GgufHeader], dict[str, object]]
    changes: Mapping[str, Change] = field(default_factory=dict)
    expands: frozenset[str] = frozenset()
    leaves_out: frozenset[str] = frozenset({ROPE_FACTORS})
    rope_of_factors: Callable[
        [Mapping[str, object], Mapping[str, list[float]]], dict[str, object]
    ] = _same_at_each_length
    finish: Callable[[GgufHeader, Module], None] = lambda _header, _model: None
    variant: Callable[[GgufHeader], Family] | None = None

    def parameters(self, tensor_name: str) -> tuple[tuple[str, str], ...]:
        """Return what a tensor becomes: mlx-lm's path of each module, and the parameter's name; nothing for a foreign one."""
        match = _NAME.fullmatch(tensor_name)
        if match is None:
            return ()
        layer, part = match["layer"], match["part"]
        module, whole = _generic(match), _generic(match, part)
        if whole in self.names:
            cuts = [path.rpartition(".") for path in _each(self.names[whole])]
            paths = [(path, name) for path, _, name in cuts]
        else:
            paths = [(path, part or "") for path in _each(self.names.get(module, ()))]
        return tuple((path.replace("*", layer or "*"), name) for path, name in paths if name)

    def needs(self, header: GgufHeader, tensor_name: str) -> bool:
        """Tell whether the model needs a tensor: layers that predict further tokens come behind its own."""
        match = _NAME.fullmatch(tensor_name)
        is_behind = match and match["layer"] and int(match["layer"]) >= decoder_layers(header)
        return tensor_name not in self.leaves_out and not (
            is_behind and has_prediction_layers(header)
        )

    def rope_factors(self, header: GgufHeader) -> list[GgufTensor]:
        """Find the tensors with divisors of rotary frequencies that the family reads."""
        names = self.leaves_out & _ROPE_FACTORS
        return [tensor for tensor in header.tensors if tensor.name in names]

    def is_first(self, tensor: GgufTensor, path: str) -> bool:
        """Tell whether a tensor's first module has this path; a tensor that several modules read counts with it."""
        return self.parameters(tensor.name)[0][0] == path

    def keeps_packed(self, tensor: GgufTensor) -> bool:
        """Tell whether a tensor may stay packed."""
        match = _NAME.fullmatch(tensor.name)
        return match is not None and _generic(match) not in self.expands

    def changed(
        self, header: GgufHeader, path: str, name: str, arrays: Sequence[mx.array]
    ) -> mx.array:
        """Turn the stored arrays of a module's parameter into mlx-lm's."""
        for end, change in self.changes.items():
            if path.endswith(end) or f"{path}.{name}".endswith(end):
                return change(header, *arrays)
        if len(arrays) == 1:
            return arrays[0]
        from mlx.core import concatenate  # noqa: PLC0415 - headers are read without mlx

        return concatenate(list(arrays))


def decoder_layers(header: GgufHeader) -> int:
    """Count the model's own layers, without those behind them that predict further tokens.

    Raises:
        ModelFormatError: There are none.
    """
    of = header.text("general.architecture")
    layers = header.integer(f"{of}.block_count")
    further = header.integer(f"{of}.nextn_predict_layers", 0)
    if further and further >= layers:
        raise ModelFormatError(
            f"{header.path.name}: {further} of {layers} layers predict further tokens"
        )
    return layers - further


def has_prediction_layers(header: GgufHeader) -> bool:
    """Tell whether layers that predict further tokens come behind the model's own."""
    of = header.text("general.architecture")
    return header.integer(f"{of}.nextn_predict_layers", 0) > 0


def module_tensors(
    family: Family, header: GgufHeader
) -> dict[str, dict[str, tuple[GgufTensor, ...]]]:
    """Find the tensors of each module: by mlx-lm's path of the module, then by the parameter's name."""
    place = {module: index for index, module in enumerate(family.names)}
    found: dict[str, dict[str, tuple[GgufTensor, ...]]] = {}

    def order(tensor: GgufTensor) -> int:
        match = _NAME.fullmatch(tensor.name)
        assert match is not None
        module = _generic(match)
        return place.get(module, place.get(_generic(match, match["part"]), 0))

    for tensor in header.tensors:
        if family.needs(header, tensor.name):
            for path, name in family.parameters(tensor.name):
                others = found.setdefault(path, {}).get(name, ())
                found[path][name] = tuple(sorted((*others, tensor), key=order))
    return found


def _generic(match: re.Match[str], part: str | None = None) -> str:
    module = match["module"] if match["layer"] is None else f"blk.*.{match['module']}"
    return f"{module}.{part}" if part else module


def _each(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else paths
