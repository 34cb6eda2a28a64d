"""One row of the capability matrix: what is known of an architecture, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts
from machd.capabilities.model_code import ModelCode


@dataclass(frozen=True, slots=True)
class SwitchedReport:
    """Findings about a tiny model with other switches than the configurations of its architecture.

    Attributes:
        switches: Options that differ, such as ``norm_topk_prob=false``.
        code: Which code computed the model.
        results: Of the probes that decide on a feature.
    """

    switches: str
    code: ModelCode
    results: tuple[ProbeResult, ...]


@dataclass(frozen=True, slots=True)
class ConfigurationReport:
    """Findings about one of several tiny configurations of an architecture.

    Attributes:
        code: Which code computed the model.
        results: Of every probe.
    """

    code: ModelCode
    results: tuple[ProbeResult, ...]


@dataclass(frozen=True, slots=True)
class ArchitectureReport:
    """Findings about one architecture of mlx-lm's, on a tiny model of it.

    Attributes:
        architecture: mlx-lm's name of it.
        facts: Of its caches; None where no model could be built.
        results: Of every probe, in the order of the catalogue; the worst of all configurations.
        problem: Why there is nothing to say of it; empty otherwise.
        code: Which code computed the models that were probed; None where there is no row to judge.
        switched: Findings on code that runs with other switches alone.
        configurations: Findings about each configuration, the main one first, where there are several.
    """

    architecture: str
    facts: CacheFacts | None = None
    results: tuple[ProbeResult, ...] = ()
    problem: str = ""
    code: ModelCode | None = None
    switched: tuple[SwitchedReport, ...] = ()
    configurations: tuple[ConfigurationReport, ...] = ()

    def results_for(
        self, code: ModelCode, shared: frozenset[str] = frozenset()
    ) -> tuple[ProbeResult, ...]:
        """Return the results that hold for a model of this code; empty if a part was never measured.

        Where one configuration runs all of this code, its figures count, unless another one failed. Where a part
        of the code was measured with other switches alone, the worse of the results counts.

        ``shared`` are layers that were measured in other architectures, such as rotations.
        """
        if self.code is None:
            return ()
        covered = self.code
        found = {one.probe: [one] for one in self._nearest(code, shared)}
        for report in self.switched:
            if report.code.parts & (code.parts - covered.parts - shared):
                covered = covered.joined(report.code)
                for one in report.results:
                    found[one.probe].append(one)
        if not covered.covers(code, shared):
            return ()
        return tuple(ProbeResult.worst(results) for results in found.values())

    def _nearest(self, code: ModelCode, shared: frozenset[str]) -> tuple[ProbeResult, ...]:
        """Return the results of the configuration that runs this code and least besides, and what failed with any.

        Where several run equally little besides, the worst of their results count.
        """
        covering = [one for one in self.configurations if one.code.covers(code, shared)]
        extra = {one: len(one.code.parts - code.parts) for one in covering}
        nearest = [one for one in covering if extra[one] == min(extra.values())]
        own: dict[str, list[ProbeResult]] = {}
        for result in (result for one in nearest for result in one.results):
            own.setdefault(result.probe, []).append(result)
        return tuple(
            worst
            if worst.probe not in own or worst.outcome in {Outcome.FAILED, Outcome.ERRORED}
            else ProbeResult.worst(own[worst.probe])
            for worst in self.results
        )
