"""Two ranks in two network namespaces, which have addresses of their own as two machines have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clocks.polling import CEILING_S, wait_until
from support.ranks.forked_ranks import rank_environ
from support.ranks.ranks_daemon import RanksDaemon

_TESTS = Path(__file__).parents[1]
_ADDRESSES = ("10.231.7.1", "10.231.7.2")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=CEILING_S)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces that a pair of interfaces connects."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, root and ip")
    names = (f"machd-r0-{os.getpid()}", f"machd-r1-{os.getpid()}")
    with ExitStack() as undo:
        for name in names:
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not permitted: {error.stderr!r}")
            undo.callback(_ip, "netns", "del", name)
        peer = ("peer", "name", "rank", "netns", names[1])
        _ip("-n", names[0], "link", "add", "rank", "type", "veth", *peer)
        for name, address in zip(names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "rank")
            _ip("-n", name, "link", "set", "rank", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names


@pytest.mark.long  # test_gguf_serving.py has a daemon of two ranks in every run, without addresses of their own
def test_ranks_with_addresses_of_their_own_serve_and_end_together(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    """Without mlx.launch: rank 0 answers plainly and streamed, and exits with 70 when the idle rank 1 dies."""
    daemon = RanksDaemon(write_tiny_llama(tmp_path / "tiny", kv_heads=4))
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([[f"{address}:5000"] for address in _ADDRESSES]))
    path = os.pathsep.join(part for part in (str(_TESTS), os.environ.get("PYTHONPATH")) if part)
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    with ExitStack() as stack:
        ranks = []
        for rank, (host, log) in enumerate(zip(hosts, logs, strict=True)):
            out = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, *daemon.arguments],
                env={**rank_environ(rank, hostfile), "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)

        def is_ready() -> bool:
            assert all(one.poll() is None for one in ranks), "a rank ended"
            return _curl(hosts[0], f"{daemon.url}/health/ready").returncode == 0

        wait_until(
            is_ready, "the daemon is ready", seen=lambda: "\n".join(one.read_text() for one in logs)
        )
        url, body = f"{daemon.url}/v1/completions", daemon.body(max_tokens=8)
        plain = json.loads(_curl(hosts[0], url, body).stdout)
        streamed = _curl(hosts[0], url, {**body, "stream": True}).stdout
        ranks[1].kill()
        assert ranks[0].wait(CEILING_S) == 70, logs[0].read_text()

    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    text = "".join(str(choice["text"]) for chunk in chunks for choice in chunk["choices"])
    assert plain["usage"]["completion_tokens"] == 8
    assert text == plain["choices"][0]["text"]
    assert streamed.rstrip().endswith("data: [DONE]")


def _curl(
    host: str, url: str, body: dict[str, object] | None = None
) -> subprocess.CompletedProcess[str]:
    """Ask from inside a namespace, whose loopback is its own."""
    data = [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(
        ["ip", "netns", "exec", host, "curl", "-sSf", "-N", url, *data],
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=False,
    )
