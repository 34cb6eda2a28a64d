"""``machd ctl cache`` as operators use it: the real command against a running daemon."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.forked_commands import run_machd
from support.engines.dialogue import completion, told
from support.engines.fake_blocks import FakeDisk
from support.engines.fake_engine import FakeEngine

from machd.admin.warming import WarmPrompt
from machd.cli.ctl_cache import _groups

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
    """The answers for all prompts are one document; client and salt reach the daemon."""
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
    path.write_text(
        '"good"\n{}\n\nxyzzy\n{"prompt": 1}\n["a"]\n{"messages": []}\n'
        '{"prompt": "a", "prmopt": "b"}\n{"prompt": "a", "client": "xyzzy", "cache_salt": "xyzzy"}\n'
    )
    stderr = _ctl(daemon, "warm", str(path), code=2).stderr
    assert [line.split(":")[1].strip() for line in stderr.splitlines()] == [
        "line 2",
        "line 4",
        "line 5",
        "line 6",
        "line 7",
        "line 8",
        "line 9",
    ]
    expected = "a JSON text or an object with prompt or messages is expected"
    assert [expected in line for line in stderr.splitlines()].count(True) == 2
    assert "messages is empty" in stderr
    assert "prmopt: not known; a prompt has prompt, or messages" in stderr
    assert "cache_salt, client: not known" in stderr
    assert "--client and --cache-salt of the command hold for the whole file" in stderr
    assert "xyzzy" not in stderr
    assert "The body" not in stderr
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
    """The daemon's refusal in the command's own words, and no table."""
    file = _lines(tmp_path / "prompts.jsonl", LONG)
    done = _ctl(daemon, "warm", file, "--client", "carol", code=1)
    assert (done.stdout, done.stderr) == ("", "machd: --client carol: no API key has this name\n")


def test_a_refusal_names_the_command_s_options(tmp_path: Path) -> None:
    """The error names the command's options, not the request's fields; a salt is not shown."""
    keys = tmp_path / "api-keys"
    keys.write_text("alice:k-alice-0123456789abcdef\n")
    keys.chmod(0o600)
    flags = {"cache.memory_mb": 100, "auth.api_keys_file": str(keys)}
    file = _lines(tmp_path / "prompts.jsonl", LONG)
    with AdminDaemon(tmp_path, lambda: FakeEngine(told), flags) as daemon:
        assert "with --client NAME" in _ctl(daemon, "warm", file, code=1).stderr
        options = ("--client", "alice", "--cache-salt", "xyzzy" * 100)
        stderr = _ctl(daemon, "warm", file, *options, code=1).stderr
        assert stderr.startswith("machd: --cache-salt: ")
        assert "xyzzy" not in stderr


def test_a_file_is_warmed_in_few_requests(daemon: AdminDaemon, tmp_path: Path) -> None:
    """The daemon logs each; all prompts are told of in order, and no progress in a pipe."""
    prompts = [f"{number} {LONG}" for number in range(40)]
    prompts[3] = "x" * 5000
    with capture_logs() as lines:
        done = _ctl(daemon, "warm", _lines(tmp_path / "p.jsonl", *prompts), "--json", code=1)
    assert [one["prompts"] for one in lines if one["event"] == "cache.warmed"] == [16, 16, 8]
    warmed = json.loads(done.stdout)["prompts"]
    lengths = [len(one) for one in prompts]
    assert [one["prompt_tokens"] for one in warmed] == [*lengths[:3], 0, *lengths[4:]]
    assert done.stderr == "machd: 1 of 40 prompts failed\n"


def test_long_prompts_go_in_requests_of_their_own() -> None:
    """No group is longer than what the daemon takes, and nothing is left out or changes places."""
    sizes = (3_000_000, 2_000_000, 5_000_000, 10, 10)
    lines = [(n, WarmPrompt(prompt="x" * size)) for n, size in enumerate(sizes, start=1)]
    groups = list(_groups(lines))
    assert [len(group) for group in groups] == [1, 1, 1, 2]
    assert [one for group in groups for one in group] == [one for _, one in lines]


def test_a_mark_at_the_file_s_start_is_skipped(daemon: AdminDaemon, tmp_path: Path) -> None:
    """As some editors leave it."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(LONG), "utf-8-sig")
    _ctl(daemon, "warm", str(path))
    assert _cached(daemon, LONG) == len(LONG) - 1


def test_what_is_kept_is_shown_and_cleared(daemon: AdminDaemon, tmp_path: Path) -> None:
    """The table and the JSON tell what the API tells; clearing says how much that was."""
    _ctl(daemon, "warm", _lines(tmp_path / "prompts.jsonl", LONG, LONG))
    stats = json.loads(_ctl(daemon, "stats", "--json").stdout)
    assert stats["prefix"] == daemon.http.get("/v1/cache/stats").json()["prefix"]
    table = _ctl(daemon, "stats").stdout
    assert table.startswith("prefix cache  0.1 MB of 100.0 MB in")
    assert "2 looked up: 1 hit, 0 prefix hits, 1 miss\n" in table
    assert "; 0 shared blocks, 0 in use\n" in table
    assert all(len(line) <= 80 for line in table.splitlines())
    blocks = stats["prefix"]["blocks"]
    said = f"forgot 0 stored responses and {blocks} blocks of the prefix cache\n"
    assert _ctl(daemon, "clear").stdout == said
    cleared = json.loads(_ctl(daemon, "clear", "--disk", "--json").stdout)
    assert cleared == {
        "responses": {"count": 0, "size_bytes": 0},
        "blocks": 0,
        "deleted_blocks": 0,
        "deleted_bytes": 0,
        "disk_bytes": None,
    }


def test_what_stays_on_disk_is_said(tmp_path: Path) -> None:
    """And how it is deleted; then what was. The status has a line for it, too."""
    disk: FakeDisk = {}
    flags = {"cache.memory_mb": 100, "cache.disk_dir": str(tmp_path / "blocks")}
    with AdminDaemon(tmp_path, lambda: FakeEngine(told, disk=disk), flags) as daemon:
        _ctl(daemon, "warm", "-", stdin=json.dumps(LONG * 20))
        wait_until(lambda: daemon.status["running"] == 0, "nothing runs")
        address = daemon.admin_url.removeprefix("http://")
        status = run_machd(["ctl", "--address", address, "status"], daemon.environ).stdout
        on_disk = f"1.6 MB of 20.00 GB in {len(disk)} blocks"
        assert on_disk in status
        table = _ctl(daemon, "stats").stdout
        assert on_disk in table
        assert f"{len(disk)} blocks written to disk, 0 read back, 0 not written" in table
        files = len(disk)
        said = _ctl(daemon, "clear").stdout
        assert said.endswith("1.6 MB of this model remain on disk; --disk deletes them\n")
        _, said = _ctl(daemon, "clear", "--disk").stdout.splitlines()
        assert said == f"deleted {files} files on disk, 1.6 MB"
        assert len(disk) == 0
        cleared = json.loads(_ctl(daemon, "clear", "--json").stdout)
        assert (cleared["blocks"], cleared["disk_bytes"]) == (0, 0)


def test_the_format_of_keys_and_values_is_in_the_status(tmp_path: Path) -> None:
    """Where it is not the usual one."""
    for name, said in (("none", False), ("affine8", True)):
        with AdminDaemon(tmp_path, FakeEngine, {"cache.kv_quantization": name}) as daemon:
            address = daemon.admin_url.removeprefix("http://")
            status = run_machd(["ctl", "--address", address, "status"], daemon.environ).stdout
            assert ("kept as affine8" in status) is said


def test_without_a_cache_the_table_says_so(tmp_path: Path) -> None:
    """Off is off."""
    with AdminDaemon(tmp_path, FakeEngine, {"cache.prefix": False}) as daemon:
        table = _ctl(daemon, "stats").stdout
        assert ["prefix", "cache", "off"] in [line.split() for line in table.splitlines()]
