"""A run of workers over names, with results of earlier runs. Imports no mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from machd.capabilities.matrix import ArchitectureReport
from machd.user_directories import user_cache_directory
from machd_probes.progress import RunProgress
from machd_probes.results_cache import ResultsCache, results_directory
from machd_probes.runner import Runner
from machd_probes.versions import ProbeBasis


@dataclass(frozen=True, slots=True)
class Measurement:
    """The reports of a run.

    Attributes:
        basis: What they hold for.
        cached: How many reports were there before it.
        wanted: How many were asked for.
    """

    basis: ProbeBasis
    reports: tuple[ArchitectureReport, ...]
    cached: int
    wanted: int

    @property
    def is_complete(self) -> bool:
        """False if Ctrl-C broke it off."""
        return len(self.reports) == self.wanted


def measure(
    wanted: Sequence[str],
    basis: ProbeBasis,
    runner: Runner,
    environ: Mapping[str, str],
    *,
    use_cache: bool,
) -> Measurement:
    """Probe the names that the cache has no report of.

    Ctrl-C ends the workers; what was measured until then is returned.

    Args:
        wanted: Names that the workers know, each once.
        basis: What results hold for.
        runner: Starts the workers.
        environ: Names the directory of the cache.
        use_cache: Whether to take results of earlier runs and to keep new ones.
    """
    cache = ResultsCache(results_directory(user_cache_directory(environ)), basis)
    reports: dict[str, ArchitectureReport] = {}
    if use_cache:
        reports = {name: report for name in wanted if (report := cache.get(name))}
    cached = len(reports)
    missing = [name for name in wanted if name not in reports]

    def found(report: ArchitectureReport) -> None:
        reports[report.architecture] = report
        if use_cache:
            cache.put(report)

    try:
        with RunProgress(len(missing)) as progress:
            runner.measure(missing, found=found, progress=progress)
    except KeyboardInterrupt:
        pass
    return Measurement(basis, tuple(reports.values()), cached, len(wanted))
