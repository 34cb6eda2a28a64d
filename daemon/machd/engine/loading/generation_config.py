"""A checkpoint's ``generation_config.json``: its publisher's sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping

from machd.engine.backend.model_files import read_object
from machd.engine.loading.source import ModelSource, SourceKind
from machd.errors import ModelError
from machd.request.generation import NO_DEFAULT_SAMPLING, DefaultSampling

_NAME = "generation_config.json"

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 2.0),
}
"""Bounds of the request fields of the same names; a request's ``top_p`` 0 means ``top_k`` 1."""


def read_default_sampling(
    source: ModelSource, setting: str
) -> tuple[DefaultSampling, tuple[str, ...]]:
    """Return sampling defaults for requests without their own, and notes about values that were left out.

    A value that requests may not have is left out, not refused: the model can be served without it.
    ``do_sample`` is not read: temperature 0 alone is greedy.

    Args:
        source: The model's files; a GGUF file has no defaults.
        setting: ``model.generation_config``.
    """
    if setting != "auto" or source.kind is SourceKind.GGUF:
        return NO_DEFAULT_SAMPLING, ()
    try:
        written = read_object(source.path / _NAME) or {}
    except ModelError as error:
        return NO_DEFAULT_SAMPLING, (f"{error.message}; requests have machd's own defaults",)
    found: dict[str, float] = {}
    notes: list[str] = []
    for name, (least, most) in _BOUNDS.items():
        value = written.get(name)
        if value is None:
            continue
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not least <= value <= most
        ):
            notes.append(f"{_NAME}: {name} is no number from {least:g} to {most:g}; it is left out")
        elif name == "top_k" and value != int(value):
            notes.append(f"{_NAME}: {name} is no whole number; it is left out")
        else:
            found[name] = value
    top_k = found.pop("top_k", None)
    sampling = DefaultSampling(**found, top_k=None if top_k is None else max(0, int(top_k)))
    return sampling, tuple(notes)
