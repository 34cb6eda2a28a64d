"""The encoders' part of ``machd check --all-archs`` and ``--arch``. Imports neither mlx nor mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from machd.errors import EngineFaultError
from machd.installed import installed_version
from machd.settings.sources import process_environ
from machd_probes.encoder_matrix.catalogue import encoder_families, encoders_of
from machd_probes.encoder_matrix.matrix_file import KeptEncoders
from machd_probes.encoder_matrix.report import EncoderMatrix, encoder_matrix_of
from machd_probes.measurement import Measurement, measure
from machd_probes.report import rounded
from machd_probes.runner import WORKER_COMMAND, Runner, RunnerLimits
from machd_probes.versions import encoder_basis
from machd_probes.worker import ENCODERS_FLAG
from machd_probes.worker_messages import WorkerReady

MLX_VLM = "mlx-vlm"


def encoder_runner(environ: Mapping[str, str]) -> Runner:
    """Return a runner whose workers probe encoders: all in one process, of which most time goes to imports."""
    return Runner(environ, command=(*WORKER_COMMAND, ENCODERS_FLAG), limits=RunnerLimits(group=64))


def measure_encoders(
    families: Sequence[str],
    computing: WorkerReady,
    runner: Runner,
    environ: Mapping[str, str],
    *,
    use_cache: bool,
) -> Measurement:
    """Measure the tiny encoders of families; see :func:`machd_probes.measurement.measure`."""
    names = [name for family in families for name in encoders_of(family)]
    basis = encoder_basis(backend=computing.backend, blas=computing.blas)
    return measure(names, basis, runner, environ, use_cache=use_cache)


def judged(measurement: Measurement) -> EncoderMatrix:
    """Return the matrix of what was measured now."""
    return encoder_matrix_of(
        measurement.reports,
        measurement.basis,
        installed_version(MLX_VLM),
        complete=measurement.is_complete,
    )


def measured_encoders(*, runner: Runner | None = None) -> KeptEncoders:
    """The matrix of all encoders, measured anew, with figures for a file that is kept. Takes seconds.

    Raises:
        EngineFaultError: It was interrupted.
        StartupError: No worker can start.
    """
    environ = process_environ()
    runner = runner or encoder_runner(environ)
    found = measure_encoders(
        encoder_families(), runner.what_computes(), runner, environ, use_cache=False
    )
    if not found.is_complete:
        raise EngineFaultError("measuring was interrupted; the encoders' matrix is left as it was")
    reports = {report.architecture: rounded(report) for report in found.reports}
    return KeptEncoders(found.basis, installed_version(MLX_VLM), reports)
