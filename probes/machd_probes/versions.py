"""The basis of a measurement: versions, backend, dtype and machd's own code."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import msgspec

import machd
from machd.capabilities.versions import Versions
from machd.installed import installed_version

PROBE_DTYPE = "float32"
"""Of the tiny models: what every backend computes, with the least noise."""

_PROBES = Path(__file__).resolve().parent
_PROGRAM = Path(machd.__file__).resolve().parent
_SOURCES = (_PROBES, _PROGRAM / "engine")

_IMAGES = (
    *("machd_probes/vision_families/", "machd_probes/vision_matrix/"),
    *("engine/vision/", "engine/loading/vision"),
)
"""Beginnings of the paths of what no architecture of mlx-lm's is measured with."""

_ENCODERS = (
    "machd_probes/encoder_matrix/",
    *("engine/encoding/", "engine/kernels/native_bert", "engine/protocol/encoder"),
)
"""Beginnings of the paths of what encoders are measured with, and no architecture that generates."""

_WITH_ENCODERS = (
    *("machd_probes/finding", "engine/kernels/native_attention", "engine/loading/placing/whole"),
    *("engine/loading/placing/precision", "engine/loading/formats/checkpoint"),
)
"""The same of what encoders are measured with besides, as architectures that generate are."""

_NOT_OF_ENCODERS = (
    *("machd_probes/encoder_matrix/catalogue", "machd_probes/encoder_matrix/command"),
    *("machd_probes/encoder_matrix/markdown", "machd_probes/encoder_matrix/matrix_file"),
    *("machd_probes/encoder_matrix/report", "machd_probes/encoder_matrix/table"),
    *("engine/encoding/inspection", "engine/encoding/input_tokenizer"),
)
"""Beginnings of the paths of modules among those that no vector depends on."""

_NOT_MEASURED = (
    # Of the probes: what starts them, keeps their results and shows them.
    *("machd_probes/catalogue", "machd_probes/command", "machd_probes/evidence_store"),
    *("machd_probes/markdown", "machd_probes/matrix_file", "machd_probes/model_probe"),
    *("machd_probes/progress", "machd_probes/report", "machd_probes/runner"),
    *("machd_probes/shrink", "machd_probes/stand_in", "machd_probes/startup"),
    *("machd_probes/table", "machd_probes/versions", "machd_probes/worker.py"),
    *("machd_probes/vision_matrix/catalogue", "machd_probes/vision_matrix/command"),
    *("machd_probes/vision_matrix/report", "machd_probes/vision_matrix/table"),
    "machd_probes/measurement",
    # Of the engine: files, text and devices, which no log-probability depends on.
    *("engine/backend/", "engine/fake/", "engine/grammar/", "engine/tokenizer/"),
    *("engine/ceiling", "engine/front", "engine/open", "engine/static_batch"),
    *("engine/loading/embedded", "engine/loading/formats/"),
    *("engine/loading/placing/place", "engine/loading/placing/settings"),
    # Ranks: one process computes without them.
    *("engine/ranks/", "engine/loading/placing/shard"),
    *("engine/loading/description", "engine/loading/inspection", "engine/loading/loader"),
    "engine/loading/model_code",
    *("engine/backend/safetensors_header", "engine/loading/source"),
    *("engine/loading/template_abilities", "engine/loading/tokenizer_files"),
    *("engine/prefix_blocks/directory", "engine/prefix_blocks/disk_tier"),
    *("engine/prefix_blocks/encoding", "engine/prefix_blocks/key"),
    *("engine/prefix_blocks/scan", "engine/prefix_blocks/writer"),
    *("engine/protocol/chat_format", "engine/protocol/fill_format", "engine/protocol/forwarding"),
    *("engine/protocol/progress",),
    *("engine/step/memory",),
    # Prompts of rerankers: text.
    *("engine/loading/reranker", "engine/protocol/reranker"),
)
"""Beginnings of the paths of modules that have no part in what is measured."""

VISION_PACKAGES = ("mlx-vlm", "transformers")
"""Packages whose versions decide on answers about images, besides mlx and mlx-lm."""

_ENCODER_PACKAGES = ("mlx-vlm",)
"""The same of vectors."""

_ABSENT = "not installed"
_VERSION = re.compile(r" \d[\w.]*(?=,|$)")
_SUFFIXES = frozenset({".py", ".toml"})


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
    """The basis of a measurement made now. Imports neither mlx nor mlx-lm; the first one takes about half a second.

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
    digest = _program_digest(left_out=(*_NOT_MEASURED, *_ENCODERS))
    basis = probe_basis(backend=backend, blas=blas)
    return replace(basis, sources=_with_versions(digest, VISION_PACKAGES))


def encoder_basis(*, backend: str, blas: str | None) -> ProbeBasis:
    """The basis of a measurement of encoders made now; mlx-vlm's version is in its digest."""
    basis = probe_basis(backend=backend, blas=blas)
    return replace(basis, sources=_program_encoder_digest())


def encoder_sources_digest(roots: tuple[Path, ...] = _SOURCES) -> str:
    """Hash of the code that encoders are measured with, and of the version of mlx-vlm, whose layers most of them have."""
    digest = sources_digest(
        roots, beginnings=(*_ENCODERS, *_WITH_ENCODERS), left_out=_NOT_OF_ENCODERS
    )
    return _with_versions(digest, _ENCODER_PACKAGES)


def _with_versions(digest: str, packages: tuple[str, ...]) -> str:
    versions = [f"{name} {installed_version(name)}" for name in packages]
    return hashlib.sha256(" ".join((digest, *versions)).encode()).hexdigest()[:16]


def sources_digest(
    roots: tuple[Path, ...] = _SOURCES,
    *,
    beginnings: tuple[str, ...] = ("",),
    left_out: tuple[str, ...] = (*_NOT_MEASURED, *_IMAGES, *_ENCODERS),
) -> str:
    """Hash of code and configurations, by their names; comments and docstrings do not count.

    Args:
        roots: Folders of sources.
        beginnings: Of the paths of those that count.
        left_out: Beginnings of the paths of those among them that do not.
    """
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(_files(root, beginnings, left_out)):
            name = path.relative_to(root.parent).as_posix().encode()
            content = path.read_bytes()
            if path.suffix == ".py":
                content = ast.dump(_without_docstrings(ast.parse(content))).encode()
            # With lengths, so that text cannot wander from one file to the next unseen.
            digest.update(b"%d %d " % (len(name), len(content)) + name + content)
    return digest.hexdigest()[:16]


# A program goes on with the sources that it was started with, and reads them once.
_program_digest = cache(sources_digest)
_program_encoder_digest = cache(encoder_sources_digest)


def _files(folder: Path, beginnings: tuple[str, ...], left_out: tuple[str, ...]) -> Iterator[Path]:
    # An architecture's configuration may have any name, so names of code leave none out.
    of_suffix = {".py": left_out, ".toml": tuple(set(left_out) & set(_IMAGES))}
    for path in folder.rglob("*"):
        name = path.relative_to(folder.parent).as_posix()
        if (
            path.suffix in _SUFFIXES
            and name.startswith(beginnings)
            and not name.startswith(of_suffix[path.suffix])
        ):
            yield path


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # Strings that stand alone: of modules, classes and functions, and below constants.
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return tree


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
