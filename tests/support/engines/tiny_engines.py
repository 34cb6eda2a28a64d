"""The tiny models, loaded once for the whole run, and what their rows say alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from machd.engine.assembly import make_engine
from machd.engine.kv.formats import kv_format_named
from machd.engine.loading.loader import LoadedModel
from support.engines.adapters import TinyBase
from support.engines.parity import Alone
from support.engines.tiny_models import TinyKind, tiny_model, tiny_tokenizer


def loaded(kind: TinyKind, kv_format: str = "none") -> LoadedModel:
    """The model of a kind on the test thread, its keys and values in a format."""
    return replace(_built(kind), kv_format=kv_format_named(kv_format))


def alone(kind: TinyKind, kv_format: str = "none") -> Alone:
    """Its rows alone, each computed once by a fresh engine."""
    return _references(kind, kv_format)


@cache
def native_llama() -> LoadedModel:
    """A model that machd's own kernels compute where they are installed, so that company changes no bit."""
    model, tokenizer = TinyBase("llama").loaded(), tiny_tokenizer()
    description = replace(model.description, eos_token_ids=tokenizer.eos_token_ids)
    return replace(model, tokenizer=tokenizer, description=description)


@cache
def _built(kind: TinyKind) -> LoadedModel:
    return tiny_model(kind)


@cache
def _references(kind: TinyKind, kv_format: str) -> Alone:
    return Alone(lambda: make_engine(loaded(kind, kv_format)))
