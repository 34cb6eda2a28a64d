"""Generated models load, and their routing is skewed and local as asked."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.experts.tensor_origins import switch_layers
from machd.user_directories import user_cache_directory
from machd_bench.generated_checkpoint import (
    DenseShape,
    MoeShape,
    Shape,
    sized,
    stored_bytes,
    write_generated_checkpoint,
)

_TOKENS = 256


def _written(directory: Path, shape: Shape) -> Path:
    return write_generated_checkpoint(directory, shape, user_cache_directory(os.environ))


def _choices(
    directory: Path, shape: MoeShape
) -> list[np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
    """Return each layer's chosen experts, [tokens, chosen], for random tokens."""
    import_mlx_lm()
    from mlx_lm.utils import load_model  # noqa: PLC0415 - after import_mlx_lm()

    model, _ = load_model(_written(directory, shape))
    model.set_dtype(mx.float32)
    chosen: list[mx.array] = []
    for _, switch in switch_layers(model):
        kind = type(switch)

        class Recording(kind):  # type: ignore[misc, valid-type]
            """Records what the router chose."""

            def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
                chosen.append(indices[0])
                output: mx.array = super().__call__(x, indices)
                return output

        switch.__class__ = Recording
    token_ids = np.random.default_rng(1).integers(10, 49_000, (1, _TOKENS))
    mx.eval(model(mx.array(token_ids)), chosen)
    return [np.array(one) for one in chosen]


def _overlap(chosen: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> float:
    """Return the share of a token's experts that the next token has as well."""
    shared = [len(np.intersect1d(a, b)) for a, b in pairwise(chosen)]
    return float(np.mean(shared)) / chosen.shape[1]


def test_popularity_follows_the_exponent(tmp_path: Path) -> None:
    """With exponent 1 half of the experts have over four fifths of the uses; with 0 about as many as the others."""
    shares = {}
    for zipf in (0.0, 1.0):
        shape = MoeShape(hidden=128, inner=32, layers=1, experts=32, zipf=zipf)
        counts = np.bincount(_choices(tmp_path / f"{zipf}", shape)[0].ravel(), minlength=32)
        shares[zipf] = np.sort(counts)[16:].sum() / counts.sum()
    assert shares[1.0] > 0.8
    assert shares[0.0] < 0.75


@pytest.mark.long
def test_successive_tokens_share_experts_with_locality(tmp_path: Path) -> None:
    """Tokens share more experts with the token before when the tokens before count more."""
    overlaps = [
        _overlap(
            _choices(
                tmp_path / f"{locality}",
                MoeShape(hidden=256, inner=64, layers=2, experts=32, zipf=0.0, locality=locality),
            )[1]
        )
        for locality in (0.0, 0.9)
    ]
    assert overlaps[1] > 1.5 * overlaps[0]


@pytest.mark.parametrize(
    "large", [sized(DenseShape(), 3.0), sized(MoeShape(), 3.0)], ids=["dense", "moe"]
)
def test_size_is_about_what_is_asked_for(large: Shape) -> None:
    """A shape of so many GB takes them within the size of one layer, token embeddings apart."""
    embeddings_bytes = stored_bytes(large) - large.layers * large.layer_bytes
    assert abs(stored_bytes(large) - embeddings_bytes - 3e9) <= large.layer_bytes


def test_dense_model_is_written_with_the_size_it_names(tmp_path: Path) -> None:
    """The files of a dense model take about the bytes that ``stored_bytes`` returns."""
    shape = DenseShape(hidden=256, inner=256, layers=2)
    directory = _written(tmp_path / "dense", shape)
    written = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert written == pytest.approx(stored_bytes(shape), rel=0.02)
