"""Answers that are held to JSON schemas, beside answers that are not: what do they cost the batch?

In each round a set of plain completions runs, and then a set of which every other one has a schema
of its own. Prompts and answers are as long in both. The schemas ask for more than the answers'
tokens can hold, because a server may end such an answer where its schema lets it: so all of them
end at their number of tokens. No two schemas of a run are alike, so compiling them is in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import Struct

from machd.bench.client import ClientMaker
from machd.bench.level import together
from machd.bench.statistics import Distribution
from machd.bench.timing import RequestTiming, wall_s
from machd.bench.workload import Workload
from machd.errors import EngineFaultError

STRUCTURED_GOAL = 0.85
"""The least tokens/s of the mixed set, over the plain one's."""

STRUCTURED_STREAMS = 16
_EVERY = 2
"""One of so many in a mixed set has a schema."""
_ROUNDS = 3
STRUCTURED_REQUESTS = _ROUNDS * 2 * STRUCTURED_STREAMS
_WARM_UP_TOKENS = 3

_ITEM_TOKENS = 8
"""Fewer than any tokenizer takes for an item of 130 characters, with a dozen quotes in it."""


@dataclass(frozen=True, slots=True)
class StructuredRound:
    """What the clients of a round noted.

    Attributes:
        plain: Answers of the set without schemas.
        beside: Answers without a schema of the mixed set.
        constrained: Answers with one.
    """

    plain: tuple[RequestTiming, ...]
    beside: tuple[RequestTiming, ...]
    constrained: tuple[RequestTiming, ...]

    @property
    def mixed(self) -> tuple[RequestTiming, ...]:
        """All answers of the mixed set."""
        return self.beside + self.constrained


class StructuredFigures(Struct, frozen=True, kw_only=True):
    """Plain completions against as many of which some are held to schemas.

    Attributes:
        streams: Completions of a set, sent together.
        constrained: How many of a mixed set have a schema, each another one.
        requests: Of all rounds and both sets.
        completion_tokens: Of all of them.
        plain_tps: Completion tokens of a plain set over the time from sending its first request
            to its last token; the median of the rounds.
        mixed_tps: The same of a mixed set.
        ratio: A round's ``mixed_tps`` over its ``plain_tps``; the median of the rounds.
        plain_itl: Gaps between tokens of the plain sets; None where answers have one token.
        mixed_itl: Gaps of those answers of the mixed sets that have no schema.
        kept: How many of a set's constrained answers began as their schemas want; the least of all
            rounds. A server that does not know the field answers with any text.
    """

    mode: str
    streams: int
    constrained: int
    rounds: int
    requests: int
    completion_tokens: int
    plain_tps: float
    mixed_tps: float
    ratio: float
    plain_itl: Distribution | None
    mixed_itl: Distribution | None
    kept: int

    @classmethod
    def of(cls, mode: str, rounds: Sequence[StructuredRound]) -> StructuredFigures:
        """Sum up; at least one round."""
        speeds = [(_tps(one.plain), _tps(one.mixed)) for one in rounds]
        answers = [answer for one in rounds for answer in one.plain + one.mixed]
        return cls(
            mode=mode,
            streams=len(rounds[0].plain),
            constrained=len(rounds[0].constrained),
            rounds=len(rounds),
            requests=len(answers),
            completion_tokens=sum(one.completion_tokens for one in answers),
            plain_tps=statistics.median(plain for plain, _ in speeds),
            mixed_tps=statistics.median(mixed for _, mixed in speeds),
            ratio=statistics.median(mixed / plain for plain, mixed in speeds),
            plain_itl=_gaps(answer for one in rounds for answer in one.plain),
            mixed_itl=_gaps(answer for one in rounds for answer in one.beside),
            kept=min(sum(map(_is_kept, one.constrained)) for one in rounds),
        )


def schema_of(name: str, max_tokens: int) -> dict[str, object]:
    """A schema that no answer of so many tokens fulfils.

    Args:
        name: Of a property; schemas of other names are other schemas.
        max_tokens: Of the answer.
    """
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
    return {"type": "array", "minItems": max_tokens // _ITEM_TOKENS + 1, "items": item}


async def run_structured(
    make_client: ClientMaker,
    workload: Workload,
    *,
    mode: str,
    on_request: Callable[[], None],
) -> StructuredFigures:
    """Send a plain set and a mixed one, a few times.

    Raises:
        EngineFaultError: One of them was not answered; the message names the scenario.
    """
    asking = _Asking(make_client, workload, on_request)
    try:
        # A width's first batch costs more than the others, and so does a server's first schema.
        warm_up = _Asking(make_client, workload, lambda: None)
        await warm_up.mixed("warm-up", _WARM_UP_TOKENS)
        rounds = [await _round(asking, str(number)) for number in range(_ROUNDS)]
    except EngineFaultError as error:
        message = f"the scenario structured, which sends guided_json: {error}"
        raise EngineFaultError(message) from error
    return StructuredFigures.of(mode, rounds)


@dataclass(frozen=True, slots=True)
class _Asking:
    """Sends sets of requests."""

    make_client: ClientMaker
    workload: Workload
    on_request: Callable[[], None]

    async def plain(self, name: str) -> list[RequestTiming]:
        """A set without schemas, in its requests' order."""
        schemas = [None] * STRUCTURED_STREAMS
        return await self._send(f"structured-plain-{name}", self.workload.max_tokens, schemas)

    async def mixed(self, name: str, max_tokens: int) -> list[RequestTiming]:
        """A set of which every other one has a schema, the first among them, in their order."""
        schemas = [
            None if index % _EVERY else schema_of(self._property(name, index), max_tokens)
            for index in range(STRUCTURED_STREAMS)
        ]
        return await self._send(f"structured-mixed-{name}", max_tokens, schemas)

    def _property(self, name: str, index: int) -> str:
        """A name that neither this run nor one before it had: schemas are remembered, too."""
        words = self.workload.prompt(f"structured-schema-{name}", index, tokens=3)
        return f"{words.replace(' ', '_')}_{index}"

    async def _send(
        self, series: str, max_tokens: int, schemas: Sequence[Mapping[str, object] | None]
    ) -> list[RequestTiming]:
        answers: dict[int, RequestTiming] = {}

        async def ask(index: int, prompt: str, schema: Mapping[str, object] | None) -> None:
            async with aclosing(self.make_client()) as client:
                answers[index] = await client.complete(prompt, max_tokens, schema=schema)
                self.on_request()

        prompts = self.workload.prompts(series, len(schemas))
        pairs = zip(prompts, schemas, strict=True)
        await together(ask(index, *pair) for index, pair in enumerate(pairs))
        return [answers[index] for index in sorted(answers)]


async def _round(asking: _Asking, name: str) -> StructuredRound:
    plain = await asking.plain(name)
    mixed = await asking.mixed(name, asking.workload.max_tokens)
    constrained = tuple(mixed[::_EVERY])
    beside = tuple(one for index, one in enumerate(mixed) if index % _EVERY)
    return StructuredRound(tuple(plain), beside, constrained)


def _tps(answers: Sequence[RequestTiming]) -> float:
    return sum(one.completion_tokens for one in answers) / wall_s(answers)


def _gaps(answers: Iterable[RequestTiming]) -> Distribution | None:
    return Distribution.of(gap for one in answers for gap in one.gaps_s)


def _is_kept(answer: RequestTiming) -> bool:
    return answer.text.lstrip().startswith("[")
