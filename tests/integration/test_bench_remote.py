"""``machd bench --url`` against a server of somebody else's: what it knows, what it tells."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.programs.fake_openai import FakeOpenAi

from machd.bench.client import CompletionClient
from machd.bench.connection import ServerAddress
from machd.bench.target import Dialect, Target, TargetHints
from machd.cli.bench import bench
from machd.clock import SystemClock
from machd.errors import EngineFaultError

SHORT = ("--requests", "3", "--prompt-tokens", "4", "--max-tokens", "5")


def run(*args: str) -> Result:
    """Run the command with errors of machd let through."""
    return CliRunner().invoke(bench, args, catch_exceptions=False)


async def test_a_server_that_knows_less_is_asked_for_less() -> None:
    """Without completions and without ignore_eos, chat without it is found."""
    server = FakeOpenAi(has_completions=False, refuses=frozenset({"ignore_eos"}))
    async with server.running() as url:
        target = await Target.find(ServerAddress.of(url), clock=SystemClock())

    assert target.model_id == "first"
    assert target.dialect == Dialect(is_chat=True, ignores_eos=False)
    assert target.capabilities is None
    completions, chat = "/v1/completions", "/v1/chat/completions"
    asked = [(path, "ignore_eos" in body, "stream_options" in body) for path, body in server.asked]
    assert asked == [
        (completions, True, True),
        (completions, False, True),
        (completions, False, False),
        (chat, True, True),
        (chat, False, True),
    ]


@pytest.mark.parametrize(
    "server",
    [
        FakeOpenAi(),
        FakeOpenAi(sends_usage=False),
        FakeOpenAi(refuses=frozenset({"stream_options", "ignore_eos"})),
    ],
    ids=["usage", "silent", "refused"],
)
async def test_tokens_are_counted_whatever_a_server_tells(server: FakeOpenAi) -> None:
    """By usage where it is sent, by events with text where it is not."""
    async with server.running() as url:
        target = await Target.find(ServerAddress.of(url), clock=SystemClock())
        client = CompletionClient(target, SystemClock())
        timing = await client.complete("one two three", 9)
        await client.aclose()

    assert timing.completion_tokens == 9
    assert len(timing.gaps_s) <= 8
    assert timing.prompt_tokens in {0, 3}


async def test_a_person_may_name_the_model_and_more_fields() -> None:
    """Both are in every request, over what the bench sends by itself."""
    server = FakeOpenAi()
    hints = TargetHints(model_id="second", extra={"logit_bias": {"2": -100}, "temperature": 0.5})
    async with server.running() as url:
        await Target.find(ServerAddress.of(url), clock=SystemClock(), hints=hints)

    ((_, body),) = server.asked
    assert (body["model"], body["temperature"]) == ("second", 0.5)
    assert body["logit_bias"] == {"2": -100}


async def test_every_scenario_runs_against_any_server(tmp_path: Path) -> None:
    """A server of somebody else's gets all of them; what it does not do shows as such."""
    path = tmp_path / "bench.json"
    names = "sweep,staggered,long-prompt,coalescing,structured"
    async with FakeOpenAi(step_s=0.005).running() as url:
        result = await asyncio.to_thread(
            run,
            *("--url", url, "--scenarios", names, "--concurrency", "1,4", *SHORT),
            *("--long-prompt-tokens", "50", "--json", str(path)),
        )

    assert result.exit_code == 0, result.output
    report = json.loads(path.read_bytes())
    assert [level["completion_tokens"] for level in report["levels"]] == [15, 20]
    (staggered,) = report["staggered"]
    (long_prompt,) = report["long_prompt"]
    (coalescing,) = report["coalescing"]
    assert (staggered["mode"], staggered["requests"]) == ("remote", 8)
    assert staggered["static_ttft_ratio"] is None
    assert (long_prompt["streams"], long_prompt["prompt_tokens"]) == (8, 50)
    assert (coalescing["copies"], coalescing["coalesced"]) == (3, 0)
    (structured,) = report["structured"]
    assert (structured["streams"], structured["requests"]) == (16, 96)
    assert structured["completion_tokens"] == 96 * 5
    assert (structured["constrained"], structured["kept"]) == (8, 0)


async def test_a_server_without_schemas_is_told_as_one() -> None:
    """Its refusal ends the bench and names the scenario that asked for them."""
    async with FakeOpenAi(refuses=frozenset({"guided_json"})).running() as url:
        with pytest.raises(EngineFaultError, match=r"structured, .* guided_json: .*HTTP 400"):
            await asyncio.to_thread(run, "--url", url, "--scenarios", "structured", *SHORT)
