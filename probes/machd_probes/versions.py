"""The basis of a measurement: versions, backend, dtype and machd's own code."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, replace
from functools import cache

import msgspec

import machd
from machd.capabilities.versions import Versions
from machd.installed import installed_version
from machd_probes.sources import (
    KeptSources,
    encoder_sources_digest,
    known_sources_digest,
    vision_sources_digest,
)

PROBE_DTYPE = "float32"
"""Of the tiny models: what every backend computes, with the least noise."""

_ABSENT = "not installed"
_VERSION = re.compile(r" \d[\w.]*(?=,|$)")

# A program goes on with the sources that it was started with, and reads them once.
_program_digest = cache(lambda: known_sources_digest(KeptSources.kept()))
_program_vision_digest = cache(vision_sources_digest)
_program_encoder_digest = cache(encoder_sources_digest)


@dataclass(frozen=True, slots=True)
class ProbeBasis:
    """The conditions that a result holds for.

    Attributes:
        backend: ``cpu``, ``metal`` or ``cuda``.
        blas: The library that multiplies matrices on the CPU; None elsewhere.
        dtype: Of the weights.
        sources: Digest of the probes and of what the engine computes with.
    """

    machd: str
    mlx: str
    mlx_lm: str
    backend: str
    blas: str | None
    dtype: str
    sources: str

    @property
    def key(self) -> str:
        """A short name of all of it, fit for a file."""
        return hashlib.sha256(msgspec.json.encode(asdict(self))).hexdigest()[:16]

    @property
    def versions(self) -> Versions:
        """The part that users are shown."""
        return Versions(
            machd=self.machd,
            mlx=self.mlx,
            mlx_lm=self.mlx_lm,
            backend=self.backend,
            dtype=self.dtype,
        )

    def computes_like(self, other: ProbeBasis) -> bool:
        """Return whether results of another basis hold under this one.

        The version of machd may differ, because the digest says which code computes, and so may the
        BLAS: it rounds a row of a batch in its own way, and :meth:`has_blas_of` tells.
        """
        computing = (self.mlx, self.mlx_lm, self.backend, self.dtype, self.sources)
        return computing == (other.mlx, other.mlx_lm, other.backend, other.dtype, other.sources)

    def has_blas_of(self, other: ProbeBasis) -> bool:
        """Return whether both were measured with one BLAS, of any version."""
        return _is_same_library(self.blas, other.blas)


def _is_same_library(blas: str | None, other: str | None) -> bool:
    """Compare names without versions, also of two libraries in one name; a basis that names no library contradicts none."""
    if blas is None or other is None:
        return True
    return _VERSION.sub("", blas) == _VERSION.sub("", other)


def probe_basis(*, backend: str, blas: str | None, dtype: str = PROBE_DTYPE) -> ProbeBasis:
    """The basis of a measurement made now. Imports neither mlx nor mlx-lm; the first one reads 1 MB of sources.

    Args:
        backend: What mlx computes on, which only a process that imported it can tell.
        blas: As ``machd.engine.backend.blas.measure_blas`` names it.
        dtype: Of the weights that are measured.
    """
    return ProbeBasis(
        machd=machd.__version__,
        mlx=installed_version("mlx") or _ABSENT,
        mlx_lm=installed_version("mlx-lm") or _ABSENT,
        backend=backend,
        blas=blas,
        dtype=dtype,
        sources=_program_digest(),
    )


def vision_basis(*, backend: str, blas: str | None) -> ProbeBasis:
    """The basis of a measurement of vision-language families made now; mlx-vlm's version is in its digest."""
    basis = probe_basis(backend=backend, blas=blas)
    return replace(basis, sources=_program_vision_digest())


def encoder_basis(*, backend: str, blas: str | None) -> ProbeBasis:
    """The basis of a measurement of encoders made now; mlx-vlm's version is in its digest."""
    basis = probe_basis(backend=backend, blas=blas)
    return replace(basis, sources=_program_encoder_digest())
