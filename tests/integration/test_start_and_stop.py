"""Starts that fail and stops that come early: one line that helps, and the right exit code."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.forked_commands import run_machd
from support.daemon.forked_daemons import DaemonParent, ForkedDaemon, daemon_parent
from support.engines.dialogue import completion


@pytest.fixture(name="parent", scope="module")
def _parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonParent]:
    with daemon_parent(tmp_path_factory.mktemp("logs")) as parent:
        yield parent


def _check_start_fails(daemon: ForkedDaemon, *words: str) -> None:
    """Exit code 2, and a single line of ours with these words and no traceback."""
    assert daemon.wait() == 2
    said = daemon.log.read_text()
    ours = [line for line in said.splitlines() if not line.startswith("{")]
    assert len(ours) == 1, said
    assert ours[0].startswith("machd: ")
    assert "Traceback" not in said
    for word in words:
        assert word in ours[0]


def test_a_taken_port_is_named(parent: DaemonParent) -> None:
    """The port in use and the flag that changes it are in the line."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        _check_start_fails(parent.start("--port", port), port, "--port")


def test_an_unreadable_configuration_is_named(parent: DaemonParent, tmp_path: Path) -> None:
    """A file that is no TOML is named, with the place of the mistake."""
    broken = tmp_path / "machd.toml"
    broken.write_text("[server\nport = 1\n")
    _check_start_fails(parent.start("--config", str(broken)), str(broken), "line 1")


def test_a_missing_model_is_named(parent: DaemonParent, tmp_path: Path) -> None:
    """A path that is not there is in the line."""
    missing = str(tmp_path / "nowhere")
    _check_start_fails(parent.start(missing, "--admin-listen", "off"), "nowhere")


def test_a_misspelt_variable_is_named_with_its_neighbour(parent: DaemonParent) -> None:
    """An unknown ``LME_`` variable is refused, and the nearest known one offered."""
    daemon = parent.start(environ={"LME_SERVER_PROT": "9"})
    _check_start_fails(daemon, "LME_SERVER_PROT", "LME_SERVER_PORT")


def test_origins_name_file_variable_and_flag(tmp_path: Path) -> None:
    """``config show --origins`` tells a file's value, a variable's and a flag's apart."""
    file = tmp_path / "mine.toml"
    file.write_text("[limits]\nmax_n = 3\n")

    result = run_machd(
        ["config", "show", "--origins", "--config", str(file), "--port", "9090"],
        {"LME_STREAM_INTERVAL": "4"},
    )

    lines = {line.split(" ", 1)[0]: line for line in result.stdout.splitlines() if "=" in line}
    assert result.returncode == 0
    assert str(file) in lines["max_n"]
    assert "LME_STREAM_INTERVAL" in lines["interval"]
    assert "--" in lines["port"]
    assert "port" in lines["port"]


def test_a_term_signal_while_loading_ends_the_daemon_with_0(
    parent: DaemonParent, embedded_model_path: Path
) -> None:
    """A daemon that still loads a real model leaves with exit code 0, and never becomes ready."""
    daemon = parent.start(str(embedded_model_path))
    daemon.wait_for("daemon.listening")
    assert daemon.stop() == 0
    assert "daemon.ready" not in [event["event"] for event in daemon.events]


def test_a_second_signal_does_not_wait_for_the_stream(
    parent: DaemonParent, embedded_model_path: Path
) -> None:
    """The first SIGTERM drains, the second ends the stream with an error event, exit code 0."""
    assert embedded_model_path.is_file()
    model = "smollm2-135m-instruct"
    body = completion("Once", max_tokens=2000, ignore_eos=True, stream=True, model=model)
    lines: list[str] = []
    with parent.running("--limits-drain-timeout-s", "3600") as daemon:
        with httpx.stream(
            "POST", f"{daemon.url}/v1/completions", json=body, timeout=CEILING_S
        ) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 4:
                    daemon.signal(signal.SIGTERM)
                    daemon.wait_for("daemon.draining")
                    daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0

    data = [line for line in lines if line]
    assert "drain_deadline" in data[-2], data[-2]
    assert data[-1] == "data: [DONE]"
