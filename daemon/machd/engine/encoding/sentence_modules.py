"""``modules.json`` and the folders that it names: what sentence-transformers does with a transformer's token vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from machd.engine.backend.model_files import read_object, shortened
from machd.engine.loading.module_list import LOGIT_SCORE, MODULE_LIST, listed_modules
from machd.errors import ModelFormatError, ModelNotFoundError

_MAX_WIDTH = 1 << 24

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
"""Flags of older files, in the order in which vectors of several are joined."""

_MODES = {mode: mode for mode in _FLAGS.values() if mode != "last"} | {"lasttoken": "last"}
"""Names of newer files."""

ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Classes of ``torch.nn`` behind a dense layer."""


@dataclass(frozen=True, slots=True)
class PoolingModule:
    """How one vector is made of all token vectors of a text.

    Attributes:
        name: Of its file, for messages.
        modes: Ways, whose vectors are joined: ``mean``, ``cls``, ``last``, ``max``, ``weightedmean``, ``mean_sqrt_len_tokens``.
        dimensions: Of a token vector; None where the file does not say.
    """

    name: str
    modes: tuple[str, ...]
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer behind pooling.

    Attributes:
        name: Of its folder, for messages.
        folder: The folder of its weights.
        index: Number among the dense layers, from 0.
        activation: One of :data:`ACTIVATIONS`.
        is_residual: Its input is added to its output.
    """

    name: str
    folder: Path
    index: int
    in_features: int
    out_features: int
    has_bias: bool
    activation: str
    is_residual: bool


@dataclass(frozen=True, slots=True)
class NormalizeModule:
    """Vectors are scaled to length 1."""


AfterPooling: TypeAlias = DenseModule | NormalizeModule


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The modules of one checkpoint, in order; no pooling where the list has none."""

    pooling: PoolingModule | None = None
    after: tuple[AfterPooling, ...] = field(default=())

    @property
    def is_normalised(self) -> bool:
        """True if the last module makes vectors of length 1."""
        return bool(self.after) and isinstance(self.after[-1], NormalizeModule)


def read_modules(directory: Path) -> SentenceModules | None:
    """Read the list of modules and their configurations; None without a list, or for one of a model that generates.

    Raises:
        ModelFormatError: A file is broken, or a module is unknown; it names the module.
        ModelNotFoundError: The folder of a module lacks its configuration.
    """
    modules = listed_modules(directory)
    if modules is None or any(kind == LOGIT_SCORE for kind, _ in modules):
        return None
    if not any(kind == "Pooling" for kind, _ in modules):
        return SentenceModules()  # of a model that is no embedder
    pooling: PoolingModule | None = None
    after: list[AfterPooling] = []
    for index, (kind, path) in enumerate(modules):
        folder = directory / path
        if kind == "Transformer" and not index and not path:
            continue
        if kind == "Dropout":
            continue  # of training
        if kind == "Pooling" and pooling is None:
            pooling = _pooling(folder, path)
        elif kind in ("Dense", "Normalize") and pooling is not None:
            after.append(_after_pooling(kind, folder, path, after))
        else:
            where = f" of {shortened(path)}" if path else ""
            raise ModelFormatError(
                f"{MODULE_LIST} has a {shortened(kind)}{where} at place {index}: machd computes a Transformer whose files lie in the "
                "checkpoint's own folder, Pooling, and then Dense and Normalize"
            )
    return SentenceModules(pooling, tuple(after))


def _after_pooling(
    kind: str, folder: Path, path: str, before: Sequence[AfterPooling]
) -> AfterPooling:
    if kind == "Dense":
        return _dense(folder, path, sum(isinstance(one, DenseModule) for one in before))
    _refuse_names(read_object(folder / "config.json") or {}, f"{path}/config.json")
    return NormalizeModule()


def _pooling(folder: Path, path: str) -> PoolingModule:
    config, name = _config(folder, path)
    if config.get("include_prompt", True) is not True:
        raise ModelFormatError(
            f"{name} says include_prompt = false: machd pools the prompt's tokens too"
        )
    unknown = [
        key
        for key, value in config.items()
        if key.startswith("pooling_mode_") and key not in _FLAGS and value
    ]
    said = config.get("pooling_mode")
    if said is None:
        modes = [mode for key, mode in _FLAGS.items() if config.get(key) is True]
    else:
        listed = said if isinstance(said, list) else [said]
        unknown += [str(one) for one in listed if not isinstance(one, str) or one not in _MODES]
        modes = [_MODES[one] for one in listed if isinstance(one, str) and one in _MODES]
    if unknown:
        raise ModelFormatError(f"{name} says {shortened(unknown[0])}, a pooling that machd has not")
    if not modes:
        raise ModelFormatError(f"{name} names no way of pooling")
    key = "embedding_dimension" if "embedding_dimension" in config else "word_embedding_dimension"
    return PoolingModule(name, tuple(modes), _width(config, key, name) if key in config else None)


def _dense(folder: Path, path: str, index: int) -> DenseModule:
    config, name = _config(folder, path)
    _refuse_names(config, name)
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = str(activation).rpartition(".")[2]
    if kind not in ACTIVATIONS or not str(activation).startswith("torch."):
        raise ModelFormatError(
            f"{name} says activation_function = {shortened(str(activation))}; machd has {', '.join(ACTIVATIONS)}"
        )
    in_features, out_features = (
        _width(config, key, name) for key in ("in_features", "out_features")
    )
    is_residual = config.get("use_residual", False) is True
    if is_residual and in_features != out_features:
        raise ModelFormatError(f"{name} says use_residual between vectors of two widths")
    return DenseModule(
        name=path,
        folder=folder,
        index=index,
        in_features=in_features,
        out_features=out_features,
        has_bias=config.get("bias", True) is True,
        activation=kind,
        is_residual=is_residual,
    )


def _config(folder: Path, path: str) -> tuple[dict[str, object], str]:
    name = f"{path}/config.json"
    config = read_object(folder / "config.json")
    if config is None:
        raise ModelNotFoundError(f"{MODULE_LIST} names {shortened(name)}, which is missing")
    return config, shortened(name)


def _refuse_names(config: Mapping[str, object], name: str) -> None:
    """Refuse a module that reads or writes anything but the vector of the text."""
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ModelFormatError(f"{shortened(name)} says {key} = {shortened(str(config[key]))}")


def _width(config: Mapping[str, object], key: str, name: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_WIDTH:
        raise ModelFormatError(f"{name} says {key} = {shortened(str(value))}, which is no width")
    return value
