"""The dtype of experts, which mlx multiplies in float32 only on the CPU, and machd's kernels as they are stored."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest
from support.engines.native import without_kernels

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.experts.residency import Residency
from machd.engine.loading.inspection import inspect_model
from machd.engine.loading.loader import LoadedModel, load_model
from machd.engine.loading.source import ModelSource, SourceKind
from machd.errors import ModelMemoryError, SettingsError
from machd.user_directories import user_cache_directory
from machd_bench.generated_checkpoint import MoeShape, write_generated_checkpoint

_SHAPE = MoeShape(hidden=128, inner=128, layers=1, experts=8, chosen=2)


@pytest.fixture(name="source", scope="module")
def _source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """A generated mixture-of-experts model in bfloat16."""
    path = tmp_path_factory.mktemp("dtype") / "moe"
    write_generated_checkpoint(path, _SHAPE, user_cache_directory(os.environ))
    return ModelSource(SourceKind.DIRECTORY, path, "moe")


def _stored_bytes(source: ModelSource) -> int:
    return sum(one.stat().st_size for one in Path(source.path).glob("*.safetensors"))


def _memory(monkeypatch: pytest.MonkeyPatch, available_bytes: int) -> None:
    monkeypatch.setattr(
        "machd.engine.loading.placing.whole.available_memory_bytes", lambda: available_bytes
    )


def _is_finite(loaded: LoadedModel) -> bool:
    return bool(mx.isfinite(loaded.model(mx.array([[5, 80, 200]]))).all().item())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_that_experts_cannot_compute_in_is_refused(source: ModelSource, dtype: str) -> None:
    """``serve`` and ``check`` name the setting before a weight is read."""
    with pytest.raises(SettingsError, match=rf"^model\.dtype: .*float32 only.*{dtype}"):
        load_model(source, dtype=dtype)
    with pytest.raises(SettingsError, match=rf"^model\.dtype: .*float32 only.*{dtype}"):
        inspect_model(source, dtype=dtype)


def test_auto_is_float32_even_where_other_models_stay_as_stored(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for float32 and little more is enough."""
    without_kernels(monkeypatch)
    _memory(monkeypatch, int(2.2 * _stored_bytes(source)))
    loaded = load_model(source)
    assert loaded.description.dtype == "float32"
    assert _is_finite(loaded)


@pytest.mark.skipif(native_kernels() is None, reason="make setup has found no compiler")
def test_experts_that_machd_computes_stay_16_bit_and_compute_in_float32(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for what is stored and little more is enough, and less is refused."""
    stored_bytes = _stored_bytes(source)
    _memory(monkeypatch, int(1.1 * stored_bytes))
    loaded = load_model(source)
    assert loaded.description.dtype == "float32"
    assert loaded.description.weights_bytes <= 1.05 * stored_bytes
    assert _is_finite(loaded)
    found = inspect_model(source).description
    assert (found.dtype, found.weights_bytes) == ("float32", loaded.description.weights_bytes)
    _memory(monkeypatch, int(0.9 * stored_bytes))
    with pytest.raises(ModelMemoryError):
        load_model(source)


def test_a_model_whose_experts_do_not_fit_in_float32_is_refused(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not loaded as stored, because nothing could be computed with them."""
    without_kernels(monkeypatch)
    _memory(monkeypatch, int(1.5 * _stored_bytes(source)))
    with pytest.raises(ModelMemoryError, match="the weights in float32"):
        load_model(source)


def test_quantised_experts_compute_in_16_bits(source: ModelSource) -> None:
    """Only plain experts need float32."""
    loaded = load_model(source, dtype="bfloat16", quantize="affine8")
    assert _is_finite(loaded)


def test_experts_on_disk_are_float32_beside_16_bit_weights(source: ModelSource) -> None:
    """``model.dtype`` is that of all other weights; a bank converts experts as it reads them."""
    loaded = load_model(source, dtype="bfloat16", residency=Residency(10**9, 0))
    assert loaded.experts is not None
    weight = loaded.experts.bank.array(0, "up_proj", "weight")
    assert weight is not None
    assert weight.dtype == mx.float32
    assert _is_finite(loaded)
    loaded.experts.close()


def test_a_bank_leaves_memory_to_steps(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bank that fits beside the weights and leaves nothing is refused: a step would end the process."""
    needed_bytes = 2 * _stored_bytes(source)
    least_bytes = Residency(10**9, 0).spare_bytes
    for spare_bytes, fits in ((least_bytes // 2, False), (2 * least_bytes, True)):
        monkeypatch.setattr(
            "machd.engine.loading.placing.banked.available_memory_bytes",
            lambda spare_bytes=spare_bytes: needed_bytes + spare_bytes,
        )
        if not fits:
            with pytest.raises(ModelMemoryError, match=r"experts\.resident_gb and what steps take"):
                load_model(source, residency=Residency(10**9, 0))
            continue
        loaded = load_model(source, residency=Residency(10**9, 0))
        assert loaded.experts is not None
        loaded.experts.close()
