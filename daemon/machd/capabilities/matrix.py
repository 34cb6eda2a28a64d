"""One row of the capability matrix: what is known of an architecture, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from machd.capabilities.evidence import ProbeResult
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
class ArchitectureReport:
    """Findings about one architecture of mlx-lm's, on a tiny model of it.

    Attributes:
        architecture: mlx-lm's name of it.
        facts: Of its caches; None where no model could be built.
        results: Of every probe, in the order of the catalogue.
        problem: Why there is nothing to say of it; empty otherwise.
        code: Which code computed the models that were probed; None where there is no row to judge.
        switched: Findings on code that runs with other switches alone.
    """

    architecture: str
    facts: CacheFacts | None = None
    results: tuple[ProbeResult, ...] = ()
    problem: str = ""
    code: ModelCode | None = None
    switched: tuple[SwitchedReport, ...] = ()

    def results_for(
        self, code: ModelCode, shared: frozenset[str] = frozenset()
    ) -> tuple[ProbeResult, ...]:
        """Return the results that hold for a model of this code; empty if a part was never measured.

        Where a part was measured with other switches alone, the worse of the results counts.

        Args:
            code: Of the model in question.
            shared: Layers that were measured in other architectures, such as rotations.
        """
        if self.code is None:
            return ()
        covered = self.code
        found = {one.probe: [one] for one in self.results}
        for report in self.switched:
            if report.code.parts & (code.parts - covered.parts - shared):
                covered = covered.joined(report.code)
                for one in report.results:
                    found[one.probe].append(one)
        if not covered.covers(code, shared):
            return ()
        return tuple(ProbeResult.worst(results) for results in found.values())
