"""The catalogue of encoders: tiny models, and checks in the order in which they run. Imports neither mlx nor numpy."""

from __future__ import annotations

from machd_probes.encoder_matrix.tiny_encoders import TINY_ENCODERS

BATCH_CHECK = "batch_parity"
POOLING_CHECK = "pooling"
KERNELS_CHECK = "kernels"

CHECK_NAMES = (BATCH_CHECK, POOLING_CHECK, KERNELS_CHECK)
"""Every check: a function of ``machd_probes.encoder_matrix.checks``."""


def family_of(encoder: str) -> str:
    """Return the ``model_type`` of a tiny encoder."""
    return str(TINY_ENCODERS[encoder].config["model_type"])


def encoder_families() -> list[str]:
    """Every family that has a tiny encoder, sorted."""
    return sorted({family_of(name) for name in TINY_ENCODERS})


def encoders_of(family: str) -> list[str]:
    """Names of a family's tiny encoders; none for an unknown family."""
    return [name for name in TINY_ENCODERS if family_of(name) == family]
