"""Which layers of the base model an adapter's tensors are for; all of them land on one of the right shape, or none does."""

from __future__ import annotations

from collections.abc import Iterator

from machd.engine.adapters.low_rank import BaseLayer, BaseLayers
from machd.engine.adapters.stored_adapter import StoredAdapter, StoredLayer
from machd.engine.backend.model_files import shortened
from machd.errors import AdapterError

_PREFIXES = (
    "",
    "model.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
)
"""What stands before ``layers`` in the names of one program and not in those of another."""

MAX_EXCESS_RANK = 1024
"""Largest rank where a layer's weights have a smaller one; training with a rank like that gains nothing."""

_MAX_SHOWN = 8
"""Tensors that an error lists."""


def landed(adapter: StoredAdapter, base: BaseLayers) -> dict[str, StoredLayer]:
    """Find the layer of the base model for each layer of the adapter.

    Returns:
        The adapter's layers by the base model's paths.

    Raises:
        AdapterError: A layer has no counterpart, or one of another shape; the message lists them.
    """
    paths = _paths([layer.name for layer in adapter.layers], base)
    problems = [
        f"{shortened(layer.name)}: {problem}"
        for layer in adapter.layers
        for problem in _misfits(layer, base.get(paths[layer.name]))
    ]
    if problems:
        more = len(problems) - _MAX_SHOWN
        raise AdapterError(
            f"{len(problems):,} of {len(adapter.layers):,} layers do not fit the model: "
            + "; ".join(problems[:_MAX_SHOWN])
            + (f"; and {more:,} more" if more > 0 else "")
            + f". The model has {_examples(base)}"
        )
    return {paths[layer.name]: layer for layer in adapter.layers}


def _paths(names: list[str], base: BaseLayers) -> dict[str, str]:
    """Find the base model's path of each name: as it is, or with the one change of prefix that suits them all."""
    if all(name in base for name in names):
        return {name: name for name in names}
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for without in _PREFIXES:
        if all(name.startswith(without) for name in names):
            for prefix in _PREFIXES:
                paths = {name: prefix + name.removeprefix(without) for name in names}
                if all(path in base for path in paths.values()):
                    found[tuple(paths.values())] = paths
    if len(found) > 1:
        ways = " or ".join(shortened(paths[0]) for paths in list(found)[:2])
        raise AdapterError(
            f"its layers' names fit the model in several ways: {shortened(names[0])} may be {ways}"
        )
    if found:
        return next(iter(found.values()))
    return {name: name for name in names} | _most(names, base)


def _most(names: list[str], base: BaseLayers) -> dict[str, str]:
    """Find the change of prefix that suits most names, for a list of the others."""
    ways = [
        {
            name: prefix + name.removeprefix(without)
            for name in names
            if name.startswith(without) and prefix + name.removeprefix(without) in base
        }
        for without in _PREFIXES
        for prefix in _PREFIXES
    ]
    return max(ways, key=len)


def _misfits(layer: StoredLayer, of_base: BaseLayer | None) -> Iterator[str]:
    if of_base is None:
        experts = ", and adapters of experts are not served with it" if layer.fits.experts else ""
        yield f"the model has no such linear layer{experts}"
        return
    fits = layer.fits
    if (fits.outputs, fits.inputs, fits.experts) != (
        of_base.outputs,
        of_base.inputs,
        of_base.experts,
    ):
        a, b = layer.a[0].shape, layer.b[0].shape
        swapped = (fits.inputs, fits.outputs) == (of_base.outputs, of_base.inputs)
        yield (
            f"A {list(a)} and B {list(b)} are for {_shown(fits)}, and the model's is {_shown(of_base)}"
            + (": A and B are exchanged or transposed" if swapped else "")
        )
        return
    if layer.rank > max(min(fits.outputs, fits.inputs), MAX_EXCESS_RANK):
        yield f"rank {layer.rank:,} is larger than {_shown(of_base)} and than {MAX_EXCESS_RANK:,}"
    if layer.magnitude is not None and (
        of_base.experts or layer.magnitude.shape != (of_base.outputs,)
    ):
        yield f"DoRA's magnitudes {list(layer.magnitude.shape)} are not one for each of {_shown(of_base)}'s outputs"
    if layer.has_paired_rows and (not of_base.heads or of_base.outputs % (2 * of_base.heads)):
        yield "the model does not tell its heads, by which llama.cpp orders rows; take the adapter in PEFT's format"


def _shown(layer: BaseLayer) -> str:
    plain = f"[{layer.outputs}, {layer.inputs}]"
    return f"{layer.experts} experts of {plain}" if layer.experts else plain


def _examples(base: BaseLayers) -> str:
    """Show some of the base model's layers."""
    if not base:
        return "no linear layers that take adapters"
    shown = [f"{shortened(path)} {_shown(layer)}" for path, layer in list(base.items())[:3]]
    return f"{len(base):,} such layers, the first of them {', '.join(shown)}"
