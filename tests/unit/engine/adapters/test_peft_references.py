"""Adapters of PEFT's own configurations against what PEFT computes of them, and faults that the comparison has to notice.

``peft_references.json`` has configurations as PEFT 0.21.2 wrote them, and for each layer of a tiny llama with the weights of
``base_weights()`` and the adapter of ``random_adapter(seed=7)`` what ``PeftModel.from_pretrained`` makes of it in float32: the rank,
and of ``get_delta_weight`` and of the weight after ``merge_and_unload`` the elements [0, 0], [-1, -1] and [5, 3] and the
sum of all magnitudes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints.adapters import (
    BASE,
    Floats,
    base_weights,
    peft_tensors,
    random_adapter,
    write_peft,
)

from machd.engine.adapters.adapter_files import adapter_digest, read_adapter
from machd.engine.adapters.low_rank import AdapterWeights, LowRank

_REFERENCES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "peft_references.json").read_text(encoding="utf-8")
)


def _read(directory: Path, name: str) -> AdapterWeights:
    """Write an adapter of a configuration, and read it."""
    reference = _REFERENCES[name]
    layers = reference["layers"]
    adapter = random_adapter(
        {path: layer for path, layer in BASE.items() if path in layers},
        seed=7,
        rank={path: one["rank"] for path, one in layers.items()},
        dora=reference["config"]["use_dora"],
    )
    path = write_peft(directory / name, peft_tensors(adapter), reference["config"])
    return read_adapter(path, adapter_digest(path), BASE)


def _numbers(weights: Floats) -> list[float]:
    return [weights[0, 0], weights[-1, -1], weights[5, 3], np.abs(weights).sum(dtype=np.float64)]


def _is_peft(name: str, read: AdapterWeights) -> bool:
    base, layers = base_weights(), _REFERENCES[name]["layers"]
    assert read.keys() == layers.keys()
    for path, one in read.items():
        delta = one.scale * (one.b @ one.a)
        merged = base[path] + delta
        if one.magnitude is not None:
            merged *= (one.magnitude / np.linalg.norm(merged, axis=1))[:, None]
        for found, kind in ((delta, "delta"), (merged, "merged")):
            if not np.allclose(_numbers(found), layers[path][kind], rtol=1e-6, atol=2e-6):
                return False
    return True


@pytest.mark.parametrize("name", _REFERENCES)
def test_adapter_is_what_peft_makes_of_it(tmp_path: Path, name: str) -> None:
    """What an adapter adds, and the weights with it, are those that PEFT computes."""
    assert _is_peft(name, _read(tmp_path, name))


_FAULTS: dict[str, tuple[str, Callable[[LowRank], LowRank]]] = {
    "scale": ("plain", lambda one: replace(one, scale=1.0)),
    "root": ("rslora", lambda one: replace(one, scale=one.scale / one.a.shape[0] ** 0.5)),
    "magnitude": ("dora", lambda one: replace(one, magnitude=None)),
    "pattern": ("patterns", lambda one: replace(one, scale=8 / one.a.shape[0])),
    "order": ("some", lambda one: replace(one, a=one.a[::-1])),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_faults_are_noticed(tmp_path: Path, fault: str) -> None:
    """The comparison notices a scale, a root, a magnitude, a pattern or an order that is forgotten."""
    name, change = _FAULTS[fault]
    read = {path: change(one) for path, one in _read(tmp_path, name).items()}
    assert not _is_peft(name, read)
