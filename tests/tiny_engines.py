"""The tiny models, loaded once for the whole run, and what their rows say alone."""

from __future__ import annotations

from functools import cache

from parity import Alone
from tiny_models import TinyKind, tiny_model

from machd.engine.loader import LoadedModel
from machd.engine.mlx_engine import MlxEngine

__all__ = ["alone", "loaded"]


@cache
def loaded(kind: TinyKind) -> LoadedModel:
    """The model of a kind, on the test thread."""
    return tiny_model(kind)


@cache
def alone(kind: TinyKind) -> Alone:
    """Its rows alone, each computed by a fresh engine."""
    return Alone(lambda: MlxEngine(loaded(kind)))
