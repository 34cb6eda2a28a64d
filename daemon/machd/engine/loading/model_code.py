"""The code that computes a model in memory: layer classes and a digest of their files."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.capabilities.model_code import LoadedCode
from machd.engine.backend.untyped import LanguageModel, Layer
from machd.engine.loading.placing.sharding import shard_modes

_MODELS = ("mlx_lm.models.", "mlx_vlm.models.")
_LAYERS = "mlx.nn.layers"
_PACKED = "Quantized"
"""Prefix of the names of layers with packed weights, in mlx and mlx-lm."""

_WHOLE = {"AllToShardedLinear": "Linear", "ShardedToAllLinear": "Linear"}
"""Sharded layer class to the class of the whole layer."""


def read_model_code(
    model: LanguageModel, cache: CacheFacts, own_files: Iterable[Path] = ()
) -> LoadedCode:
    """Name the classes of a model's layers, and hash the files that define them.

    Takes some milliseconds. Call it when layers have been repaired and not yet fused. Python code of
    the checkpoint's own (``own_files``) may have changed any class, so it is hashed as well.
    """
    # For a model with vision, the language model.
    package = type(getattr(model, "language_model", model)).__module__
    layers = frozenset(_name(module) for module in model.modules())
    caches = frozenset(_described(layer) for layer in cache.layers)
    modes = tuple(str(mode) for mode in shard_modes(model))
    return LoadedCode(package, layers, caches, _digest(package, own_files), modes)


def _name(layer: Layer) -> str:
    """Name a layer's class, and the switches that are on: they decide which code of it runs."""
    # A layer that computes with a bank's experts has the name of the layer that it replaces.
    kind = getattr(layer, "stands_for", type(layer))
    # mlx has its packed layers in a module of their own.
    module = _LAYERS if kind.__module__.startswith(_LAYERS) else kind.__module__
    switches = [
        name
        for name, value in sorted(vars(layer).items())
        if value is True and not name.startswith("_")
    ]
    name = kind.__qualname__.removeprefix(_PACKED)
    return " ".join([f"{module}.{_WHOLE.get(name, name)}", *switches])


def _described(layer: LayerCacheFacts) -> str:
    """Describe a cache's facts as text, without sizes."""
    words = [
        layer.class_name,
        f"of {layer.owner}" if layer.owner else "",
        "sinks" if layer.keep else "",
        "window" if layer.window_tokens is not None else "",
        "" if layer.trimmable else "untrimmable",
        "" if layer.mergeable else "unmergeable",
        *(f"({_described(inner)})" for inner in layer.nested),
    ]
    return " ".join(word for word in words if word)


def _digest(package: str, own_files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    files = [Path(module.__file__ or "") for module in _modules(package)]
    # File names without folders, so that the digest does not depend on the place of installation.
    for file in (*sorted(files), *sorted(own_files)):
        content = file.read_bytes() if file.is_file() else b""
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def _modules(package: str) -> Iterator[ModuleType]:
    """List a module of mlx-lm's or mlx-vlm's models and those that it imports from, each once."""
    seen: set[str] = set()
    names = [package]
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        if name in seen or module is None or not name.startswith(_MODELS):
            continue
        seen.add(name)
        yield module
        for value in list(vars(module).values()):
            is_module = isinstance(value, ModuleType)
            origin = getattr(value, "__name__" if is_module else "__module__", "")
            if isinstance(origin, str):
                names.append(origin)
