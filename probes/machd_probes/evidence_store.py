"""The evidence store: the matrix that ships with machd, and results measured on this machine.

A result holds for the code that computed it. Where a probe failed on one model and passed on another
that runs the same code, the failure counts. Otherwise the nearest answer counts: of the model's own
weights, then of a small model of its configuration that was measured here, then of the tiny model of
its architecture that comes with machd, which may have been measured with another BLAS.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from machd.capabilities.evidence import MeasuredOn, Outcome, ProbeResult
from machd.capabilities.model_code import ModelCode
from machd.engine.backend.model_files import own_code_files
from machd.engine.loading.source import ModelSource, SourceKind
from machd.errors import MachdError
from machd_probes.matrix_file import KeptMatrix, kept_matrix
from machd_probes.results_cache import ResultsCache, results_directory
from machd_probes.versions import ProbeBasis

_DIRECTORY_FILES = ("*.safetensors", "*.json")
"""Files that a model's evidence depends on: weights, and the configuration that shapes its caches."""


class EvidenceStore:
    """Evidence on models under one basis. Thread-safe; a disk that cannot be written is not an error."""

    def __init__(
        self, cache_directory: Path, basis: ProbeBasis, *, matrix: KeptMatrix | None = None
    ) -> None:
        """Open it; nothing is read yet.

        Args:
            cache_directory: What ``machd.user_directories.user_cache_directory`` gives.
            basis: What a result has to hold for.
            matrix: What comes with machd, unless another one is given.
        """
        self._basis = basis
        self._cache = ResultsCache(results_directory(cache_directory), basis)
        self._matrix = matrix or kept_matrix()
        self._fresh: dict[str, dict[str, ProbeResult]] = {}
        self._lock = threading.Lock()

    def find(
        self, architecture: str, code: ModelCode, weights: str = ""
    ) -> tuple[ProbeResult, ...]:
        """Return the evidence on a model; empty if it has to be measured.

        Args:
            architecture: mlx-lm's name of it.
            code: Which code computes it.
            weights: What :func:`weights_key` gives.
        """
        found: dict[str, ProbeResult] = {}
        with self._lock:
            for result in self._nearest_first(architecture, code, weights):
                known = found.get(result.probe)
                if known is None or _weight(result) > _weight(known):
                    found[result.probe] = result
        return tuple(found.values())

    def keep_stand_in(
        self, architecture: str, code: ModelCode, results: Iterable[ProbeResult]
    ) -> None:
        """Add results of a small model that runs this code."""
        key = _code_key(architecture, code)
        with self._lock:
            self._fresh.setdefault(key, {}).update({one.probe: one for one in results})
            lasting = [one for one in self._known(key) if one.outcome is not Outcome.ERRORED]
            self._cache.put_results(key, tuple(lasting))

    def keep_weights(self, weights: str, results: Iterable[ProbeResult]) -> None:
        """Replace the results of a model's own weights.

        Args:
            weights: What :func:`weights_key` gives.
            results: Those that say as much of the machine as of the model are for this process alone.
        """
        fresh = tuple(results)
        with self._lock:
            self._fresh[weights] = {one.probe: one for one in fresh}
        if weights:
            self._cache.put_results(weights, tuple(filter(_is_lasting, fresh)))

    def _known(self, key: str) -> tuple[ProbeResult, ...]:
        """Return the cached results and those of this process, which may not be on disk."""
        kept = {one.probe: one for one in self._cache.get_results(key) or ()} if key else {}
        return tuple((kept | self._fresh.get(key, {})).values())

    def _nearest_first(
        self, architecture: str, code: ModelCode, weights: str
    ) -> Iterator[ProbeResult]:
        yield from self._known(weights)
        yield from self._known(_code_key(architecture, code))
        yield from self._shipped(architecture, code)

    def _shipped(self, architecture: str, code: ModelCode) -> tuple[ProbeResult, ...]:
        matrix = self._matrix
        if matrix is None or not matrix.basis.computes_like(self._basis):
            return ()
        report = matrix.reports.get(architecture)
        if report is None:
            return ()
        is_same_blas = matrix.basis.has_blas_of(self._basis)
        where = MeasuredOn.SHIPPED if is_same_blas else MeasuredOn.SHIPPED_OTHER_BLAS
        results = report.results_for(code, matrix.shared_layers)
        return tuple(replace(one, measured_on=where) for one in results)


def weights_key(source: ModelSource) -> str:
    """Names a model by the state of its files.

    Empty where they are gone or too many to look at, so that nothing is kept of them.
    """
    try:
        files = [_state(file) for file in _files(source)]
    except (MachdError, OSError):
        return ""
    return msgspec.json.encode((str(source.path.resolve()), files)).decode()


def _weight(result: ProbeResult) -> int:
    """A failure is worth more than a pass, and any answer more than none."""
    return 2 if result.outcome is Outcome.FAILED else int(result.is_answer)


def _code_key(architecture: str, code: ModelCode) -> str:
    return msgspec.json.encode((architecture, code), order="deterministic").decode()


def _is_lasting(result: ProbeResult) -> bool:
    """Return whether the result holds for the model, independent of the machine's load."""
    if result.outcome is Outcome.FAILED:
        return result.evidence.cases > 0  # without any, something raised before it could differ
    return result.outcome is not Outcome.ERRORED


def _files(source: ModelSource) -> list[Path]:
    if source.kind is SourceKind.GGUF:
        return [source.path]
    data = (file for pattern in _DIRECTORY_FILES for file in source.path.glob(pattern))
    return sorted({*data, *own_code_files(source.path)})


def _state(file: Path) -> tuple[str, int, int, int, int]:
    """Return path, size, mtime and ctime in nanoseconds, and inode number.

    mtime can be set back; ctime and the inode number cannot.
    """
    facts = file.stat()
    return str(file), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino
