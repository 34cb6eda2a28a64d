"""Rows with grammars, run on any engine without a scheduler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import DecodeRow, PrefillChunk, StepPlan
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import Grammar, SamplingParams


def grammar_of(engine: Engine, kind: ConstraintKind, source: str) -> Grammar:
    """A compiled constraint."""
    return engine.grammars.compile(Constraint(kind, source, "test"))


def many_readings(ways: int) -> str:
    """A grammar of which a text of a few letters has countless readings."""
    ways_of_s = " | ".join(f"s x{i} s" for i in range(ways))
    return f's: {ways_of_s} | "a"\nstart: s\n' + "\n".join(f'x{i}: "a"? | s' for i in range(ways))


def schema_grammar(engine: Engine, schema: object) -> Grammar:
    """A compiled JSON schema."""
    return grammar_of(engine, ConstraintKind.JSON_SCHEMA, json.dumps(schema))


@dataclass
class Run:
    """The outcome of rows that ran together.

    Attributes:
        tokens: Of each row, the end token left out.
        steps: Passes that decoded.
        faults: Of each row that failed.
    """

    tokens: list[list[int]]
    steps: int = 0
    faults: dict[int, BaseException] = field(default_factory=dict)

    def text(self, engine: Engine, row: int) -> str:
        """Return what a row says."""
        return engine.tokenizer.decode(self.tokens[row])


def run_rows(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    *,
    max_tokens: int = 96,
) -> Run:
    """Prefill all rows in one step, then decode until each has ended, failed or has enough."""
    run = Run([[] for _ in prompts])
    running = set(range(len(prompts)))
    release: tuple[int, ...] = ()
    chunks = tuple(
        PrefillChunk(
            row, prompt, 0, is_last=True, sampling=one, reserved_tokens=len(prompt) + max_tokens
        )
        for row, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    )
    while running or release:
        decode = () if chunks else tuple(DecodeRow(row) for row in sorted(running))
        result = engine.run(StepPlan(release, chunks, decode))
        release, chunks = (), ()
        run.steps += bool(decode)
        for token in result.tokens:
            row = token.slot_index
            if row in running:
                ended = token.token_id in engine.model.eos_token_ids
                if not ended:
                    run.tokens[row].append(token.token_id)
                if ended or len(run.tokens[row]) == max_tokens:
                    running.discard(row)
                    release += (row,)
        for fault in result.faults:
            run.faults[fault.slot_index] = fault.cause
            running.discard(fault.slot_index)
            release += (fault.slot_index,)
    return run
