"""One row of the capability matrix: what is known of an architecture, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from machd.capabilities.evidence import ProbeResult
from machd.capabilities.facts import CacheFacts
from machd.capabilities.model_code import ModelCode


@dataclass(frozen=True, slots=True)
class ArchitectureReport:
    """Findings about one architecture of mlx-lm's, on a tiny model of it.

    Attributes:
        architecture: mlx-lm's name of it.
        facts: Of its caches; None where no model could be built.
        results: Of every probe, in the order of the catalogue.
        problem: Why there is nothing to say of it; empty otherwise.
        code: Which code computed the models that were probed; None where there is no row to judge.
    """

    architecture: str
    facts: CacheFacts | None = None
    results: tuple[ProbeResult, ...] = ()
    problem: str = ""
    code: ModelCode | None = None
