"""The work behind ``machd check --all-archs`` and ``--arch``. Imports neither mlx nor mlx-lm."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import click
from msgspec import UNSET, UnsetType
from rich.console import Console

from machd.errors import EngineFaultError, ModelArchitectureError
from machd.settings.sources import process_environ
from machd_probes.catalogue import architecture_names
from machd_probes.encoder_matrix.catalogue import encoder_families
from machd_probes.encoder_matrix.command import encoder_runner, judged, measure_encoders
from machd_probes.encoder_matrix.report import EncoderMatrix
from machd_probes.encoder_matrix.table import print_encoders
from machd_probes.matrix_file import KeptMatrix
from machd_probes.measurement import Measurement, measure
from machd_probes.report import MatrixReport, encode_matrix, matrix_of, rounded
from machd_probes.runner import WORKER_COMMAND, Runner, RunnerLimits
from machd_probes.table import print_matrix
from machd_probes.versions import probe_basis
from machd_probes.worker import SWITCHES_FLAG
from machd_probes.worker_messages import BLAS_VARIABLE

_SWITCHES_S = 600.0
"""For one architecture with its switches, of which some have six combinations."""

_HOLDS = 0
_HOLDS_NOT = 1
_INTERRUPTED = 130


class _Document(MatrixReport, frozen=True, kw_only=True):
    """The document that ``--json`` prints; encoders are left out where none was asked for."""

    encoders: EncoderMatrix | UnsetType = UNSET


def check_architectures(  # noqa: PLR0913 - one argument for each option
    names: tuple[str, ...] | None,
    *,
    as_json: bool,
    use_cache: bool,
    require_batched: bool,
    blas: str | None = None,
    runner: Runner | None = None,
    encoders: Runner | None = None,
) -> int:
    """Measure architectures and encoders, print the matrix to standard output, and give the exit code.

    The code is 1 if a text has other vectors or logits in a batch than alone, or than its files say: a daemon does not measure that. Ctrl-C
    ends the workers and prints what was measured until then, marked as incomplete.

    Args:
        names: Architectures as mlx-lm names them, and families of encoders, which may have the same name; None for all of them.
        as_json: Whether to print JSON, ``machd_probes.report`` and ``machd_probes.encoder_matrix.report`` say which, and no table.
        use_cache: Whether to take results of earlier runs and to keep new ones. Without it the
            cache is neither read nor written: what a busy machine measured leaves no trace.
        require_batched: Whether the code is 1 unless continuous batching is supported for all.
        blas: ``engine.blas`` for the workers; what the environment says unless given.
        runner: Starts the workers; the real one unless given.
        encoders: The same of those that probe encoders.

    Raises:
        ModelArchitectureError: Neither the installed mlx-lm has an architecture of a name, nor machd a family of encoders.
        StartupError: No worker can start.
    """
    architectures, families = _known(names)
    environ = process_environ()
    if blas is not None:
        environ[BLAS_VARIABLE] = blas
    runner = runner or Runner(environ)
    computing = runner.what_computes()
    basis = probe_basis(backend=computing.backend, blas=computing.blas)
    found = [measure(architectures, basis, runner, environ, use_cache=use_cache)]
    matrix = matrix_of(found[0].reports, basis, complete=found[0].is_complete)
    of_encoders = None
    if families and matrix.complete:
        encoders = encoders or encoder_runner(environ)
        found.append(measure_encoders(families, computing, encoders, environ, use_cache=use_cache))
        of_encoders = judged(found[1])
    if as_json:
        click.echo(encode_matrix(_document(matrix, of_encoders)), nl=False)
    else:
        _print(matrix, of_encoders, found)
    for one, noun in zip(found, ("architectures", "encoders"), strict=False):
        if not one.is_complete:
            done = f"{len(one.reports)} of {one.wanted}"
            click.echo(f"machd: interrupted; {done} {noun} were probed", err=True)
            return _INTERRUPTED
    if of_encoders is not None and any(row.is_wrong for row in of_encoders.rows):
        return _HOLDS_NOT
    return _HOLDS_NOT if require_batched and not _all_batched(matrix, of_encoders) else _HOLDS


def measured_matrix(*, runner: Runner | None = None) -> KeptMatrix:
    """The matrix of all architectures, measured anew, with figures for a file that is kept.

    It holds what code with other switches shows, too. Takes minutes.

    Raises:
        EngineFaultError: It was interrupted.
        StartupError: No worker can start.
    """
    wanted = architecture_names()
    environ = process_environ()
    runner = runner or Runner(
        environ,
        command=(*WORKER_COMMAND, SWITCHES_FLAG),
        limits=RunnerLimits(architecture_s=_SWITCHES_S),
    )
    computing = runner.what_computes()
    basis = probe_basis(backend=computing.backend, blas=computing.blas)
    measurement = measure(wanted, basis, runner, environ, use_cache=False)
    if not measurement.is_complete:
        raise EngineFaultError("measuring was interrupted; the matrix is left as it was")
    reports = {report.architecture: rounded(report) for report in measurement.reports}
    return KeptMatrix(measurement.basis, reports)


def _known(names: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The architectures and the families of encoders asked for, each once.

    Raises:
        ModelArchitectureError: There is none of a name.
    """
    architectures, families = architecture_names(), encoder_families()
    if names is None:
        return tuple(architectures), tuple(families)
    known = sorted({*architectures, *families})
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
            raise ModelArchitectureError(
                f"neither the installed mlx-lm nor machd's encoders have an architecture {name!r}; the nearest are "
                f"{', '.join(near)}"
            )
    wanted = dict.fromkeys(names)
    return (
        tuple(name for name in wanted if name in architectures),
        tuple(name for name in wanted if name in families),
    )


def _document(matrix: MatrixReport, encoders: EncoderMatrix | None) -> _Document:
    fields = {name: getattr(matrix, name) for name in matrix.__struct_fields__}
    return _Document(**fields, encoders=UNSET if encoders is None else encoders)


def _all_batched(matrix: MatrixReport, encoders: EncoderMatrix | None) -> bool:
    are_encoders = encoders is None or encoders.summary.supported == len(encoders.rows)
    return are_encoders and matrix.summary.supported == len(matrix.architectures)


def _print(
    matrix: MatrixReport, encoders: EncoderMatrix | None, found: Sequence[Measurement]
) -> None:
    console = Console()
    if encoders is not None:
        print_encoders(encoders, console)
    if matrix.architectures or encoders is None:
        print_matrix(matrix, console)
    cached = sum(one.cached for one in found)
    if cached:
        of_all = f"{cached} of {sum(len(one.reports) for one in found)}"
        click.echo(f"{of_all} were measured earlier; --no-cache measures them again")
