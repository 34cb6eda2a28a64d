"""What a bench has measured so far, and the report that it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from machd.bench.ceiling import CeilingAnswer
from machd.bench.coalescing import CoalescingFigures
from machd.bench.figures import LevelFigures, ceilings_of
from machd.bench.level import LevelTimings
from machd.bench.long_prompt import LongPromptFigures
from machd.bench.machine import MachineFacts
from machd.bench.model_facts import ModelFacts
from machd.bench.modes import STATIC
from machd.bench.plan import BenchPlan
from machd.bench.report import BenchReport, ServerFigures, WorkloadFacts
from machd.bench.staggered import StaggeredTimings, staggered_figures
from machd.bench.structured import StructuredFigures
from machd.bench.target import Dialect, Target

__all__ = ["Collected", "Subject"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured.

    Attributes:
        dialect: How it was asked; None where no server was.
    """

    model: ModelFacts
    dialect: Dialect | None

    @classmethod
    def of(cls, target: Target) -> Subject:
        """A server."""
        return cls(ModelFacts.of(target.model_id, target.capabilities), target.dialect)


@dataclass(slots=True)
class Collected:
    """Lists that grow while a bench runs."""

    started_unix_s: float
    machine: MachineFacts = field(default_factory=MachineFacts.read)
    subject: Subject | None = None
    levels: list[LevelTimings] = field(default_factory=list)
    bare: list[CeilingAnswer] = field(default_factory=list)
    staggered: list[StaggeredTimings] = field(default_factory=list)
    long_prompt: list[LongPromptFigures] = field(default_factory=list)
    coalescing: list[CoalescingFigures] = field(default_factory=list)
    structured: list[StructuredFigures] = field(default_factory=list)
    servers: list[ServerFigures] = field(default_factory=list)

    def report(self, plan: BenchPlan, *, url: str | None) -> BenchReport:
        """Sum up."""
        assert self.subject is not None, "something was measured"
        workload, dialect = plan.workload, self.subject.dialect
        ceilings = ceilings_of(self.bare)
        started_at = datetime.fromtimestamp(self.started_unix_s, UTC)
        return BenchReport(
            started_at=started_at.isoformat(timespec="seconds"),
            url=url,
            machine=self.machine,
            model=self.subject.model,
            workload=WorkloadFacts(
                requests=workload.requests,
                prompt_tokens=workload.prompt_tokens,
                max_tokens=workload.max_tokens,
                seed=workload.seed,
                endpoint=dialect.path if dialect else None,
                ignores_eos=dialect.ignores_eos if dialect else True,
            ),
            levels=[LevelFigures.of(level, ceilings) for level in self.levels],
            ceilings=ceilings,
            staggered=staggered_figures(self.staggered, plan.arrivals, static=STATIC.name),
            long_prompt=self.long_prompt,
            coalescing=self.coalescing,
            structured=self.structured,
            servers=self.servers,
        )
