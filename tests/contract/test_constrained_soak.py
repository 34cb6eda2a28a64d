"""Rows with grammars, thoughts and penalties that come and go say what they say alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from support.engines.constrained_rows import run_rows, schema_grammar
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import TinyKind

from machd.engine.assembly import make_engine
from machd.engine.protocol.step import DecodeRow, PrefillChunk, StepPlan
from machd.request.generation import Grammar, SamplingParams, Thinking

SCHEMAS: tuple[dict[str, object], ...] = (
    {
        "type": "object",
        "properties": {"a_long_key_name": {"type": "boolean"}, "b": {"enum": ["xx", "yyyy"]}},
        "required": ["a_long_key_name", "b"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "k": {"type": "integer", "minimum": 0, "maximum": 99},
            "const_key": {"const": "hello"},
        },
        "required": ["k", "const_key"],
        "additionalProperties": False,
    },
)
SLOTS = 6
STEPS = 70


@dataclass
class _Row:
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    said: list[int] = field(default_factory=list)


def _row(random_: random.Random, grammars: list[Grammar], vocabulary_tokens: int) -> _Row:
    draw = random_.random
    thinking = Thinking((5, 6), (7, 8), draw() < 0.5, random_.choice([0, 2, 4]))
    params = SamplingParams(
        temperature=random_.choice([0.0, 1.0]),
        seed=random_.randrange(1000),
        frequency_penalty=0.7 if draw() < 0.3 else 0.0,
        top_logprobs=2 if draw() < 0.2 else None,
        grammar=random_.choice(grammars) if draw() < 0.7 else None,
        thinking=thinking if draw() < 0.3 else None,
    )
    prompt = tuple(
        random_.randrange(10, vocabulary_tokens - 20) for _ in range(random_.randrange(1, 12))
    )
    return _Row(prompt, params, random_.randrange(1, 40))


@pytest.mark.parametrize(
    ("kind", "looks_ahead"),
    [
        (TinyKind.STANDARD, True),
        (TinyKind.ROTATING, False),
        pytest.param(TinyKind.STANDARD, False, marks=pytest.mark.long),
        pytest.param(TinyKind.ROTATING, True, marks=pytest.mark.long),
    ],
)
def test_constrained_rows_that_come_and_go_say_what_they_say_alone(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """A row's tokens are those it has alone, whatever rows join, end or are aborted beside it."""
    random_ = random.Random(f"{kind}")
    engine = make_engine(loaded(kind), looks_ahead=looks_ahead)
    reference = make_engine(loaded(kind), looks_ahead=False)
    eos = engine.model.eos_token_ids
    grammars = [schema_grammar(engine, schema) for schema in SCHEMAS]
    live: dict[int, _Row] = {}
    done: list[_Row] = []
    release: tuple[int, ...] = ()
    for _ in range(STEPS):
        joining: dict[int, _Row] = {}
        for slot in [one for one in range(SLOTS) if one not in live][
            : random_.choice([0, 0, 1, 2])
        ]:
            joining[slot] = _row(random_, grammars, engine.model.vocabulary_tokens)
        result = engine.run(
            StepPlan(
                release,
                tuple(
                    PrefillChunk(
                        slot,
                        row.prompt,
                        0,
                        is_last=True,
                        sampling=row.params,
                        reserved_tokens=len(row.prompt) + row.max_tokens,
                    )
                    for slot, row in joining.items()
                ),
                tuple(DecodeRow(slot) for slot in sorted(live)),
            )
        )
        live |= joining
        assert not result.faults
        ended = {slot for slot in live if random_.random() < 0.03}
        for token in result.tokens:
            row = live[token.slot_index]
            if not row.said or (row.said[-1] not in eos and len(row.said) < row.max_tokens):
                row.said.append(token.token_id)
        ended |= {
            slot
            for slot, row in live.items()
            if row.said and (row.said[-1] in eos or len(row.said) >= row.max_tokens)
        }
        done += [live.pop(slot) for slot in ended]
        release = tuple(ended)
    assert len(done) > STEPS // 4
    for row in done:
        alone = run_rows(reference, [row.prompt], [row.params], max_tokens=row.max_tokens)
        said = [one for one in row.said if one not in eos]
        assert said == alone.tokens[0][: len(said)]
        if row.said and row.said[-1] in eos:
            assert said == alone.tokens[0]
