"""Tiny models with experts, in memory and in a bank."""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.assembly import make_engine
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.experts.banked_model import BankedModel
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.loader import LoadedModel
from machd.engine.step.mlx_engine import MlxEngine
from machd_probes.checks.expert_streaming import banked_from_file
from machd_probes.prober import tiny_loaded

MOE = "qwen3_moe"


def moe_model() -> LoadedModel:
    """Build a tiny model with two layers of four experts each, in memory."""
    mx.disable_compile()
    import_mlx_lm()
    return tiny_loaded(MOE)


def banked_copy(loaded: LoadedModel, directory: Path, share: float) -> tuple[Module, BankedModel]:
    """Copy a model, its experts banked from ``model.safetensors`` in a directory."""
    model = copy.deepcopy(loaded.model)
    banked = banked_from_file(model, directory / "model.safetensors", share)
    return model, banked


def banked_engine(
    loaded: LoadedModel, directory: Path, share: float
) -> tuple[MlxEngine, BankedModel]:
    """Open an engine on a banked copy of a model."""
    model, banked = banked_copy(loaded, directory, share)
    with_bank = LoadedModel(model, FakeTokenizer(), loaded.description, experts=banked)
    return make_engine(with_bank), banked
