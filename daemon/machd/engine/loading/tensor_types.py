"""What becomes in memory of each type of tensors that a GGUF file has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.loading.formats.gguf.header import GgufTensor
from machd.engine.loading.formats.gguf.opened import OpenedGguf
from machd.engine.loading.formats.gguf.packings import PACKINGS
from machd.engine.loading.formats.opened import Opened
from machd.engine.loading.placing.precision import dtype_name
from machd.engine.loading.placing.weight_formats import Quantization

_EXACT_IN: Mapping[str, tuple[str, ...]] = {
    "F32": ("float32",),
    "F16": ("float32", "float16"),
    "BF16": ("float32", "bfloat16"),
}
"""Dtypes that hold every number of a type of floats."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """The tensors of one type.

    Attributes:
        name: ggml's, such as ``Q4_K``.
        tensors: Their number in the file.
        stored_bytes: Their size in the file.
        held_as: Forms that they have in memory, such as ``affine 4-bit, group 32`` or ``float16``; none where the model needs
            none of them.
        held_bytes: Their size in memory.
        is_exact: Every weight in memory is the file's own number.
    """

    name: str
    tensors: int
    stored_bytes: int
    held_as: tuple[str, ...]
    held_bytes: int
    is_exact: bool


def tensor_types(opened: Opened, model: Module) -> tuple[TensorType, ...]:
    """List the types of a GGUF file's tensors, the largest in the file first; none for a directory.

    Args:
        opened: The model's files.
        model: Built of them, and held as it will be in memory.
    """
    if not isinstance(opened, OpenedGguf):
        return ()
    held: dict[str, list[tuple[str, int]]] = {}
    for tensor, form, held_bytes in _held(opened, model):
        held.setdefault(tensor.type_name, []).append((form, held_bytes))
    stored: dict[str, list[int]] = {}
    for tensor in opened.header.tensors:
        stored.setdefault(tensor.type_name, []).append(tensor.size_bytes)
    found = (_type(name, sizes, held.get(name, [])) for name, sizes in stored.items())
    return tuple(sorted(found, key=lambda one: -one.stored_bytes))


def _type(name: str, sizes: list[int], held: list[tuple[str, int]]) -> TensorType:
    forms = tuple(sorted({form for form, _ in held}))
    return TensorType(
        name=name,
        tensors=len(sizes),
        stored_bytes=sum(sizes),
        held_as=forms,
        held_bytes=sum(held_bytes for _, held_bytes in held),
        is_exact=all(form in _exact_forms(name) for form in forms),
    )


def _exact_forms(type_name: str) -> tuple[str, ...]:
    packing = PACKINGS.get(type_name)
    if packing is None:
        return _EXACT_IN.get(type_name, ())
    return str(Quantization(packing.mode, packing.bits, packing.group_size)), "float32"


def _held(opened: OpenedGguf, model: Module) -> Iterator[tuple[GgufTensor, str, int]]:
    """Yield each tensor with its form and bytes in memory, once for each parameter that it becomes, or a share of."""
    modules = dict(model.named_modules())
    for path, parameters in opened.modules.items():
        for name, tensors in parameters.items():
            form, held_bytes = _form(modules[path], name)
            elements = sum(tensor.elements for tensor in tensors)
            for tensor in tensors:
                yield tensor, form, held_bytes * tensor.elements // elements


def _form(module: Module, name: str) -> tuple[str, int]:
    """Return the form of a parameter, and its bytes."""
    array = module[name]
    assert isinstance(array, mx.array)
    if name != "weight" or "scales" not in module:
        return dtype_name(array.dtype), array.nbytes
    packing = Quantization(str(module.mode), int(module.bits), int(module.group_size))
    parts = (module[part] for part in ("weight", "scales", "biases") if part in module)
    return str(packing), sum(part.nbytes for part in parts)
