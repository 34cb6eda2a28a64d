"""Several processes that compute one model: their tokens, their faults, and their ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.scraping import read_page
from support.daemon.serve_process import ServeProcess
from support.ranks.forked_ranks import forked_ranks
from support.ranks.launched_ranks import free_ports, launched, rank_command, rank_pids
from support.ranks.ranks_daemon import RanksDaemon

_COMPARED = "support.ranks.compared_rows"
_LOADING = ("-m", "support.ranks.loading_ranks")
_READING = ("-m", "support.ranks.reading_ranks")
_FLOAT32 = ("--model-dtype", "float32")
_PROMPTS = ("one two three", "The capital of France is", "def add(a, b):")
_WAYS = {"every": 10, "some": 3}
"""Alone, seeded, with a grammar, with drafts, four ways to share a batch, a prefix hit and its tokens; or three."""


@cache
def _compared(
    ranks: int, mode: str, faults: str, variant: str, ways: str = "some"
) -> tuple[list[dict[str, Any]], str]:
    """Return what rank 0 found under each fault, as far as they got, and what all ranks printed besides."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with forked_ranks(ranks, _COMPARED, [mode, faults, ways, variant], log=log) as running:
            running.wait()
        printed = log.read_text()
    return _lines(printed), printed


def _lines(printed: str) -> list[dict[str, Any]]:
    """Return the lines of JSON among what was printed."""
    return [json.loads(one) for one in printed.splitlines() if one.startswith("{")]


def _printed(ranks: int, arguments: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Return the lines of JSON that ranks printed, and everything that they printed."""
    ended = subprocess.run(
        rank_command(ranks, arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=False,
    )
    return _lines(ended.stdout), ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("ranks", "mode", "variant", "ways"),
    [
        pytest.param(2, "tensor", "llama", "every", marks=pytest.mark.long),
        pytest.param(2, "pipeline", "qwen2", "every", marks=pytest.mark.long),
        # Ranks wait for each other actively, so that a pass of four takes minutes on two busy cores.
        pytest.param(4, "tensor", "qwen3", "some", marks=pytest.mark.long),
        pytest.param(2, "tensor", "qwen3_moe", "every", marks=pytest.mark.long),
        pytest.param(2, "tensor", "qwen3_5", "every", marks=pytest.mark.long),
        pytest.param(2, "pipeline", "deepseek_v3", "every", marks=pytest.mark.long),
    ],
)
def test_ranks_say_the_tokens_of_one_process(
    ranks: int, mode: str, variant: str, ways: str
) -> None:
    """Alone, in a batch, seeded, with a grammar, with drafts and after a prefix hit."""
    found, printed = _compared(ranks, mode, "none", variant, ways)

    assert _differences(found) == [(variant, _WAYS[ways], {})], printed


def _differences(found: list[dict[str, Any]]) -> list[tuple[object, object, object]]:
    return [(one["variant"], one.get("ways"), one.get("different")) for one in found]


_THEN_SELFISH = (2, "tensor", "none,selfish", "llama")
"""One group of ranks that is looked at twice: it costs as many starts of an interpreter."""


def test_two_ranks_say_the_tokens_of_one_process() -> None:
    """Alone, in a batch and with drafts."""
    found, printed = _compared(*_THEN_SELFISH)

    assert _differences(found)[:1] == [("llama", _WAYS["some"], {})], printed


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (_THEN_SELFISH, "this rank's rows are not those of rank 0"),
        pytest.param((2, "tensor", "deaf", "llama"), "ValidationError", marks=pytest.mark.long),
    ],
    ids=["selfish", "deaf"],
)
def test_a_rank_that_does_something_else_ends_the_group(
    ranks: tuple[int, str, str, str], said: str
) -> None:
    """A follower that keeps other tokens than it is told, or misses an order, is noticed."""
    found, printed = _compared(*ranks)

    assert len(found) == ranks[2].split(",").count("none")
    assert said in printed
    assert "RanksLostError" in printed


def test_ports_of_ranks_are_none_that_connections_are_given() -> None:
    """A connection of another test cannot have the port by the time that its rank binds it."""
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not file.exists():
        pytest.skip("this system has no such file")
    given = range(*map(int, file.read_text().split()))
    assert all(free_ports(2) + 1 not in given for _ in range(50))


@pytest.fixture(name="loads", scope="module")
def _loads() -> tuple[list[dict[str, Any]], str]:
    """What two ranks found that loaded three times: without a failure, and with one of each of them."""
    return _printed(2, [*_LOADING, "-1", "0", "1"])


def test_rank_0_sees_the_bytes_of_every_rank_while_they_load(
    loads: tuple[list[dict[str, Any]], str],
) -> None:
    """Ranks of 7 and 14 tensors meet as often, and rank 0 alone shows them."""
    found, printed = loads
    whole = [one for one in found if one["failing"] == -1]
    shown = {one["rank"]: one["loaded_bytes"] for one in whole}

    assert [one["ended"] for one in whole] == ["loaded", "loaded"], printed
    assert len(shown[0]) == 10
    assert shown[0] == sorted(shown[0])
    assert shown[0][-1] == 7000 + 14000
    assert shown[1] == []


@pytest.mark.parametrize("failing", [0, 1])
def test_every_rank_learns_which_one_failed_to_load_and_why(
    loads: tuple[list[dict[str, Any]], str], failing: int
) -> None:
    """The reason comes from the rank itself, and no rank waits for it any more."""
    found, printed = loads
    ended = {one["rank"]: one["ended"] for one in found if one["failing"] == failing}

    assert ended == {
        failing: "a file is damaged",
        1 - failing: f"rank {failing} could not load its shard: a file is damaged",
    }, printed


@pytest.mark.long
def test_heads_that_cannot_be_shared_evenly_are_refused() -> None:
    """mlx-lm would divide them with a remainder, and give every rank slices of several heads."""
    found, printed = _compared(3, "tensor", "none", "llama")

    assert len(found) == 1, printed
    assert "ModelShardingError" in str(found[0]["refused"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama of four heads."""
    return write_tiny_llama(tmp_path_factory.mktemp("ranks") / "tiny", kv_heads=4)


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose halves of a row are long enough to be read by offset."""
    directory = tmp_path_factory.mktemp("wide") / "tiny"
    return write_tiny_llama(directory, hidden=512, layers=4, head_dim=512, kv_heads=4)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes that a process reads")
def test_a_rank_reads_its_shard_and_little_else(wide_checkpoint: Path) -> None:
    """Half of the layers and all of the embedding, with a tenth to spare."""
    found, printed = _printed(2, [*_READING, str(wide_checkpoint)])
    stored_bytes = (wide_checkpoint / "model.safetensors").stat().st_size

    assert sorted(one["rank"] for one in found) == [0, 1], printed
    for one in found:
        assert 1.1 * one["shard_bytes"] < stored_bytes, "a whole file is told from a shard"
        assert one["shard_bytes"] <= one["read_bytes"] <= 1.1 * one["shard_bytes"]


@pytest.mark.long
def test_ranks_that_load_files_say_the_tokens_of_one_process(
    wide_checkpoint: Path, tmp_path: Path
) -> None:
    """Each rank reads its half by offset, and the text of several prompts stays the same."""
    log = tmp_path / "log"
    daemon = RanksDaemon(wide_checkpoint)
    with launched(2, [*daemon.arguments, *_FLOAT32], log=log) as launcher:
        daemon.wait_until_ready(launcher, log)
        sharded = [_text(daemon.url, prompt) for prompt in _PROMPTS]
    with ServeProcess(str(wide_checkpoint), "--probe-on-start", "off", *_FLOAT32) as alone:
        assert [_text(alone.url, prompt) for prompt in _PROMPTS] == sharded
    assert len(set(sharded)) == len(_PROMPTS), "other prompts have other answers"


def _text(url: str, prompt: str) -> str:
    body = {**RanksDaemon.body(max_tokens=16), "prompt": prompt}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=CEILING_S)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


@pytest.mark.long
def test_a_daemon_of_two_ranks_serves_and_stops_in_order(checkpoint: Path, tmp_path: Path) -> None:
    """Its status shows both, and a stop that every rank is told of lets requests finish."""
    daemon = RanksDaemon(checkpoint)
    with launched(2, daemon.arguments, log=tmp_path / "log") as launcher:
        daemon.wait_until_ready(launcher, tmp_path / "log")
        assert daemon.ask(max_tokens=8).json()["usage"]["completion_tokens"] == 8
        capabilities = httpx.get(f"{daemon.url}/v1/capabilities").json()
        assert capabilities["distributed"]["ranks"] == 2
        page = read_page(daemon.url)
        for rank in ("0", "1"):
            assert page.value("machd_rank_memory_bytes", kind="active", rank=rank) is not None
            assert (page.value("machd_rank_heartbeat_timestamp_seconds", rank=rank) or 0) > 1e9
        for pid in rank_pids(launcher):
            os.kill(pid, signal.SIGTERM)
        launcher.wait(CEILING_S)

    printed = (tmp_path / "log").read_text()
    assert printed.count('"event": "ranks.loading"') == 10, "rank 0 alone tells it"
    assert printed.count("daemon.stopped") == 2
    assert "exited with code" not in printed


def test_requests_get_an_error_when_a_rank_dies(checkpoint: Path, tmp_path: Path) -> None:
    """Rank 0 answers what is open and ends with code 70, so a supervisor can start all of them again."""
    daemon, log = RanksDaemon(checkpoint), tmp_path / "log"
    # Seldom rank 0 does not hear of the end, and waits as long as for one that hangs.
    arguments = [*daemon.machd_arguments, "--engine-stall-timeout-s", "30"]
    with forked_ranks(2, "machd", arguments, log=log) as ranks:
        daemon.wait_until_ready(ranks, log)
        rest = daemon.lose_rank(ranks.pids[1])
        codes = ranks.wait()

    assert "engine_fault" in rest
    assert codes == [70, -signal.SIGKILL]


@pytest.mark.long
def test_requests_get_an_error_when_a_rank_dies_that_mlx_launch_started(
    checkpoint: Path, tmp_path: Path
) -> None:
    """mlx.launch stops rank 0 as soon as it has seen the other one's end, which spoils neither answer nor code."""
    daemon, log = RanksDaemon(checkpoint), tmp_path / "log"
    with launched(2, daemon.arguments, log=log) as launcher:
        daemon.wait_until_ready(launcher, log)
        rest = daemon.lose_rank(rank_pids(launcher)[1])
        launcher.wait(CEILING_S)

    assert "engine_fault" in rest
    assert "rank 0 exited with code 70" in log.read_text()


@pytest.mark.long
def test_rank_0_ends_with_code_70_when_a_rank_dies_while_nothing_runs(
    checkpoint: Path, tmp_path: Path
) -> None:
    """mlx.launch tells rank 0 to stop as soon as the other one has died, and its end is no order's end."""
    daemon, log = RanksDaemon(checkpoint), tmp_path / "log"
    with launched(2, daemon.arguments, log=log) as launcher:
        daemon.wait_until_ready(launcher, log)
        os.kill(rank_pids(launcher)[1], signal.SIGKILL)
        launcher.wait(CEILING_S)

    assert "rank 0 exited with code 70" in log.read_text()


@pytest.mark.long
def test_rank_0_is_not_live_when_a_rank_hangs_while_nothing_runs(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Rank 0 asks the others every half second, and ends when one has not answered for engine.stall_timeout_s."""
    daemon, log = RanksDaemon(checkpoint), tmp_path / "log"
    arguments = [*daemon.arguments, "--engine-stall-timeout-s", "10"]
    with launched(2, arguments, log=log) as launcher:
        daemon.wait_until_ready(launcher, log)
        os.kill(rank_pids(launcher)[1], signal.SIGSTOP)
        # Between 503 and the end lie few seconds, which a busy machine may not look into.
        wait_until(
            lambda: daemon.live_status == 503 or "rank 0 exited" in log.read_text(),
            "the hang shows",
            seen=log.read_text,
        )
        wait_until(
            lambda: "rank 0 exited with code 70" in log.read_text(),
            "rank 0 ends",
            seen=log.read_text,
        )


@pytest.mark.long
def test_a_rank_ends_with_code_70_when_rank_0_dies(checkpoint: Path, tmp_path: Path) -> None:
    """No rank waits for one that is gone."""
    daemon, log = RanksDaemon(checkpoint), tmp_path / "log"
    with launched(2, daemon.arguments, log=log) as launcher:
        daemon.wait_until_ready(launcher, log)
        os.kill(rank_pids(launcher)[0], signal.SIGKILL)
        launcher.wait(CEILING_S)

    assert "rank 1 exited with code 70" in log.read_text()


_JOINING = """
import os, sys
from machd.engine.ranks.joining import join, rank_place
place = rank_place(os.environ)
print("joining", flush=True)
group = join(place)
print(group.gather([group.rank]), flush=True)
"""


@pytest.mark.long
def test_a_strangers_connection_does_not_keep_ranks_apart(tmp_path: Path) -> None:
    """It takes the place of rank 1 at rank 0's port and stays; the ranks find each other all the same."""
    ports = [_free_port(), _free_port()]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))

    def rank(number: int) -> subprocess.Popen[str]:
        environ = {**os.environ, "MLX_RANK": str(number), "MLX_HOSTFILE": str(hosts)}
        command = [sys.executable, "-c", _JOINING]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)

    with rank(0) as first:
        stranger: list[socket.socket] = []

        def connects() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                stranger.append(socket.create_connection(("127.0.0.1", ports[0])))
            return bool(stranger)

        wait_until(connects, "rank 0 listens")
        with stranger[0], rank(1) as second:
            said = [one.communicate(timeout=CEILING_S)[0] for one in (first, second)]
    assert [one.splitlines()[-1] for one in said] == ["[[0], [1]]"] * 2


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])
