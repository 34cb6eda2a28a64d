"""What a bench has measured so far, and the report that it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from msgspec.structs import replace

from machd.bench.ceiling import CeilingAnswer
from machd.bench.coalescing import CoalescingFigures
from machd.bench.figures import LevelFigures, ceilings_of
from machd.bench.goals import goals_of
from machd.bench.guarantees.figures import GuaranteeFigures
from machd.bench.level import LevelTimings
from machd.bench.long_prompt import LongPromptFigures
from machd.bench.machine import MachineFacts
from machd.bench.model_facts import ModelFacts
from machd.bench.modes import STATIC, Mode
from machd.bench.plan import BenchPlan
from machd.bench.prefix.figures import PrefixFigures
from machd.bench.report import BenchReport, ServerFigures, WorkloadFacts
from machd.bench.server import ServerProcess
from machd.bench.speculation.figures import SpeculationFigures
from machd.bench.staggered import StaggeredTimings, staggered_figures
from machd.bench.structured import StructuredFigures
from machd.bench.target import Dialect, Target


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
    """What grows while a bench runs."""

    started_unix_s: float
    machine: MachineFacts = field(default_factory=MachineFacts.read)
    subject: Subject | None = None
    levels: list[LevelTimings] = field(default_factory=list)
    bare: list[CeilingAnswer] = field(default_factory=list)
    staggered: list[StaggeredTimings] = field(default_factory=list)
    long_prompt: list[LongPromptFigures] = field(default_factory=list)
    coalescing: list[CoalescingFigures] = field(default_factory=list)
    structured: list[StructuredFigures] = field(default_factory=list)
    prefix: list[PrefixFigures] = field(default_factory=list)
    speculation: SpeculationFigures | None = None
    guarantees: list[GuaranteeFigures] = field(default_factory=list)
    servers: list[ServerFigures] = field(default_factory=list)

    def add_server(self, mode: Mode, server: ServerProcess, target: Target) -> None:
        """Note what a server is like that has given its last answer and still runs.

        Args:
            mode: How it was started.
            server: Its process.
            target: What it says of itself.

        Raises:
            EngineFaultError: It has ended.
        """
        ready_rss_bytes, end_rss_bytes = server.ready_rss_bytes, server.rss_bytes()
        weights_bytes = ModelFacts.of(target.model_id, target.capabilities).weights_bytes
        decode_mode = target.capabilities.decode_mode if target.capabilities else None
        self.servers.append(
            ServerFigures(
                mode=mode.name,
                decode_mode=decode_mode.active if decode_mode else None,
                decode_mode_reason=decode_mode.reason if decode_mode else None,
                start_to_ready_s=server.start_to_ready_s,
                ready_rss_bytes=ready_rss_bytes,
                end_rss_bytes=end_rss_bytes,
                ready_beyond_weights_bytes=_less(ready_rss_bytes, weights_bytes),
                end_beyond_weights_bytes=_less(end_rss_bytes, weights_bytes),
            )
        )

    def report(self, plan: BenchPlan, *, url: str | None) -> BenchReport:
        """Sum up."""
        assert self.subject is not None, "something was measured"
        workload, dialect = plan.workload, self.subject.dialect
        ceilings = ceilings_of(self.bare)
        started_at = datetime.fromtimestamp(self.started_unix_s, UTC)
        report = BenchReport(
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
            prefix=self.prefix,
            speculation=self.speculation,
            guarantees=self.guarantees,
            goals=[],
            servers=self.servers,
        )
        return replace(report, goals=goals_of(report))


def _less(rss_bytes: int, weights_bytes: int | None) -> int | None:
    return None if weights_bytes is None else rss_bytes - weights_bytes
