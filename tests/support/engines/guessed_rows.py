"""Rows with guesses on an engine, played to their ends and compared with the same rows without."""

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

GUESSES = 4


def always(_step: int, _rows: int) -> int:
    """As many rows as there may be are guessed for."""
    return GUESSES


def if_alone(_step: int, rows: int) -> int:
    """A lonely row is guessed for."""
    return GUESSES if rows == 1 else 0


class GuessedScripts:
    """An engine on which scripts are played with an oracle's guesses.

    Attributes:
        oracle: Right at seven places of ten, unless told otherwise.
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
        """Return where the script's rows said something else than alone; all of them are gone again."""
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
        """Of rows that differ in nothing but their length, the longest."""
        rows = sorted(script.joins, key=lambda row: row.given_tokens)
        return {
            (row.prompt, row.sampling): [one.token_id for one in self._alone.tokens(row)]
            for row in rows
        }


@dataclass
class Said:
    """The outcome of rows that began together.

    Attributes:
        tokens: Of each row, up to its end of text.
        faults: Of rows that failed.
        results: Of all steps.
    """

    tokens: list[list[SampledToken]]
    faults: dict[int, BaseException] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)

    @property
    def token_ids(self) -> list[list[int]]:
        """Of each row."""
        return [[token.token_id for token in tokens] for tokens in self.tokens]

    @property
    def accepted_tokens(self) -> int:
        """Guesses that were right."""
        return sum(one.accepted_tokens for result in self.results for one in result.drafts)

    @property
    def draft_faults(self) -> list[int]:
        """Slots of rows for which guessing failed."""
        return [one.slot_index for result in self.results for one in result.draft_faults]


def say(
    engine: Engine,
    joins: Sequence[Join],
    guesses: int = 0,
    *,
    is_end: Callable[[SampledToken], bool] | None = None,
) -> Said:
    """Prefill all rows in one step, then decode until each has ended, failed or has enough.

    Args:
        engine: With no rows; it is left with none.
        joins: Rows, by slot; how they come and go counts for nothing.
        guesses: That are allowed for each row.
        is_end: What ends a row; what the model says at the end of a text unless given.
    """
    ends = is_end or (lambda token: token.token_id in engine.model.eos_token_ids)
    said = Said([[] for _ in joins])
    running = set(range(len(joins)))
    release: tuple[int, ...] = ()
    chunks = tuple(_whole(slot_index, join) for slot_index, join in enumerate(joins))
    while running or release:
        decode = () if chunks else tuple(DecodeRow(row, guesses) for row in sorted(running))
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


def constrained_differences(plain: Said, guessed: Said, joins: Sequence[Join]) -> list[str]:
    """Return where rows that began together said something else with guesses than without."""
    found = [f"faults {plain.faults} and {guessed.faults}"] if guessed.faults else []
    for number, join in enumerate(joins):
        pair = plain.tokens[number], guessed.tokens[number]
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
