"""SIGHUP while the daemon is still starting."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from polling import wait_until
from serve_process import ServeProcess
from service_daemon import ServiceDaemon

_HANGUP = 1 << (signal.SIGHUP - 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_reload_does_not_end_a_daemon_that_starts() -> None:
    """It is ignored before the daemon's own modules are there, and until the daemon takes it."""
    with ServeProcess().started() as daemon:
        status = Path("/proc", str(daemon.process.pid), "status")
        wait_until(
            lambda: bool(_mask(status, "SigIgn") & _HANGUP or _mask(status, "SigCgt") & _HANGUP),
            "the signal is looked after",
        )
        assert _mask(status, "SigIgn") & _HANGUP
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("daemon.listening")
        daemon.terminate()
        assert daemon.process.wait(30) == 0


def test_a_reload_while_the_model_loads_is_taken(tmp_path: Path) -> None:
    """The daemon reads its settings again, and becomes ready with the new ones."""
    config = tmp_path / "machd.toml"
    config.write_text("[limits]\nmax_queue = 11\n")
    with ServiceDaemon(environ={"LOAD_S": "2"}, config_path=config) as daemon:
        _read_until(daemon, "daemon.listening")
        config.write_text("[limits]\nmax_queue = 12\n[continuous_batching]\nwindow_ms = 1\n")
        daemon.process.send_signal(signal.SIGHUP)
        assert "limits.max_queue" in _read_until(daemon, "settings.changed")
        assert daemon.read_url()
        daemon.terminate()
        assert daemon.wait() == 0


def _mask(status: Path, name: str) -> int:
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines[name], 16)


def _read_until(daemon: ServiceDaemon, event: str) -> str:
    """The first log line of that event."""
    assert daemon.process.stderr is not None
    for line in daemon.process.stderr:
        if f'"{event}"' in line:
            return line
    raise AssertionError(f"no {event}")
