"""Encoders loaded from checkpoints, and their passes as numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.encoding.encoder_files import EncoderFiles, find_encoder
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.encoder import Encoder, EncoderInput
from machd.engine.protocol.progress import SilentProgress

if TYPE_CHECKING:
    from machd.engine.loading.loader import MemoryShare

Vectors = NDArray[np.float64]


def encoder_source(directory: Path) -> ModelSource:
    """A directory as the model of a setting."""
    return ModelSource(SourceKind.DIRECTORY, directory, directory.name)


def encoder_files(directory: Path) -> EncoderFiles:
    """Read a checkpoint that is an encoder's."""
    files = find_encoder(encoder_source(directory))
    assert files is not None, "an encoder"
    return files


def loaded_encoder(
    directory: Path, *, dtype: str = "auto", share: MemoryShare | None = None
) -> Encoder:
    """Load an encoder on this thread."""
    import_mlx_lm()
    from machd.engine.encoding.loading import load_encoder  # noqa: PLC0415 - imports mlx

    return load_encoder(
        encoder_files(directory),
        model_id="encoder",
        dtype=dtype,
        blas=None,
        blas_refused=(),
        progress=SilentProgress(),
        share=share,
    )


def vectors(encoder: Encoder, inputs: Sequence[EncoderInput]) -> Vectors:
    """Compute one pass: [inputs, dimensions]."""
    made = encoder.encode(inputs)
    assert made.dtype == "float32"
    return np.frombuffer(made.content, np.float32).reshape(made.shape).astype(np.float64)


def least_cosine(one: Vectors, other: Vectors) -> float:
    """The smallest cosine of rows of the same place."""
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(axis=1) / lengths).min())
