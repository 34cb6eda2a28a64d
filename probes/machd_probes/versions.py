"""What a measurement depends on beside the model: versions, what computes, and the probes' code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

import machd
from machd.api.capabilities import Versions
from machd.installed import installed_version

__all__ = ["PROBE_DTYPE", "ProbeBasis", "probe_basis", "sources_digest"]

PROBE_DTYPE = "float32"
"""Of the tiny models: what every backend computes, with the least noise."""

_PROBES = Path(__file__).resolve().parent
_PROGRAM = Path(machd.__file__).resolve().parent
_SOURCES = (
    _PROBES,
    _PROGRAM / "engine",
    *(_PROGRAM / "capabilities" / name for name in ("evidence.py", "facts.py", "matrix.py")),
)
"""Code that has a part in what is measured; rules are not among it, for verdicts are not kept."""

_ABSENT = "not installed"
_SUFFIXES = frozenset({".py", ".toml"})


@dataclass(frozen=True, slots=True)
class ProbeBasis:
    """What a result holds for; where any of it differs, the result says nothing.

    Attributes:
        backend: ``cpu``, ``metal`` or ``cuda``.
        blas: The library that multiplies matrices on the CPU; None elsewhere.
        dtype: Of the weights.
        sources: Digest of the probes and of the engine.
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


def probe_basis(*, backend: str, blas: str | None, dtype: str = PROBE_DTYPE) -> ProbeBasis:
    """The basis of a measurement made now. Imports neither mlx nor mlx-lm; takes about 20 ms.

    Args:
        backend: What mlx computes on, which only a process that imported it can tell.
        blas: As ``machd.engine.blas.measure_blas`` names it.
        dtype: Of the weights that are measured.
    """
    return ProbeBasis(
        machd=machd.__version__,
        mlx=installed_version("mlx") or _ABSENT,
        mlx_lm=installed_version("mlx-lm") or _ABSENT,
        backend=backend,
        blas=blas,
        dtype=dtype,
        sources=sources_digest(),
    )


def sources_digest(roots: tuple[Path, ...] = _SOURCES) -> str:
    """Hash of the names and contents of code and configurations, in folders and single files."""
    digest = hashlib.sha256()
    for root in roots:
        for path in [root] if root.is_file() else sorted(_files(root)):
            name = path.relative_to(root.parent).as_posix().encode()
            content = path.read_bytes()
            # With lengths, so that text cannot wander from one file to the next unseen.
            digest.update(b"%d %d " % (len(name), len(content)) + name + content)
    return digest.hexdigest()[:16]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in _SUFFIXES)
