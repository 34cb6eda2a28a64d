"""Rows of a batch verify draft tokens together, and each rolls back its own rejected ones."""

from __future__ import annotations

from machd.capabilities.batching_rules import batched_specdec
from machd.capabilities.evidence import Evidence
from machd.capabilities.verdict import Support
from machd.engine.assembly import make_engine
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.loader import LoadedModel
from machd.engine.protocol.step import StepPlan, StepResult
from machd.engine.step.mlx_engine import MlxEngine
from machd_probes.bounded import Watch, WatchedEngine
from machd_probes.comparison import compared
from machd_probes.finding import Finding, no_data, unsupported
from machd_probes.known_drafts import KnownDrafts
from machd_probes.play import play
from machd_probes.scripts import scripts
from machd_probes.subject import Subject

_DRAFT_TOKENS = 3
_SCRIPTS = ("early leaves", "down to one and up again")


def probe(subject: Subject) -> Finding:
    """Compare rows that join and leave, each with its own number of accepted drafts, with rows alone."""
    if batched_specdec(subject.description.cache).support is Support.BLOCKED:
        return unsupported("these caches cannot roll back one row of several")
    every = scripts(subject.prompts, subject.extent.tokens)
    rows = {name: [subject.forced(row) for row in every[name].joins] for name in _SCRIPTS}
    answers = {
        row.prompt: [token.token_id for token in subject.alone(row)]
        for joins in rows.values()
        for row in sorted(joins, key=lambda one: one.given_tokens)
    }
    vocabulary_tokens = subject.description.vocabulary_tokens
    model = LoadedModel(subject.module, FakeTokenizer(), subject.description)
    engine = _CountingEngine(
        make_engine(
            model,
            max_rows=max(map(len, rows.values())),
            proposer=KnownDrafts(answers, vocabulary_tokens),
        ),
        subject.watch,
    )
    parts: list[Evidence] = []
    for name, joins in rows.items():
        said = play(
            engine, joins, slots=every[name].slots, drafts=lambda _step, _rows: _DRAFT_TOKENS
        )
        parts += [
            compared(subject.alone(row), heard, subject.noise_floor)
            for row, heard in zip(joins, said, strict=True)
        ]
    if not engine.has_been_ragged:
        return no_data("no pass had rows with different numbers of accepted drafts")
    return subject.judged(parts, "rows that verify drafts together give other tokens than alone")


class _CountingEngine(WatchedEngine):
    """Records whether the rows of one pass accepted different numbers of draft tokens."""

    def __init__(self, engine: MlxEngine, watch: Watch) -> None:
        super().__init__(engine, watch)
        self.has_been_ragged = False

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        result = super().run(plan)
        self.has_been_ragged |= len({one.accepted_tokens for one in result.drafts}) > 1
        return result
