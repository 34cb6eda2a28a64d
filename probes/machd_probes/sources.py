"""Digests of the code that measures and computes, by which a result is known to hold."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec import Struct

import machd
from machd.installed import installed_version

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
    *("machd_probes/shrink", "machd_probes/sources", "machd_probes/stand_in"),
    *("machd_probes/startup", "machd_probes/table", "machd_probes/versions"),
    "machd_probes/worker.py",
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

_NOT_OF_ARCHITECTURES = (*_NOT_MEASURED, *_IMAGES, *_ENCODERS)
"""The same of what architectures that generate are measured with."""

VISION_PACKAGES = ("mlx-vlm", "transformers")
"""Packages whose versions decide on answers about images, besides mlx and mlx-lm."""

_ENCODER_PACKAGES = ("mlx-vlm",)
"""The same of vectors."""

_SUFFIXES = frozenset({".py", ".toml"})

_KEPT_NAME = "sources.json"

KEPT_SOURCES_PATH = _PROBES / _KEPT_NAME
"""Where ``make docs`` writes the digest of a checkout."""


class KeptSources(Struct, frozen=True):
    """The digest that comes with machd, which a start reads instead of parsing the sources.

    Attributes:
        bytes_digest: Hash of the files that :func:`sources_digest` reads, with comments and docstrings.
        code_digest: What it returned for them.
    """

    bytes_digest: str
    code_digest: str

    @classmethod
    def of(cls, roots: tuple[Path, ...] = _SOURCES) -> KeptSources:
        """Compute both digests of these sources."""
        return cls(_bytes_digest(roots), sources_digest(roots))

    @classmethod
    def kept(cls) -> KeptSources | None:
        """Read the file that comes with machd; None where there is none, or another one."""
        try:
            content = (files(__package__) / _KEPT_NAME).read_bytes()
            return msgspec.json.decode(content, type=cls)
        except (OSError, ValueError):
            return None


def known_sources_digest(kept: KeptSources | None, roots: tuple[Path, ...] = _SOURCES) -> str:
    """Return :func:`sources_digest` in 20 ms where the files are those that were kept, else in half a second."""
    if kept is not None and kept.bytes_digest == _bytes_digest(roots):
        return kept.code_digest
    return sources_digest(roots)


def _bytes_digest(roots: tuple[Path, ...]) -> str:
    return _digest(_files(roots, ("",), _NOT_OF_ARCHITECTURES), Path.read_bytes)


def encoder_sources_digest(roots: tuple[Path, ...] = _SOURCES) -> str:
    """Hash of the code that encoders are measured with, and of the version of mlx-vlm, whose layers most of them have."""
    digest = sources_digest(
        roots, beginnings=(*_ENCODERS, *_WITH_ENCODERS), left_out=_NOT_OF_ENCODERS
    )
    return _with_versions(digest, _ENCODER_PACKAGES)


def vision_sources_digest(roots: tuple[Path, ...] = _SOURCES) -> str:
    """Hash of the code that models of images are measured with, and of the packages that decide on their answers."""
    digest = sources_digest(roots, left_out=(*_NOT_MEASURED, *_ENCODERS))
    return _with_versions(digest, VISION_PACKAGES)


def _with_versions(digest: str, packages: tuple[str, ...]) -> str:
    versions = [f"{name} {installed_version(name)}" for name in packages]
    return hashlib.sha256(" ".join((digest, *versions)).encode()).hexdigest()[:16]


def sources_digest(
    roots: tuple[Path, ...] = _SOURCES,
    *,
    beginnings: tuple[str, ...] = ("",),
    left_out: tuple[str, ...] = _NOT_OF_ARCHITECTURES,
) -> str:
    """Hash of code and configurations, by their names; comments and docstrings do not count.

    Args:
        roots: Folders of sources.
        beginnings: Of the paths of those that count.
        left_out: Beginnings of the paths of those among them that do not.
    """
    return _digest(_files(roots, beginnings, left_out), _code)


def _digest(named: Iterable[tuple[str, Path]], content_of: Callable[[Path], bytes]) -> str:
    digest = hashlib.sha256()
    for name, path in named:
        content = content_of(path)
        # With lengths, so that text cannot wander from one file to the next unseen.
        digest.update(b"%d %d " % (len(name.encode()), len(content)) + name.encode() + content)
    return digest.hexdigest()[:16]


def _files(
    roots: Iterable[Path], beginnings: tuple[str, ...], left_out: tuple[str, ...]
) -> Iterator[tuple[str, Path]]:
    # An architecture's configuration may have any name, so names of code leave none out.
    of_suffix = {".py": left_out, ".toml": tuple(set(left_out) & set(_IMAGES))}
    for root in roots:
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root.parent).as_posix()
            if (
                path.suffix in _SUFFIXES
                and name.startswith(beginnings)
                and not name.startswith(of_suffix[path.suffix])
            ):
                yield name, path


def _code(path: Path) -> bytes:
    """Return the part of a file that decides what is computed."""
    content = path.read_bytes()
    return repr(_canonical(ast.parse(content))).encode() if path.suffix == ".py" else content


def _canonical(part: object) -> object:
    """Return a tree of code as lists, without comments and docstrings, and the same on each version of Python.

    Fields that say nothing are left out: since 3.12 a function has a list of type parameters, since 3.15 an import is lazy or not.
    """
    if isinstance(part, list):
        # Strings that stand alone: docstrings, and those below constants.
        return [_canonical(one) for one in part if not _is_text(one)]
    if not isinstance(part, ast.AST):
        return repr(part)
    fields = ((name, getattr(part, name, None)) for name in part._fields)
    return [
        type(part).__name__,
        *((name, _canonical(field)) for name, field in fields if field or name == "value"),
    ]


def _is_text(statement: object) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
