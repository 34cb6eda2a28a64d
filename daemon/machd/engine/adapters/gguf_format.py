"""LoRA adapters in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from dataclasses import replace

from machd.engine.adapters.adapter_config import factor
from machd.engine.adapters.stored_adapter import (
    StoredAdapter,
    StoredArray,
    StoredLayer,
    check_arrays,
    check_layers,
    refuse_embedding,
    together,
)
from machd.engine.backend.model_files import shortened
from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import LLAMA_ORDER, UNFUSED
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.engine.loading.formats.gguf.reading import family_of
from machd.errors import AdapterError

_ALPHA = "adapter.lora.alpha"
_PARTS = {"lora_a": "a", "lora_b": "b"}


def read_gguf_adapter(header: GgufHeader) -> StoredAdapter:
    """Find the layers of an adapter.

    Raises:
        AdapterError: The file is a model's, or holds what is not served as an adapter.
        ModelError: Its metadata are damaged, or machd reads no such family.
    """
    _check_kind(header)
    family = family_of(header)
    parts: dict[str, dict[str, StoredArray]] = {}
    for tensor in header.tensors:
        name, _, part = tensor.name.rpartition(".")
        if part not in _PARTS:
            raise AdapterError(
                f"it holds {shortened(tensor.name)}, which is no tensor of LoRA; weights that were trained whole are not served"
            )
        of_layer = parts.setdefault(_path(family, name), {})
        if _PARTS[part] in of_layer:
            raise AdapterError(f"two of its tensors are for the layer of {shortened(tensor.name)}")
        of_layer[_PARTS[part]] = StoredArray(
            tensor.name, tensor.type_name, tensor.shape, tensor.offset, tensor.size_bytes
        )
    check_arrays(one for of_layer in parts.values() for one in of_layer.values())
    together(parts)
    alpha = factor(header.number(_ALPHA), _ALPHA)
    return StoredAdapter(
        check_layers(_layer(family, path, of_layer, alpha) for path, of_layer in parts.items()),
        _base_model(header),
    )


def _check_kind(header: GgufHeader) -> None:
    kind = header.text("general.type", "model")
    if kind != "adapter":
        raise AdapterError(f"the file's general.type is {shortened(kind)}, not adapter")
    of_adapter = header.text("adapter.type")
    if of_adapter != "lora":
        raise AdapterError(f"the file's adapter.type is {shortened(of_adapter)}, not lora")
    if header.metadata.get("adapter.alora.invocation_tokens"):
        raise AdapterError(
            "it is an activated LoRA, which begins inside a prompt; that is not served"
        )
    if header.integer("split.count", 1) > 1:
        raise AdapterError(
            "it is split into several files; join them with `llama-gguf-split --merge`"
        )


def _path(family: Family, name: str) -> str:
    """Find mlx-lm's path of the one module that a tensor is for."""
    found = [path for path, part in family.parameters(name) if part == "weight"]
    if not found:
        raise AdapterError(f"{family.architecture} has no {shortened(name)}")
    for path in found:
        refuse_embedding(path)
    change = _change(family, found[0])
    others = family.parameters(name)[1:]
    if others or change not in (None, *LLAMA_ORDER.values(), *UNFUSED.values()):
        raise AdapterError(
            f"{shortened(name)} of {family.architecture} holds other rows than the model's own layer; take the adapter "
            "in PEFT's format"
        )
    return found[0]


def _change(family: Family, path: str) -> object:
    return next((one for end, one in family.changes.items() if path.endswith(end)), None)


def _layer(
    family: Family, path: str, of_layer: dict[str, StoredArray], alpha: float
) -> StoredLayer:
    layer = StoredLayer(
        name=path,
        a=(of_layer["a"],),
        b=(of_layer["b"],),
        scale=1.0,
        has_paired_rows=_change(family, path) in LLAMA_ORDER.values(),
    )
    check_layers([layer])
    return replace(layer, scale=alpha / layer.rank)


def _base_model(header: GgufHeader) -> str | None:
    for key in ("general.base_model.0.repo_url", "general.base_model.0.name"):
        if key in header.metadata:
            return header.text(key)
    return None
