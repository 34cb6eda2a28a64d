"""Model code is read from a model in memory: classes, switches, repairs and files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize

from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.capabilities.model_code import ModelCode, shared_layers
from machd.engine.kernels import batchable
from machd.engine.loading.model_code import read_model_code
from machd_probes.prober import tiny_loaded

FACTS = CacheFacts((LayerCacheFacts("KVCache", owner="Attention"),), 1, 0)


class _Layer(Module):
    """A layer with a switch."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sparse = is_sparse
        self.inner = Linear(64, 64)


def test_layers_are_named_with_their_switches() -> None:
    """A switch that is on is other code than one that is off."""
    sparse, dense = (read_model_code(_Layer(is_sparse=one), FACTS) for one in (True, False))
    assert sparse.layers == {f"{__name__}._Layer is_sparse", "mlx.nn.layers.Linear"}
    assert dense.layers == {f"{__name__}._Layer", "mlx.nn.layers.Linear"}
    assert not dense.covers(sparse)


def test_packed_layers_are_the_plain_ones() -> None:
    """A quantised checkpoint runs the code of its architecture."""
    layer = _Layer(is_sparse=False)
    before = read_model_code(layer, FACTS)
    quantize(layer, group_size=32, bits=4)
    assert read_model_code(layer, FACTS) == before


def test_repaired_layers_change_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose layers were not repaired is not covered by one whose were."""
    repaired = tiny_loaded("gpt_bigcode").description.code
    monkeypatch.setattr(batchable, "_MENDED", {})
    bare = tiny_loaded("gpt_bigcode").description.code
    assert repaired is not None
    assert bare is not None
    assert "machd.engine.kernels.batchable.BatchableGPTBigCodeModel" in repaired.layers
    assert not repaired.covers(bare)


def test_edited_file_changes_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest covers the architecture's file and those it imports from, and no others."""
    names = ("mine", "imported", "unrelated")
    files = {name: tmp_path / f"{name}.py" for name in names}
    modules = {name: ModuleType(f"mlx_lm.models.{name}") for name in names}
    for name, module in modules.items():
        files[name].write_text("1")
        module.__file__ = str(files[name])
        monkeypatch.setitem(sys.modules, module.__name__, module)
    modules["mine"].layers = modules["imported"]  # type: ignore[attr-defined]
    monkeypatch.setattr(_Layer, "__module__", "mlx_lm.models.mine")

    def digest() -> str:
        return read_model_code(_Layer(is_sparse=False), FACTS).digest

    digests = [digest()]
    for name in names:
        files[name].write_text("2")
        digests.append(digest())
    assert len(set(digests[:3])) == 3
    assert digests[3] == digests[2]


def test_code_of_a_checkpoint_is_part_of_it(tmp_path: Path) -> None:
    """Whatever the classes are called: it may have changed mlx-lm's own."""
    plain = read_model_code(_Layer(is_sparse=False), FACTS)
    own = tmp_path / "model.py"
    own.write_text("from mlx_lm.models.llama import Model, ModelArgs")
    first = read_model_code(_Layer(is_sparse=False), FACTS, [own])
    own.write_text("import mlx_lm.models.llama as llama; llama.Attention = None")
    second = read_model_code(_Layer(is_sparse=False), FACTS, [own])
    assert len({plain.digest, first.digest, second.digest}) == 3


def test_caches_are_told_apart_by_all_but_their_sizes() -> None:
    """Windows of any width are one kind; sinks and what is inside lists make another."""

    def caches(layer: LayerCacheFacts) -> frozenset[str]:
        return read_model_code(_Layer(is_sparse=False), CacheFacts((layer,), 1, 0)).caches

    window = LayerCacheFacts("RotatingKVCache", window_tokens=8)
    wide = LayerCacheFacts("RotatingKVCache", window_tokens=4096)
    sinks = LayerCacheFacts("RotatingKVCache", window_tokens=8, keep=4)
    nested = LayerCacheFacts("CacheList", nested=(window,))
    assert caches(window) == caches(wide)
    assert len({caches(window), caches(sinks), caches(nested)}) == 3


def test_shared_classes_belong_to_no_architecture() -> None:
    """Layers of a module that defines a model, and repaired layers, are not shared."""
    code = ModelCode(
        "mlx_lm.models.llama",
        frozenset(
            {
                "mlx_lm.models.llama.MLP",
                "mlx_lm.models.rope_utils.YarnRoPE traditional",
                "machd.engine.kernels.batchable.BatchableModel",
                "mlx.nn.layers.linear.Linear",
            }
        ),
        frozenset(),
        "digest",
    )
    assert shared_layers([code]) == {
        "mlx_lm.models.rope_utils.YarnRoPE traditional",
        "mlx.nn.layers.linear.Linear",
    }
