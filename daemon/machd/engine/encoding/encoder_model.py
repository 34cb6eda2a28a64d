"""An encoder's modules, built by its configuration and filled with a checkpoint's weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias

import mlx.core as mx
from mlx.nn.layers.activations import GELU
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from machd.engine.backend.inspection_bounds import printable
from machd.engine.backend.untyped import Layer
from machd.engine.encoding.bodies import Body, make_body
from machd.engine.encoding.dense import Dense, load_dense
from machd.engine.encoding.encoder_files import EncoderFiles
from machd.engine.encoding.families import Layers
from machd.engine.encoding.module_config import module_config
from machd.engine.encoding.pooling import pool
from machd.engine.encoding.sentence_modules import DenseModule
from machd.engine.encoding.weights import fit
from machd.engine.vision.mlx_vlm_import import is_installed
from machd.errors import MachdError, ModelArchitectureError, ModelFormatError
from machd.installed import how_to_install

Head: TypeAlias = Callable[[mx.array, mx.array], mx.array]
"""Takes hidden states, [rows, tokens, hidden], and lengths, int32 [rows]; gives logits, [rows, labels]."""

_INNER = "model."
"""Path of a decoder's body in mlx-lm's model."""

_DENSE = "dense."
_NEVER_NEEDED = ("position_ids", "rotary_emb.inv_freq")
"""Ends of the names of constants that old versions of transformers saved."""


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """An encoder with lazy weights.

    Attributes:
        module: The layers, mlx-vlm's or mlx-lm's.
        body: Their forward pass.
        head: That of a classifier; None for a model that embeds.
        dense: Layers behind pooling.
        vocabulary_tokens: Rows of the table of token vectors.
        token_types: Rows of the table of token types; 1 for a model without.
    """

    module: Module
    body: Body
    head: Head | None
    dense: tuple[Dense, ...]
    vocabulary_tokens: int
    token_types: int

    @property
    def modules(self) -> tuple[Module, ...]:
        """The layers, and those behind pooling."""
        return (self.module, *self.dense)


def build_encoder(files: EncoderFiles) -> EncoderModel:
    """Build an encoder's modules with lazy weights, of which none is read.

    Raises:
        ModelArchitectureError: The extra with mlx-vlm is not installed, or the module cannot be imported here.
        ModelFormatError: Weights and configuration do not fit together.
    """
    package = _import(files)
    name = files.checkpoint.path.name
    try:
        module = _built(package, files)
        tensors = dict(_tensors(module, files))
        beside = {key: tensors.pop(key) for key in [*tensors] if key.startswith(_DENSE)}
        fit(module, tensors, files.checkpoint.config)
        module.eval()
        dense = tuple(
            load_dense(one, beside) for one in files.modules.after if isinstance(one, DenseModule)
        )
    except MachdError:
        raise
    except Exception as error:  # of the library's classes, about values that they do not check
        raise ModelFormatError(
            f"{name}: weights and config.json do not fit together: {printable(error)}"
        ) from error
    types = getattr(getattr(module, "embeddings", None), "token_type_embeddings", None)
    return EncoderModel(
        module=module,
        body=make_body(module, files),
        head=_head(module, files) if files.is_classifier else None,
        dense=dense,
        vocabulary_tokens=_token_table(module).weight.shape[0],
        token_types=1 if types is None else types.weight.shape[0],
    )


def _import(files: EncoderFiles) -> ModuleType:
    family = files.family
    if family.needs_mlx_vlm and not is_installed():
        raise ModelArchitectureError(
            f"the layers of {family.model_type} are mlx-vlm's, and the extra vision is not installed: {how_to_install('vision')}"
        )
    try:
        return importlib.import_module(family.module)
    except (Exception, SystemExit) as error:
        raise ModelArchitectureError(
            f"model_type {family.model_type}: {family.module} cannot be imported here: {printable(error)}"
        ) from error


def _built(package: ModuleType, files: EncoderFiles) -> Layer:
    config = module_config(files)
    if files.family.needs_mlx_vlm:
        kind = package.SequenceClassificationModel if files.is_classifier else package.Model
        module = kind(package.ModelConfig.from_dict(config))
        if files.family.layers is Layers.MODERNBERT:
            _use_exact_gelu(module)
        return module
    model = package.Model(package.ModelArgs.from_dict(config))
    model.pop("lm_head", None)
    return model


def _use_exact_gelu(module: Module) -> None:
    """Replace the approximation by tanh that mlx-vlm 0.7.10 computes for ``gelu``: it moves vectors by 1e-4."""
    for _, part in module.named_modules():
        if "act" in part:
            part.act = GELU()


def _tensors(module: Module, files: EncoderFiles) -> Iterator[tuple[str, mx.array]]:
    """Yield a checkpoint's tensors by the names of the module's parameters, without those that nothing needs."""
    family, layers = files.family, {path for path, _ in module.named_modules()}
    inner = _INNER if family.layers in (Layers.DECODER, Layers.GEMMA) else ""
    for file in files.checkpoint.weight_files:
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        for stored, array in loaded.items():
            prefix = next((one for one in family.prefixes if stored.startswith(one)), "")
            name = stored[len(prefix) :]
            if name.startswith(_DENSE):
                yield name, array
                continue
            is_known = (inner + name).rpartition(".")[0] in layers
            if name.endswith(_NEVER_NEEDED) or (not is_known and name.startswith(family.unused)):
                continue
            yield inner + name, array


def _token_table(module: Layer) -> Layer:
    embeddings = getattr(module, "embeddings", None)
    if embeddings is None:
        return module.model.embed_tokens
    return (
        embeddings.word_embeddings if "word_embeddings" in embeddings else embeddings.tok_embeddings
    )


def _head(module: Layer, files: EncoderFiles) -> Head:
    if files.family.layers is Layers.MODERNBERT:
        mode = str(files.checkpoint.config.get("classifier_pooling", "cls"))
        return lambda hidden, lengths: module.classifier(
            module.head(pool(hidden, lengths, [mode]).astype(hidden.dtype))
        )
    if "pooler" in module:
        return lambda hidden, _lengths: module.classifier(module.pooler(hidden))
    return lambda hidden, _lengths: module.classifier(hidden)


def parameters_of(model: EncoderModel) -> Mapping[str, mx.array]:
    """Return all weights by name, those of dense layers too."""
    found: dict[str, mx.array] = {}
    for place, module in enumerate(model.modules):
        prefix = f"{place}." if place else ""
        flat = tree_flatten(module.parameters())
        assert isinstance(flat, list)
        found |= {prefix + name: array for name, array in flat}
    return found
