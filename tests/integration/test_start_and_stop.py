"""Starts that fail and stops that come early: one line that helps, and the right exit code."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
from polling import CEILING_S
from serve_process import ServeProcess, run_machd


def assert_one_helpful_line(stderr: str, *words: str) -> None:
    """A single line of ours, with these words and no traceback."""
    ours = [line for line in stderr.splitlines() if not line.startswith("{")]
    assert len(ours) == 1, stderr
    assert ours[0].startswith("machd: ")
    assert "Traceback" not in stderr
    for word in words:
        assert word in ours[0]


def test_a_taken_port_is_named() -> None:
    """The port in use and the flag that changes it are in the line."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        result = run_machd(["serve", "--port", str(port)])

    assert result.returncode == 2
    assert_one_helpful_line(result.stderr, str(port), "--port")


def test_an_unreadable_configuration_is_named(tmp_path: Path) -> None:
    """A file that is no TOML is named, with the place of the mistake."""
    broken = tmp_path / "machd.toml"
    broken.write_text("[server\nport = 1\n")

    result = run_machd(["serve", "--config", str(broken)])

    assert result.returncode == 2
    assert_one_helpful_line(result.stderr, str(broken), "line 1")


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    """A path that is not there is in the line."""
    result = run_machd(["serve", str(tmp_path / "nowhere"), "--port", "0", "--admin-listen", "off"])

    assert result.returncode == 2
    assert_one_helpful_line(result.stderr, "nowhere")


def test_a_misspelt_variable_is_named_with_its_neighbour() -> None:
    """An unknown ``LME_`` variable is refused, and the nearest known one offered."""
    result = run_machd(["serve"], {"LME_SERVER_PROT": "9"})

    assert result.returncode == 2
    assert_one_helpful_line(result.stderr, "LME_SERVER_PROT", "LME_SERVER_PORT")


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


def test_a_term_signal_while_loading_ends_the_daemon_with_0(embedded_model_path: Path) -> None:
    """A daemon that still loads a real model leaves with exit code 0, and never becomes ready."""
    assert embedded_model_path.is_file()
    server = ServeProcess()
    with server.started():
        server.wait_for("daemon.listening")
        server.terminate()
        exit_code = server.process.wait(CEILING_S)

    assert exit_code == 0
    assert "daemon.ready" not in [event["event"] for event in server.events]


def test_a_second_signal_does_not_wait_for_the_stream(embedded_model_path: Path) -> None:
    """The first SIGTERM drains, the second ends the stream with an error event, exit code 0."""
    assert embedded_model_path.is_file()
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": "Once",
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    with ServeProcess("--limits-drain-timeout-s", "3600") as server:
        lines: list[str] = []
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=CEILING_S
        ) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 4:
                    server.terminate()
                    server.wait_for("daemon.draining")
                    server.terminate()
        exit_code = server.process.wait(CEILING_S)

    data = [line for line in lines if line]
    assert exit_code == 0
    assert "drain_deadline" in data[-2]
    assert data[-1] == "data: [DONE]"
