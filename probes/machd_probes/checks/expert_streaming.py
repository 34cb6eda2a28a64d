"""With its experts on disk, a model gives the tokens that it gives from memory.

The model is copied, its weights go into a file, and a bank with room for half of the experts, then for one in
eight, serves rows alone and in a batch. The smaller bank cannot hold what one step needs, so it computes
in parts. The same rows of the model in memory say what is right.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from machd.capabilities.evidence import Evidence
from machd.engine.assembly import make_engine
from machd.engine.backend.device import backend_name
from machd.engine.backend.progress import SilentProgress
from machd.engine.backend.safetensors_header import read_safetensors_header
from machd.engine.experts.bank import ExpertBank
from machd.engine.experts.origins import Origins, switch_layers
from machd.engine.experts.residency import BankedModel, open_bank, stored_layers
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.loader import LoadedModel
from machd.engine.protocol.step import Lane
from machd_probes.comparison import compared
from machd_probes.finding import Finding, unsupported
from machd_probes.scripts import Script, scripts
from machd_probes.subject import Subject

_SHARES = (1 / 2, 1 / 8)
"""Of the experts that find room."""

_MAX_ROWS = 16


def probe(subject: Subject, harm: Callable[[ExpertBank], None] = lambda _: None) -> Finding:
    """Serve a copy whose experts lie in a file.

    Args:
        subject: A tiny model.
        harm: Breaks each bank before it is used, to see that the check notices.
    """
    if not switch_layers(subject.module):
        return unsupported("no layer has experts")
    with tempfile.TemporaryDirectory(prefix="machd-experts-") as directory:
        parts = [_served(subject, Path(directory), share, harm) for share in _SHARES]
    return subject.judged(parts, "with experts on disk the answers are others")


def _served(
    subject: Subject, directory: Path, share: float, harm: Callable[[ExpertBank], None]
) -> Evidence:
    """Play rows on a banked copy and on the model, and compare."""
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
    """Write a model's weights, and let its experts lie there.

    Args:
        model: In memory; changed in place.
        path: A file to write.
        share: Of the experts that find room; there is room for one at least.
    """
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    weights = dict(flat)
    mx.save_safetensors(str(path), weights)
    tensors = read_safetensors_header(path).tensors
    origins = Origins({name: (path, tensor) for name, tensor in tensors.items()})
    with origins.noting(weights):
        layers = stored_layers(model, origins, None, backend=backend_name())
    # Layers of each form get their share, and need room for one expert.
    experts = [
        sum(one.experts for one in layers if one.forms == forms)
        for forms in {one.forms for one in layers}
    ]
    total_bytes = sum(one.experts * one.entry_bytes for one in layers)
    capacity_bytes = int(total_bytes * max(share, 1 / min(experts))) + 1
    return open_bank(model, layers, capacity_bytes=capacity_bytes, progress=SilentProgress())
