"""The fingerprint of what answers: with the same one, the same seed gives the same text."""

from __future__ import annotations

import hashlib

from machd.capabilities.versions import Versions
from machd.engine.protocol.engine import ModelDescription

_HASH_BYTES = 8


def system_fingerprint(model: ModelDescription, versions: Versions) -> str:
    """``fp_`` and a hash of the model, its weights' form, the versions and the backend."""
    parts = (
        model.model_id,
        model.dtype,
        model.quantization,
        versions.machd,
        versions.mlx,
        versions.mlx_lm,
        model.backend,
        model.blas,
    )
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=_HASH_BYTES)
    return f"fp_{digest.hexdigest()}"
