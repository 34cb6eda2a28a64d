"""A family of GGUF files: what it is called in mlx-lm, and how its tensors become parameters there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from machd.engine.loading.formats.gguf.header import GgufHeader, GgufTensor

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module

Change: TypeAlias = Callable[[GgufHeader, "mx.array"], "mx.array"]
"""Turns a stored array into the one that mlx-lm has. Of packed weights it gets weights, scales and biases one after the other."""

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>[\w.]+?)(?:\.(?P<part>weight|bias))?")

_ROW = "#"

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
        names: ggml's module to mlx-lm's path; ``*`` is the layer's number, and a layer's module begins with ``blk.*.``;
            ``#`` is the number of a row, where each row of ggml's tensor has a module of its own.
            With ``.weight`` or ``.bias`` at its end, a name is that of one parameter, whose whole path is given.
        config: Makes the configuration that mlx-lm's ``ModelArgs.from_dict`` takes, without ``model_type``.
        changes: By the end of mlx-lm's path of a module or of a parameter: arrays that ggml stores in another way.
        leaves_out: Tensors that are no parameters of the model.
        rope_of_factors: Makes mlx-lm's ``rope_scaling`` of the configuration and the divisors of rotary frequencies, by tensor.
        finish: What mlx-lm's ``sanitize`` does to the model itself for such weights.
        variant: Finds the table of a file, where files of one architecture become several of mlx-lm's.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str]
    config: Callable[[GgufHeader], dict[str, object]]
    changes: Mapping[str, Change] = field(default_factory=dict)
    leaves_out: frozenset[str] = frozenset({ROPE_FACTORS})
    rope_of_factors: Callable[
        [Mapping[str, object], Mapping[str, list[float]]], dict[str, object]
    ] = _same_at_each_length
    finish: Callable[[GgufHeader, Module], None] = lambda _header, _model: None
    variant: Callable[[GgufHeader], Family] | None = None

    def parameter(self, tensor_name: str) -> tuple[str, str] | None:
        """Return mlx-lm's path of the module that a tensor belongs to, and the parameter's name; None for a foreign one."""
        match = _NAME.fullmatch(tensor_name)
        if match is None:
            return None
        layer, module, part = match["layer"], match["module"], match["part"]
        generic = module if layer is None else f"blk.*.{module}"
        whole = self.names.get(f"{generic}.{part}" if part else generic)
        if whole is not None and (part is None or f"{generic}.{part}" in self.names):
            path, _, name = whole.rpartition(".")
        else:
            path, name = self.names.get(generic, ""), part or ""
        if not path or not name:
            return None
        return path.replace("*", layer or "*"), name

    def rope_factors(self, header: GgufHeader) -> list[GgufTensor]:
        """Find the tensors with divisors of rotary frequencies that the family reads."""
        names = self.leaves_out & _ROPE_FACTORS
        return [tensor for tensor in header.tensors if tensor.name in names]

    def changed(self, header: GgufHeader, path: str, name: str, array: mx.array) -> mx.array:
        """Turn a stored array of a module's parameter into mlx-lm's."""
        for end, change in self.changes.items():
            if path.endswith(end) or f"{path}.{name}".endswith(end):
                return change(header, array)
        return array


def module_tensors(family: Family, header: GgufHeader) -> dict[str, dict[str, GgufTensor]]:
    """Find the tensors of each module: by mlx-lm's path of the module, then by the parameter's name."""
    found: dict[str, dict[str, GgufTensor]] = {}
    for tensor, (path, name) in _parameters(family, header):
        if _ROW not in path:
            found.setdefault(path, {})[name] = tensor
            continue
        for row, one in enumerate(_rows(tensor)):
            found.setdefault(path.replace(_ROW, str(row)), {})[name] = one
    return found


def _rows(tensor: GgufTensor) -> Iterator[GgufTensor]:
    count, *shape = tensor.shape
    row_bytes = tensor.size_bytes // count
    for row in range(count):
        offset = tensor.offset + row * row_bytes
        yield replace(tensor, shape=tuple(shape), offset=offset, size_bytes=row_bytes)


def _parameters(family: Family, header: GgufHeader) -> Iterator[tuple[GgufTensor, tuple[str, str]]]:
    for tensor in header.tensors:
        parameter = family.parameter(tensor.name)
        if parameter is not None:
            yield tensor, parameter
