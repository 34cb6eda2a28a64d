"""``machd ctl cache`` as operators use it: the real command against a running daemon."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from admin_daemon import AdminDaemon
from dialogue import completion, told
from serve_process import run_machd

from machd.engine.fake import FakeEngine

LONG = "A system prompt that every one of these requests begins with, whatever it asks. "


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[AdminDaemon]:
    """One with room for prompts."""
    flags = {"cache.memory_mb": 100}
    with AdminDaemon(tmp_path, lambda: FakeEngine(told), flags) as running:
        yield running


def _ctl(
    daemon: AdminDaemon, *arguments: str, code: int = 0, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    address = daemon.admin_url.removeprefix("http://")
    command = ["ctl", "--address", address, "cache", *arguments]
    done = run_machd(command, daemon.environ, stdin=stdin)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def _cached(daemon: AdminDaemon, text: str, **fields: object) -> int:
    body = completion(text, max_tokens=1, **fields)
    usage = daemon.http.post("/v1/completions", json=body).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def _lines(path: Path, *lines: object) -> str:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    return str(path)


def test_prompts_of_a_file_are_warmed(daemon: AdminDaemon, tmp_path: Path) -> None:
    """Texts and conversations; the table has a line for each and one for all, in 80 columns."""
    turns = [{"role": "system", "content": LONG}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    file = _lines(
        tmp_path / "prompts.jsonl", LONG, {"prompt": LONG}, {"messages": turns, "tools": tools}
    )
    (tmp_path / "prompts.jsonl").write_text(f"\n{Path(file).read_text()}\n")
    head, *rows = _ctl(daemon, "warm", file).stdout.splitlines()
    assert head.split() == ["PROMPT", "TOKENS", "CACHED", "TIME"]
    assert [row.split()[0] for row in rows] == ["line", "line", "line", "all"]
    assert rows[0].split()[:4] == ["line", "2", str(len(LONG)), "0"]
    assert rows[1].split()[:4] == ["line", "3", str(len(LONG)), str(len(LONG) - 1)]
    assert all(len(row) <= 80 for row in (head, *rows))
    assert _cached(daemon, LONG) == len(LONG) - 1


def test_a_program_reads_what_came_of_them(daemon: AdminDaemon, tmp_path: Path) -> None:
    """The daemon's answers as one, and for whom they are warmed reaches it."""
    file = _lines(tmp_path / "prompts.jsonl", LONG, "other")
    options = ("--client", "anonymous", "--cache-salt", "s", "--json")
    warmed = json.loads(_ctl(daemon, "warm", file, *options).stdout)
    assert [one["prompt_tokens"] for one in warmed["prompts"]] == [len(LONG), 5]
    assert (warmed["failed"], warmed["prompt_tokens"]) == (0, len(LONG) + 5)
    assert _cached(daemon, LONG) == 0
    assert _cached(daemon, LONG, cache_salt="s") == len(LONG) - 1


def test_standard_input_is_a_file_too(daemon: AdminDaemon) -> None:
    """Named by a dash."""
    _ctl(daemon, "warm", "-", stdin=json.dumps(LONG))
    assert _cached(daemon, LONG) == len(LONG) - 1


def test_bad_lines_are_all_named_before_anything_is_sent(
    daemon: AdminDaemon, tmp_path: Path
) -> None:
    """By number, quoting nothing, with the code for a wrong input; the good ones are not sent."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('"good"\n{}\n\nxyzzy\n{"prompt": 1}\n["a"]\n')
    stderr = _ctl(daemon, "warm", str(path), code=2).stderr
    assert [line.split(":")[1].strip() for line in stderr.splitlines()] == [
        "line 2",
        "line 4",
        "line 5",
        "line 6",
    ]
    assert "xyzzy" not in stderr
    assert httpx.get(f"{daemon.daemon.url}/v1/cache/stats").json()["prefix"]["queries"] == 0
    path.write_text("\n")
    assert "holds no prompt" in _ctl(daemon, "warm", str(path), code=2).stderr
    _ctl(daemon, "warm", str(tmp_path / "nowhere"), code=2)


def test_a_prompt_that_fails_is_shown_and_counted(daemon: AdminDaemon, tmp_path: Path) -> None:
    """The others are warmed, and the code says that not all is well."""
    file = _lines(tmp_path / "prompts.jsonl", "x" * 5000, LONG)
    done = _ctl(daemon, "warm", file, code=1)
    assert "1 of 2 prompts failed" in done.stderr
    assert "4096" in done.stdout
    assert _cached(daemon, LONG) == len(LONG) - 1


def test_a_client_that_is_not_known(daemon: AdminDaemon, tmp_path: Path) -> None:
    """The daemon's refusal, and no table."""
    file = _lines(tmp_path / "prompts.jsonl", LONG)
    done = _ctl(daemon, "warm", file, "--client", "carol", code=1)
    assert (done.stdout, "no API key has this name" in done.stderr) == ("", True)


def test_what_is_kept_is_shown_and_cleared(daemon: AdminDaemon, tmp_path: Path) -> None:
    """The table and the JSON tell what the API tells; clearing says how much that was."""
    _ctl(daemon, "warm", _lines(tmp_path / "prompts.jsonl", LONG, LONG))
    stats = json.loads(_ctl(daemon, "stats", "--json").stdout)
    assert stats["prefix"] == daemon.http.get("/v1/cache/stats").json()["prefix"]
    table = _ctl(daemon, "stats").stdout
    assert "2 looked up: 1 found whole, 0 in part, 1 not" in table
    assert "0.1 MB of 100.0 MB in" in table
    assert all(len(line) <= 80 for line in table.splitlines())
    blocks = stats["prefix"]["blocks"]
    said = f"forgot 0 stored responses and {blocks} blocks of the prefix cache\n"
    assert _ctl(daemon, "clear").stdout == said
    cleared = json.loads(_ctl(daemon, "clear", "--disk", "--json").stdout)
    assert cleared == {"responses": {"count": 0, "size_bytes": 0}, "blocks": 0}


def test_without_a_cache_the_table_says_so(tmp_path: Path) -> None:
    """Off is off."""
    with AdminDaemon(tmp_path, FakeEngine, {"cache.prefix": False}) as daemon:
        table = _ctl(daemon, "stats").stdout
        assert ["prefix", "cache", "off"] in [line.split() for line in table.splitlines()]
