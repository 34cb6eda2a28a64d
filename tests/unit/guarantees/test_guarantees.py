"""Bodies that a daemon refuses or answers soon, and how their tries are judged."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.clients.measured_rows import PLAN, Unseen
from support.programs.fake_openai import FakeOpenAi

from machd.clock import SystemClock
from machd.errors import EngineFaultError
from machd.settings.model import LimitsSettings
from machd_bench.bench import Bench
from machd_bench.connection import Address
from machd_bench.report import Verdict
from machd_bench.server import Server
from machd_guarantees.guarantees import measure
from machd_guarantees.hostile_bodies import (
    Body,
    bad_schemas,
    heavy_bodies,
    heavy_conversations,
)


@pytest.mark.parametrize(
    ("tries", "worst_s", "verdict"),
    [
        ([0.2, 1.5, 0.4], 1.5, Verdict.MISSED),
        ([0.2, 1.0, 0.4], 1.0, Verdict.PASS),
        ([0.2, "no template", 0.4], None, Verdict.NOT_SHOWN),
    ],
)
async def test_the_worst_try_decides(
    tries: list[float | str], worst_s: float | None, verdict: Verdict
) -> None:
    """The goal is the most that a try may take; what cannot be measured is told."""
    bench, left = Bench(PLAN, SystemClock(), Unseen()), iter(tries)

    async def try_once() -> float | str:
        return next(left)

    row = await measure(bench, "a promise", 1.0, try_once)

    assert (row.figures["worst_s"], row.goals[0].verdict) == (worst_s, verdict)
    assert bench.notes == ["a promise: no template"] * (worst_s is None)


def test_heavy_bodies_are_nearly_as_large_as_a_body_may_be() -> None:
    """Each one is read whole by a daemon of default settings, which is what makes it heavy."""
    most_bytes = LimitsSettings().max_body_bytes
    for body in heavy_bodies("m") + heavy_conversations("m"):
        assert 0.7 * most_bytes < len(body.data) <= most_bytes, body.name


def test_bad_schemas_are_json_but_for_their_meaning() -> None:
    """A schema is refused for itself: the body around it is a valid request."""
    for body in bad_schemas("m"):
        fields, _, constraint = body.data.partition(b', "guided_')
        request = msgspec.json.decode(fields + b"}", type=dict[str, object])
        assert request.keys() == {"model", "prompt", "max_tokens"}, body.name
        assert constraint.startswith((b'json": {', b'regex": "', b'grammar": "')), body.name


async def test_a_body_that_is_accepted_ends_the_bench_unless_that_is_allowed() -> None:
    """A server that answers 200 to a malformed body is a fault, not a quick refusal."""
    data = json.dumps({"model": "first", "prompt": "a", "max_tokens": 2}).encode()
    async with FakeOpenAi().running() as url:
        server = await Server.find(Address.of(url), SystemClock())

        assert await Body("good", "/v1/completions", data, frozenset({200})).send(server) > 0
        with pytest.raises(EngineFaultError, match="good: HTTP 200"):
            await Body("good", "/v1/completions", data).send(server)
