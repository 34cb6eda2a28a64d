"""``machd bench --prefix`` as a command: what it runs, what it prints, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from unit.bench.caching_openai import CachingOpenAi

from machd.cli.bench import bench
from machd.clock import SystemClock

SHORT = ("--prefix", "--prefix-tokens", "60", "--users", "3", "--system-tokens", "40")
LIVE = ["1a", "1b", "1c", "1d", "2a", "2b", "3a"]


def run(*args: str) -> Result:
    """Run the command with errors of machd let through."""
    return CliRunner().invoke(bench, args, catch_exceptions=False)


async def test_a_server_at_a_url_is_asked_for_what_needs_no_restart(tmp_path: Path) -> None:
    """The rest is told as not measured, in the table and in the JSON."""
    path = tmp_path / "bench.json"
    async with CachingOpenAi().running() as url:
        result = await asyncio.to_thread(run, "--url", url, *SHORT, "--json", str(path))

    assert result.exit_code == 0, result.output
    report = json.loads(path.read_bytes())
    (prefix,) = report["prefix"]
    assert (report["url"], report["levels"], prefix["mode"]) == (url, [], "remote")
    assert [one["step"] for one in prefix["steps"]] == LIVE
    assert all(one["passed"] for one in prefix["steps"])
    assert prefix["latency"]["restarted"] is None
    assert prefix["sharing"]["users"] == 3
    assert (prefix["full_cache"], prefix["kv_formats"]) == (None, [])
    assert [one.split(":")[0] for one in prefix["skipped"]] == [
        "steps 4a and 4b, and times after a restart",
        "a full cache",
    ]
    assert "not measured: a full cache" in result.output
    assert result.output.count("PASS") == len(LIVE)


async def test_a_server_that_knows_nothing_of_it_is_judged_by_its_time(tmp_path: Path) -> None:
    """A chat server without counts, salts and stats gets the steps that it can be asked for."""
    path = tmp_path / "bench.json"
    server = CachingOpenAi(
        has_completions=False,
        tells=False,
        has_stats=False,
        has_tokens=False,
        keeps_prompts=False,
        refuses=frozenset({"cache_salt", "ignore_eos"}),
    )
    async with server.running() as url:
        result = await asyncio.to_thread(run, "--url", url, *SHORT, "--json", str(path))

    assert result.exit_code == 0, result.output
    (prefix,) = json.loads(path.read_bytes())["prefix"]
    assert [one["step"] for one in prefix["steps"]] == LIVE[:-1]
    assert {one["actual"] for one in prefix["steps"]} == {"UNKNOWN"}
    assert prefix["sharing"] is None
    assert "step 3a, and sharing" in prefix["skipped"][0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kv", "none,affine8"), "--kv belongs to --prefix"),
        (("--prefix", "--kv", "int8"), "'int8' is no format; there are: none, affine8"),
        (("--prefix", "--kv", "none", "--url", "http://h"), "--kv needs a server of the bench's"),
        (("--prefix", "--kv", "none", "--compare", "single"), "--compare continuous"),
        (("--prefix", "--compare", "static"), "the mode static has none"),
        (("--prefix", "--scenarios", "staggered"), "--prefix has no scenarios"),
        (("--prefix", "--users", "1"), "1 is not in the range"),
    ],
)
def test_bad_usage_is_told_before_anything_runs(args: tuple[str, ...], message: str) -> None:
    """Each mistake names itself and ends with exit code 2."""
    result = run(*args)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.long
def test_modes_formats_and_restarts_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command: every step passes, also from disk, and no block is left on it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    # The prompts' seed is the time. A random model's answer is nonsense, and some nonsense becomes
    # as many, but other tokens when it is read again: its next turn (2b) cannot find it.
    monkeypatch.setattr(SystemClock, "unix_s", lambda _: 1_700_000_000.0)
    model = write_tiny_llama(tmp_path / "tiny-llama")
    path = tmp_path / "bench.json"

    result = run(
        *(str(model), *SHORT, "--compare", "single,continuous", "--kv", "none,affine8"),
        *("--prompt-tokens", "8", "--max-tokens", "64", "--json", str(path)),
    )

    assert result.exit_code == 0, result.output
    report = json.loads(path.read_bytes())
    single, continuous = report["prefix"]
    assert [one["mode"] for one in report["servers"]] == ["single", "continuous"]
    for prefix in (single, continuous):
        assert [one["step"] for one in prefix["steps"]] == [*LIVE, "4a", "4b"]
        assert [one for one in prefix["steps"] if not one["passed"]] == []
        assert [one["actual"] for one in prefix["steps"]] == [
            one["expected"] for one in prefix["steps"]
        ]
        assert prefix["latency"]["restarted"]["count"] == 2
        assert prefix["sharing"]["shared"]["added_bytes"] > 0
        assert prefix["sharing"]["saved_share"] > 0.3
        full = prefix["full_cache"]
        assert (full["prompt_tokens"], full["pairs"]) == (60, 8)
        assert full["evictions"] > 0
        assert full["highest_bytes"] <= full["limit_bytes"]
        assert full["full_rss_bytes"] > full["limit_bytes"]
        assert prefix["skipped"] == []
    none, affine8 = continuous["kv_formats"]
    assert single["kv_formats"] == []
    assert [one["decode_mode"] for one in (none, affine8)] == ["batched", "batched"]
    assert none["completion_tokens"] == affine8["completion_tokens"] == 3 * 16 * 64
    assert affine8["rows_ratio"] > 1.5
    assert result.output.index("not judged") < result.output.index("full cache")
    assert list((tmp_path / "scratch").iterdir()) == []
