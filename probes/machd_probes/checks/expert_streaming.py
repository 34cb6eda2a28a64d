"""A model gives the same tokens with its experts on disk as in memory.

A copy of the model is served from a file, with a bank for half of its experts and then with one for an eighth, which
is too small for one step's experts. Rows that join, leave and prefill in chunks are compared with the same rows of the model
in memory.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from machd.capabilities.evidence import Evidence
from machd.engine.assembly import make_engine
from machd.engine.backend.device import backend_name
from machd.engine.backend.safetensors_header import read_safetensors_header
from machd.engine.experts.bank import ExpertBank
from machd.engine.experts.banked_model import BankedModel, open_bank
from machd.engine.experts.tensor_origins import TensorOrigins, switch_layers
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.loader import LoadedModel
from machd.engine.protocol.progress import SilentProgress
from machd.engine.protocol.step import Lane
from machd_probes.comparison import compared
from machd_probes.finding import Finding, unsupported
from machd_probes.scripts import Script, scripts
from machd_probes.subject import Subject

_SHARES = (1 / 2, 1 / 8)
"""Shares of the experts that fit the bank."""

_MAX_ROWS = 16


def probe(subject: Subject, harm: Callable[[ExpertBank], None] = lambda _: None) -> Finding:
    """Compare banked copies of a model with the model in memory.

    Args:
        subject: A tiny model.
        harm: Plants a fault in each bank, to see that the probe fails.
    """
    if not switch_layers(subject.module):
        return unsupported("no layer has experts")
    with tempfile.TemporaryDirectory(prefix="machd-experts-") as directory:
        parts = [_served(subject, Path(directory), share, harm) for share in _SHARES]
    return subject.judged(parts, "with experts on disk the tokens differ")


def _served(
    subject: Subject, directory: Path, share: float, harm: Callable[[ExpertBank], None]
) -> Evidence:
    """Play rows on a banked copy and on the model in memory, and compare them."""
    model = copy.deepcopy(subject.module)
    banked = banked_from_file(model, directory / "model.safetensors", share)
    harm(banked.bank)
    loaded = LoadedModel(model, FakeTokenizer(), subject.description, experts=banked)
    engine = make_engine(loaded, max_rows=_MAX_ROWS)
    served = Subject(engine, subject.extent, watch=subject.watch)
    every = scripts(subject.prompts, subject.extent.tokens)
    lane = Lane.BATCH if subject.description.cache.mergeable else Lane.SERIAL
    script = Script(
        tuple(
            replace(subject.forced(row), lane=lane)
            for name in ("early leaves", "chunked prefill")
            for row in every[name].joins
        )
    )
    try:
        pairs = zip(script.play(subject.engine), script.play(served.engine), strict=True)
        return Evidence.together(
            compared(right, heard, subject.noise_floor) for right, heard in pairs
        )
    finally:
        engine.close()


def banked_from_file(model: Module, path: Path, share: float) -> BankedModel:
    """Write a model's weights to a file, and bank its experts from there.

    Args:
        model: In memory; changed in place.
        path: The file to write.
        share: Share of the experts that fit the bank; at least one of each shape does.
    """
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    weights = dict(flat)
    mx.save_safetensors(str(path), weights)
    tensors = read_safetensors_header(path).tensors
    origins = TensorOrigins({name: (path, tensor) for name, tensor in tensors.items()})
    with origins.recording(weights):
        layers = origins.stored_layers(model, None, backend=backend_name())
    experts_by_shape = Counter[object]()
    for one in layers:
        experts_by_shape[one.parameters] += one.experts
    total_bytes = sum(one.experts * one.entry_bytes for one in layers)
    capacity_bytes = int(total_bytes * max(share, 1 / min(experts_by_shape.values()))) + 1
    return open_bank(model, layers, capacity_bytes=capacity_bytes, progress=SilentProgress())
