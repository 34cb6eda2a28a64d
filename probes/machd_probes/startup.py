"""Measuring the model that a daemon has just loaded, once for each state of its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.engine.model_files import read_object
from machd.engine.protocol import Engine, ModelDescription
from machd.engine.source import ModelSource, SourceKind, resolve_model
from machd.errors import MachdError
from machd.serving.startup_guard import Measure
from machd_probes.results_cache import ResultsCache, results_directory
from machd_probes.versions import probe_basis

__all__ = ["startup_measure", "startup_recall"]

_DIRECTORY_FILES = ("*.safetensors", "*.json")
"""What makes a model what it is: weights, and the configuration that shapes its caches."""

_MAX_ENTRIES = 10_000
"""Of a model's folder and those in it; no model's own have a hundred."""


def startup_measure(
    cache_directory: Path, *, model_path: str | None = None, anew: bool = False
) -> Measure:
    """Give the function that measures a loaded engine, or remembers what it measured before.

    What ended in an error, or failed without a single comparison, is not remembered: that says as
    much of the machine at that moment as of the model.

    Args:
        cache_directory: The user's cache directory.
        model_path: ``model.path``; None for the embedded default.
        anew: Whether what was measured before does not count.
    """

    def measure(engine: Engine) -> tuple[ProbeResult, ...]:
        from machd_probes.prober import measure_engine  # noqa: PLC0415 - imports mlx

        key = _key(engine.model, model_path, cache_directory)
        cache = _cache(engine.model, cache_directory)
        known = cache.get_results(key) if key is not None and not anew else None
        if known is not None:
            return known
        results: tuple[ProbeResult, ...] = measure_engine(engine)
        if key is not None and all(map(_is_lasting, results)):
            cache.put_results(key, results)
        return results

    return measure


def startup_recall(cache_directory: Path, *, model_path: str | None = None) -> Measure:
    """Give the function that tells what was measured before; nothing where nothing was.

    Args:
        cache_directory: The user's cache directory.
        model_path: ``model.path``; None for the embedded default.
    """

    def recall(engine: Engine) -> tuple[ProbeResult, ...]:
        key = _key(engine.model, model_path, cache_directory)
        if key is None:
            return ()
        return _cache(engine.model, cache_directory).get_results(key) or ()

    return recall


def _is_lasting(result: ProbeResult) -> bool:
    """Whether it says something of the model, whatever else the machine did meanwhile."""
    if result.outcome is Outcome.FAILED:
        return result.evidence.cases > 0  # without any, something raised before it could differ
    return result.outcome is not Outcome.ERRORED


def _cache(model: ModelDescription, cache_directory: Path) -> ResultsCache:
    basis = probe_basis(backend=model.backend, blas=model.blas, dtype=model.dtype)
    return ResultsCache(results_directory(cache_directory), basis)


def _key(model: ModelDescription, model_path: str | None, cache_directory: Path) -> str | None:
    """Names the model and the state of its files.

    None where they are gone or too many to look at, so nothing is kept.
    """
    try:
        # It has just been loaded from there: nothing is left to fetch.
        source = resolve_model(model_path, offline=True, cache_directory=cache_directory)
        files = [_state(file) for file in _files(source)]
    except (MachdError, OSError):
        return None
    facts = (model.architecture, model.quantization, model.parameters, model.weights_bytes)
    return msgspec.json.encode((str(source.path.resolve()), files, facts)).decode()


def _files(source: ModelSource) -> list[Path]:
    if source.kind is SourceKind.GGUF:
        return [source.path]
    data = (file for pattern in _DIRECTORY_FILES for file in source.path.glob(pattern))
    return sorted({*data, *_code_files(source.path)})


def _code_files(path: Path) -> Iterator[Path]:
    """Python code that a checkpoint brings: it may be the model, or be imported by it.

    Raises:
        OSError: The folder holds too much to look through.
    """
    named = (read_object(path / "config.json") or {}).get("model_file")
    if isinstance(named, str):
        yield path / named  # which may lie anywhere
    seen = 0
    for folder, folders, files in os.walk(path, followlinks=True):
        seen += len(folders) + len(files)
        if seen > _MAX_ENTRIES:
            raise OSError("too many files")
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _state(file: Path) -> tuple[str, int, int, int, int]:
    """Path, bytes, when it was written and changed in nanoseconds since 1970, and its number.

    Whoever sets the time of writing back cannot set the other two.
    """
    facts = file.stat()
    return str(file), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino
