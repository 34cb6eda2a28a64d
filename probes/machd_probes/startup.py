"""Measuring the model that a daemon has just loaded, once for each state of its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.engine.protocol import Engine, ModelDescription
from machd.engine.source import ModelSource, SourceKind, resolve_model
from machd.errors import MachdError
from machd_probes.results_cache import ResultsCache, results_directory
from machd_probes.versions import probe_basis

__all__ = ["startup_measure", "startup_recall"]

Measure: TypeAlias = Callable[[Engine], tuple[ProbeResult, ...]]

_DIRECTORY_FILES = ("*.safetensors", "*.json")
"""What makes a model what it is: weights, and the configuration that shapes its caches."""


def startup_measure(cache_directory: Path, *, model_path: str | None = None) -> Measure:
    """Give the function that measures a loaded engine, or remembers what it measured before.

    What ended in an error is not remembered: that says as much of the machine at that moment as of
    the model.

    Args:
        cache_directory: The user's cache directory.
        model_path: ``model.path``; None for the embedded default.
    """

    def measure(engine: Engine) -> tuple[ProbeResult, ...]:
        from machd_probes.prober import measure_engine  # noqa: PLC0415 - imports mlx

        key = _key(engine.model, model_path, cache_directory)
        cache = _cache(engine.model, cache_directory)
        known = cache.get_results(key) if key is not None else None
        if known is not None:
            return known
        results: tuple[ProbeResult, ...] = measure_engine(engine)
        if key is not None and all(one.outcome is not Outcome.ERRORED for one in results):
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


def _cache(model: ModelDescription, cache_directory: Path) -> ResultsCache:
    basis = probe_basis(backend=model.backend, blas=model.blas, dtype=model.dtype)
    return ResultsCache(results_directory(cache_directory), basis)


def _key(model: ModelDescription, model_path: str | None, cache_directory: Path) -> str | None:
    """Names the model and the state of its files; None where they are gone, so nothing is kept."""
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
    return sorted(file for pattern in _DIRECTORY_FILES for file in source.path.glob(pattern))


def _state(file: Path) -> tuple[str, int, int]:
    """Name, bytes, and when it was written in nanoseconds since 1970."""
    facts = file.stat()
    return file.name, facts.st_size, facts.st_mtime_ns
