"""Rows with drafts on an engine, played to their ends and compared with the same rows without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import DecodeRow, PrefillChunk, SampledToken, StepPlan, StepResult
from machd_probes.play import DraftSchedule, Join, play
from machd_probes.scripts import Script
from support.engines.oracle import Answers, Oracle, WatchedEngine
from support.engines.parity import differences
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import TinyKind

DRAFT_TOKENS = 4


def always(_step: int, _rows: int) -> int:
    """Allow drafts for every row."""
    return DRAFT_TOKENS


def if_alone(_step: int, rows: int) -> int:
    """Allow drafts for a row that runs alone."""
    return DRAFT_TOKENS if rows == 1 else 0


class DraftedScripts:
    """An engine on which scripts are played with an oracle's drafts.

    Attributes:
        oracle: Right at seven places of ten by default.
    """

    def __init__(
        self, kind: TinyKind, *, looks_ahead: bool = False, kv_format: str = "none"
    ) -> None:
        """Make the engine."""
        self._alone = alone(kind, kv_format)
        self.oracle = Oracle({}, 7)
        model = loaded(kind, kv_format)
        self.engine = WatchedEngine(model, self.oracle, looks_ahead=looks_ahead)

    def differences(self, script: Script, drafts: DraftSchedule) -> list[str]:
        """Return where the script's rows differ from the same rows alone; the engine is empty afterwards."""
        self.oracle.answers = self._answers(script)
        self.engine.forget()
        said = play(
            self.engine,
            script.joins,
            slots=script.slots,
            prefills_alone=script.prefills_alone,
            drafts=drafts,
        )
        assert self.engine.draft_faults == []
        assert self.engine.memory().kv_used_bytes == 0
        assert self.oracle.open_rows == 0
        return self._alone.differences(script, said)

    def _answers(self, script: Script) -> Answers:
        """Return each row's answer alone; of rows that differ only in length, the longest."""
        rows = sorted(script.joins, key=lambda row: row.given_tokens)
        return {
            (row.prompt, row.sampling): [one.token_id for one in self._alone.tokens(row)]
            for row in rows
        }


@dataclass
class Said:
    """The results of rows that began together.

    Attributes:
        tokens: Each row's tokens up to its end of text.
        faults: Causes of failed rows, by slot.
        results: The results of all steps.
    """

    tokens: list[list[SampledToken]]
    faults: dict[int, BaseException] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)

    @property
    def token_ids(self) -> list[list[int]]:
        """Token ids of each row."""
        return [[token.token_id for token in tokens] for tokens in self.tokens]

    @property
    def accepted_tokens(self) -> int:
        """Number of accepted drafts of all rows."""
        return sum(one.accepted_tokens for result in self.results for one in result.drafts)

    @property
    def draft_faults(self) -> list[int]:
        """Slots of rows whose proposer failed."""
        return [one.slot_index for result in self.results for one in result.draft_faults]


def say(
    engine: Engine,
    joins: Sequence[Join],
    draft_tokens: int = 0,
    *,
    is_end: Callable[[SampledToken], bool] | None = None,
) -> Said:
    """Prefill all rows in one step, then decode until each has ended, failed or reached its length.

    Args:
        engine: An engine without rows; it is left without rows.
        joins: Rows by slot; their times of joining and leaving are ignored.
        draft_tokens: Drafts that each row is allowed in a step.
        is_end: Tells whether a token ends its row; the model's end-of-text tokens unless given.
    """
    ends = is_end or (lambda token: token.token_id in engine.model.eos_token_ids)
    said = Said([[] for _ in joins])
    running = set(range(len(joins)))
    release: tuple[int, ...] = ()
    chunks = tuple(_whole(slot_index, join) for slot_index, join in enumerate(joins))
    while running or release:
        decode = () if chunks else tuple(DecodeRow(row, draft_tokens) for row in sorted(running))
        result = engine.run(StepPlan(release, chunks, decode))
        said.results.append(result)
        release, chunks = (), ()
        for token in result.tokens:
            row = token.slot_index
            if row in running:
                said.tokens[row].append(token)
                if ends(token) or len(said.tokens[row]) == joins[row].tokens:
                    running.discard(row)
                    release += (row,)
        for fault in result.faults:
            said.faults[fault.slot_index] = fault.cause
            running.discard(fault.slot_index)
            release += (fault.slot_index,)
    return said


def constrained_differences(plain: Said, drafted: Said, joins: Sequence[Join]) -> list[str]:
    """Return where rows that began together differ with drafts and without."""
    found = [f"faults {plain.faults} and {drafted.faults}"] if drafted.faults else []
    for number, join in enumerate(joins):
        pair = plain.tokens[number], drafted.tokens[number]
        found += [f"row {number}: {one}" for one in differences(*pair, join.sampling)]
    return found


def _whole(slot_index: int, join: Join) -> PrefillChunk:
    return PrefillChunk(
        slot_index,
        join.prompt,
        start=0,
        is_last=True,
        sampling=join.sampling,
        reserved_tokens=len(join.prompt) + join.tokens,
        lane=join.lane,
        shared=join.shared,
    )
