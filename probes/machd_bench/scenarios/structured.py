"""Answers that are held to JSON schemas, beside answers that are not: what do they cost the batch?

The schemas ask for more than the answers' tokens can hold, because a server may end such an answer
where its schema lets it: so all of them end at their number of tokens. No two schemas of a run are
alike, so compiling them is in it.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncGenerator, Mapping
from itertools import chain

from machd_bench.answer import Answer, all_gaps_s, tokens_per_second
from machd_bench.bench import Bench
from machd_bench.report import Goal, Row, percentiles
from machd_bench.scenario import BATCHED, Scenario

STREAMS = 16
_ROUNDS = 3
_FIGURE = "tokens/s of the mixed set over the plain one"
_GOAL = 0.85
_ITEM_TOKENS = 8
"""Fewer than any tokenizer takes for an item of 130 characters, with a dozen quotes in it."""


def format_of(name: str, max_tokens: int) -> dict[str, object]:
    """A schema that no answer of so many tokens fulfils; another name makes another schema."""
    item = {
        "type": "object",
        "properties": {
            name: {"type": "string", "minLength": 30, "maxLength": 60},
            "note": {"type": "string", "minLength": 60, "maxLength": 120},
            "count": {"type": "integer"},
        },
        "required": [name, "note", "count"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "minItems": max_tokens // _ITEM_TOKENS + 1, "items": item}
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


async def _ask_set(bench: Bench, name: str, *, mixed: bool) -> list[Answer]:
    """One set; of a mixed one, every other answer has a schema, the first among them."""
    prompts = bench.prompts(f"structured-{name}-{mixed}", STREAMS)
    fields: list[Mapping[str, object]] = [{}] * STREAMS
    if mixed:
        tokens = bench.plan.max_tokens
        for index in range(0, STREAMS, 2):
            # A name that neither this run nor one before it had: schemas are remembered, too.
            words = "_".join(map(str, prompts[index][:3]))
            fields[index] = {"response_format": format_of(f"{words}_{name}_{index}", tokens)}
    return await bench.ask_all(zip(prompts, fields, strict=True))


async def _structured(bench: Bench) -> AsyncGenerator[Row]:
    # A width's first batch costs more than the others, and so does a server's first schema.
    await _ask_set(bench, "warm-up", mixed=True)
    plain: list[list[Answer]] = []
    mixed: list[list[Answer]] = []
    for number in range(_ROUNDS):
        plain.append(await _ask_set(bench, str(number), mixed=False))
        mixed.append(await _ask_set(bench, str(number), mixed=True))
    speeds = [
        (tokens_per_second(one), tokens_per_second(other))
        for one, other in zip(plain, mixed, strict=True)
    ]
    ratio = statistics.median(other / one for one, other in speeds)
    kept = min(sum(one.text.lstrip().startswith("[") for one in answers[::2]) for answers in mixed)
    yield Row(
        case=f"{STREAMS // 2} of {STREAMS} with schemas",
        figures={
            "plain_tps": statistics.median(one for one, _ in speeds),
            "mixed_tps": statistics.median(other for _, other in speeds),
            "ratio": ratio,
            **percentiles("plain_gap", all_gaps_s(chain(*plain))),
            **percentiles(
                "beside_gap", all_gaps_s(one for answers in mixed for one in answers[1::2])
            ),
            "kept": kept,
            "requests": sum(map(len, plain + mixed)),
            "completion_tokens": sum(one.completion_tokens for one in chain(*plain, *mixed)),
        },
        # A server that ignores schemas shows nothing.
        goals=[Goal.judge(_FIGURE, "at least", _GOAL, ratio, shown=kept > 0)],
    )


STRUCTURED = Scenario(
    name="structured",
    about="plain completions, then as many with a JSON schema for every other one; kept: answers of"
    " those that began as their schemas want",
    run=_structured,
    modes=BATCHED,
    columns=("plain_tps", "mixed_tps", "ratio", "plain_gap_p50_s", "beside_gap_p50_s", "kept"),
    streams=lambda _plan: STREAMS,
    requests=lambda _plan: (2 * _ROUNDS + 1) * STREAMS,
)
