"""The work behind ``machd check --all-archs`` and ``--arch``. Imports neither mlx nor mlx-lm."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click
from rich.console import Console

from machd.capabilities.matrix import ArchitectureReport
from machd.errors import EngineFaultError, ModelArchitectureError
from machd.settings.sources import process_environ
from machd.user_directories import user_cache_directory
from machd_probes.catalogue import architecture_names
from machd_probes.matrix_file import KeptMatrix
from machd_probes.progress import RunProgress
from machd_probes.report import MatrixReport, encode_matrix, matrix_of, rounded
from machd_probes.results_cache import ResultsCache, results_directory
from machd_probes.runner import WORKER_COMMAND, Runner, RunnerLimits
from machd_probes.table import print_matrix
from machd_probes.versions import ProbeBasis, probe_basis
from machd_probes.worker import SWITCHES_FLAG
from machd_probes.worker_messages import BLAS_VARIABLE

_SWITCHES_S = 600.0
"""For one architecture with its switches, of which some have six combinations."""

_HOLDS = 0
_HOLDS_NOT = 1
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class _Measurement:
    """The reports of a run.

    Attributes:
        cached: How many reports were there before it.
        complete: Whether it was not interrupted.
    """

    basis: ProbeBasis
    reports: tuple[ArchitectureReport, ...]
    cached: int
    complete: bool


def check_architectures(
    names: tuple[str, ...] | None,
    *,
    as_json: bool,
    use_cache: bool,
    require_batched: bool,
    blas: str | None = None,
    runner: Runner | None = None,
) -> int:
    """Measure architectures, print the matrix to standard output, and give the exit code.

    Ctrl-C ends the workers and prints what was measured until then, marked as incomplete.

    Args:
        names: Architectures as mlx-lm names them; None for all of them.
        as_json: Whether to print JSON, ``machd_probes.report`` says which, and no table.
        use_cache: Whether to take results of earlier runs and to keep new ones. Without it the
            cache is neither read nor written: what a busy machine measured leaves no trace.
        require_batched: Whether the code is 1 unless continuous batching is supported for all.
        blas: ``engine.blas`` for the workers; what the environment says unless given.
        runner: Starts the workers; the real one unless given.

    Raises:
        ModelArchitectureError: The installed mlx-lm has no architecture of a name.
        StartupError: No worker can start.
    """
    wanted = _known(names)
    environ = process_environ()
    if blas is not None:
        environ[BLAS_VARIABLE] = blas
    measurement = _measure(wanted, environ, runner or Runner(environ), use_cache=use_cache)
    matrix = matrix_of(
        measurement.reports, measurement.basis, complete=len(measurement.reports) == len(wanted)
    )
    if as_json:
        click.echo(encode_matrix(matrix), nl=False)
    else:
        print_matrix(matrix, Console())
        _print_cached(measurement)
    if not measurement.complete:
        done = f"{len(measurement.reports)} of {len(wanted)}"
        click.echo(f"machd: interrupted; {done} architectures were probed", err=True)
        return _INTERRUPTED
    return _HOLDS_NOT if require_batched and not _all_batched(matrix) else _HOLDS


def measured_matrix(*, runner: Runner | None = None) -> KeptMatrix:
    """The matrix of all architectures, measured anew, with figures for a file that is kept.

    It holds what code with other switches shows, too. Takes minutes.

    Raises:
        EngineFaultError: It was interrupted.
        StartupError: No worker can start.
    """
    wanted = _known(None)
    environ = process_environ()
    runner = runner or Runner(
        environ,
        command=(*WORKER_COMMAND, SWITCHES_FLAG),
        limits=RunnerLimits(architecture_s=_SWITCHES_S),
    )
    measurement = _measure(wanted, environ, runner, use_cache=False)
    if not measurement.complete:
        raise EngineFaultError("measuring was interrupted; the matrix is left as it was")
    reports = {report.architecture: rounded(report) for report in measurement.reports}
    return KeptMatrix(measurement.basis, reports)


def _known(names: Sequence[str] | None) -> tuple[str, ...]:
    """The names asked for, each once.

    Raises:
        ModelArchitectureError: The installed mlx-lm has no architecture of a name.
    """
    known = architecture_names()
    if names is None:
        return tuple(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
            raise ModelArchitectureError(
                f"the installed mlx-lm has no architecture {name!r}; the nearest are "
                f"{', '.join(near)}"
            )
    return tuple(dict.fromkeys(names))


def _measure(
    wanted: Sequence[str], environ: Mapping[str, str], runner: Runner, *, use_cache: bool
) -> _Measurement:
    computing = runner.what_computes()
    basis = probe_basis(backend=computing.backend, blas=computing.blas)
    directory = results_directory(user_cache_directory(environ))
    cache = ResultsCache(directory, basis) if use_cache else None
    reports = {}
    if cache is not None:
        reports = {name: report for name in wanted if (report := cache.get(name))}
    cached = len(reports)
    missing = [name for name in wanted if name not in reports]

    def found(report: ArchitectureReport) -> None:
        reports[report.architecture] = report
        if cache is not None:
            cache.put(report)

    complete = True
    try:
        with RunProgress(len(missing)) as progress:
            runner.measure(missing, found=found, progress=progress)
    except KeyboardInterrupt:
        complete = False
    return _Measurement(basis, tuple(reports.values()), cached, complete)


def _all_batched(matrix: MatrixReport) -> bool:
    return matrix.summary.supported == len(matrix.architectures)


def _print_cached(measurement: _Measurement) -> None:
    if measurement.cached:
        of_all = f"{measurement.cached} of {len(measurement.reports)}"
        click.echo(f"{of_all} were measured earlier; --no-cache measures them again")
