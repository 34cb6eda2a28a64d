"""Signals while the daemon is starting, and a stop while a thread hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import module_command
from support.clocks.polling import CEILING_S
from support.daemon.service_daemon import ServiceDaemon

_ENTRY = """
import os, signal, sys, time

class SignalledImport:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
            time.sleep({seconds})

sys.meta_path.insert(0, SignalledImport())
sys.argv = ["machd", "serve", *{arguments!r}]
from machd.cli.main import main
main()
"""
"""Starts the daemon as the console script does, and signals itself while it imports a module."""

_IMPORTED = [
    "click",
    "machd.cli.serve",
    "machd.daemon",
    *(pytest.param(one, marks=pytest.mark.long) for one in ("structlog", "pydantic", "litestar")),
]


def _entry(module: str, number: int, *arguments: str, seconds: float = 0.0) -> list[str]:
    code = _ENTRY.format(module=module, number=number, seconds=seconds, arguments=arguments)
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("module", _IMPORTED)
def test_stop_while_importing_ends_the_process_with_code_0(module: str) -> None:
    """SIGTERM is handled before the first module of a library is imported."""
    ended = subprocess.run(
        _entry(module, signal.SIGTERM, seconds=60),
        capture_output=True,
        timeout=CEILING_S,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, b"")


def test_interrupt_while_importing_ends_the_process_with_code_0() -> None:
    """Ctrl-C during the start leaves no traceback."""
    ended = subprocess.run(
        _entry("click", signal.SIGINT, seconds=60),
        capture_output=True,
        timeout=CEILING_S,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, b"")


def test_stop_between_importing_and_listening_removes_what_was_made(
    tmp_path: Path, embedded_model_path: Path
) -> None:
    """A daemon that is told to stop while it binds its socket ends with 0, and the socket is gone."""
    path = tmp_path / "machd.sock"
    path.parent.chmod(0o700)
    ended = subprocess.run(
        [
            *module_command("support.daemon.stopped_while_binding"),
            str(embedded_model_path),
            *("--admin-listen", "off", "--host", f"unix:{path}"),
        ],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        timeout=CEILING_S,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert b"daemon.stopped" in ended.stderr
    assert list(tmp_path.glob("machd.sock*")) == []


def test_reload_while_importing_is_done_once_the_daemon_can() -> None:
    """SIGHUP neither ends a daemon that starts nor is it forgotten."""
    arguments = ("--port", "0", "--admin-listen", "127.0.0.1:0", "--logging-format", "json")
    with subprocess.Popen(
        _entry("click", signal.SIGHUP, *arguments), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            assert any('"settings.changed"' in line for line in process.stderr)
            process.terminate()
            process.communicate(timeout=CEILING_S)
        finally:
            process.kill()
    assert process.returncode == 0


def test_reload_that_hangs_does_not_keep_the_daemon(tmp_path: Path) -> None:
    """A worker thread inside a system call that never returns is left behind by the first SIGTERM."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ServiceDaemon(environ={"RELOAD_PIPE": str(pipe)}) as daemon:
        daemon.read_url()
        daemon.process.send_signal(signal.SIGHUP)
        assert daemon.read_url() == "reloading"
        daemon.terminate()
        assert daemon.wait() == 0


def test_stop_does_not_wait_for_a_busy_loading_thread() -> None:
    """A load that loops in Python for ever ends with the first SIGTERM."""
    with ServiceDaemon(environ={"LOAD_BUSY": "1"}) as daemon:
        _read_until(daemon, "daemon.listening")
        daemon.terminate()
        assert daemon.wait() == 0


def test_a_reload_while_the_model_loads_is_taken(tmp_path: Path) -> None:
    """The daemon reads its settings again, and becomes ready with the new ones."""
    config = tmp_path / "machd.toml"
    config.write_text("[limits]\nmax_queue = 11\n")
    loading = tmp_path / "loading"
    loading.touch()
    with ServiceDaemon(environ={"LOAD_FILE": str(loading)}, config_path=config) as daemon:
        _read_until(daemon, "daemon.listening")
        config.write_text("[limits]\nmax_queue = 12\n[continuous_batching]\nwindow_ms = 1\n")
        daemon.process.send_signal(signal.SIGHUP)
        assert "limits.max_queue" in _read_until(daemon, "settings.changed")
        loading.unlink()
        assert daemon.read_url()
        daemon.terminate()
        assert daemon.wait() == 0


def _read_until(daemon: ServiceDaemon, event: str) -> str:
    """The first log line of that event."""
    assert daemon.process.stderr is not None
    for line in daemon.process.stderr:
        if f'"{event}"' in line:
            return line
    raise AssertionError(f"no {event}")
