"""A group of ranks as systemd's unit of it runs one."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clocks.polling import CEILING_S
from support.programs.installed_programs import needs_programs
from support.programs.notify_socket import NotifySocket
from support.ranks.launched_ranks import launched
from support.ranks.ranks_daemon import RanksDaemon

_UNIT = Path(__file__).parents[2] / "systemd" / "ranks" / "machd-ranks.service"


def _command(key: str) -> list[str]:
    (line,) = (line for line in _UNIT.read_text().splitlines() if line.startswith(f"{key}="))
    return shlex.split(line.partition("=")[2])


@pytest.mark.long
@needs_programs("pkill")
def test_rank_0_speaks_to_the_service_manager_and_a_stop_is_in_order(tmp_path: Path) -> None:
    """It is ready and gives signs of life though mlx.launch is the main process; ExecStop ends every rank."""
    daemon, log = RanksDaemon(write_tiny_llama(tmp_path / "tiny", kv_heads=4)), tmp_path / "log"
    start, stop = _command("ExecStart"), _command("ExecStop")
    prefix = start[: start.index("mlx.launch")]
    with NotifySocket() as manager:
        environ = {
            "NOTIFY_SOCKET": manager.path,
            "WATCHDOG_USEC": "1000000",
            "WATCHDOG_PID": str(os.getpid()),  # a process that is not rank 0
        }
        with launched(2, daemon.arguments, log=log, prefix=prefix, environ=environ) as launcher:
            daemon.wait_until_ready(launcher, log)
            manager.wait_for("READY", "1")
            manager.wait_for("WATCHDOG", "1")
            words = [word.replace("$MAINPID", str(launcher.pid)) for word in stop]
            # Whoever started a process has to look at its end, or it stays and ExecStop waits for it.
            waiting = subprocess.Popen(words)
            assert launcher.wait(CEILING_S) == 0
            waiting.wait(CEILING_S)

    printed = log.read_text()
    assert printed.count("daemon.stopped") == 2
    assert "exited with code" not in printed
