"""Runs the checks of the encoders' matrix on a tiny checkpoint, in a worker process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport
from machd.clock import Clock, SystemClock
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd_probes.encoder_matrix.catalogue import CHECK_NAMES
from machd_probes.encoder_matrix.checks import CHECKS
from machd_probes.encoder_matrix.subject import EncoderSubject
from machd_probes.encoder_matrix.tiny_checkpoint import write_encoder
from machd_probes.encoder_matrix.tiny_encoders import TINY_ENCODERS
from machd_probes.finding import Finding
from machd_probes.subject import told


def probe_encoder(name: str, checks: Iterable[str] = CHECK_NAMES) -> ArchitectureReport:
    """Run checks on a tiny encoder of the catalogue; its report has no facts of caches, because it has none."""
    import_mlx_lm()
    with tempfile.TemporaryDirectory(prefix="machd-encoder-") as directory:
        try:
            subject = EncoderSubject(write_encoder(Path(directory) / name, TINY_ENCODERS[name]))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library's code does anything
            return ArchitectureReport(name, problem=f"the tiny model {told(error)}")
        clock = SystemClock()
        with subject:
            results = tuple(_run_check(subject, check, clock) for check in checks)
    return ArchitectureReport(name, results=results)


def _run_check(subject: EncoderSubject, name: str, clock: Clock) -> ProbeResult:
    started_s = clock.monotonic_s()
    try:
        finding = CHECKS[name](subject)
    except MemoryError as error:
        finding = Finding(Outcome.ERRORED, told(error))
    except Exception as error:  # noqa: BLE001 - a model raises whatever it likes
        finding = Finding(Outcome.FAILED, told(error))
    duration_s = clock.monotonic_s() - started_s
    return ProbeResult(name, finding.outcome, finding.detail, finding.evidence, duration_s)
