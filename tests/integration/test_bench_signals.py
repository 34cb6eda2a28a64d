"""``machd bench`` that is told to end before it is done: nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clocks.polling import CEILING_S, wait_until

_DEFAULT_SIGNALS_CODE = (
    "import os, signal, sys\n"
    "for number in (signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_DFL)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
_DEFAULT_SIGNALS = (sys.executable, "-c", _DEFAULT_SIGNALS_CODE)
"""In front of a command: whoever runs the tests may ignore signals, which children inherit."""


def _wait_until(process: psutil.Popen, condition: Callable[[], bool], what: str) -> None:
    def holds() -> bool:
        assert process.poll() is None, process.stdout.read().decode()
        return condition()

    wait_until(holds, what)


@contextmanager
def _running(tmp_path: Path, *args: str, wrapper: tuple[str, ...] = ()) -> Iterator[psutil.Popen]:
    """A bench of a tiny model in a session of its own; ended by force if it must be."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    model = write_tiny_llama(tmp_path / "tiny-llama")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LME_")}
    process = psutil.Popen(
        [*_DEFAULT_SIGNALS, *wrapper, sys.executable, "-m", "machd", "bench", str(model), *args],
        env={**environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for one in [*process.children(recursive=True), process] if process.is_running() else []:
            one.kill()
        process.wait()
        process.stdout.close()


def _has_server(process: psutil.Popen) -> bool:
    with suppress(psutil.Error):  # one has just ended
        return any("serve" in one.cmdline() for one in process.children(recursive=True))
    return False


def _wait_for_ends(processes: list[psutil.Process]) -> None:
    """Wait until no process runs; a zombie does not count."""

    def has_ended(process: psutil.Process) -> bool:
        try:
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    wait_until(lambda: all(map(has_ended, processes)), "the children's ends")


@pytest.mark.long
def test_a_signal_ends_the_servers_and_removes_their_directory(tmp_path: Path) -> None:
    """A signal while the prefix cache is measured: the exit code is the signal's, as a shell has it."""
    with _running(tmp_path, "--prefix") as process:
        scratch = tmp_path / "scratch"
        _wait_until(process, lambda: any(scratch.glob("machd-bench-*/blocks/*/*")), "blocks")
        children = process.children(recursive=True)
        assert _has_server(process)

        process.send_signal(signal.SIGTERM)

        output = process.stdout.read().decode()
        assert process.wait(CEILING_S) == 128 + signal.SIGTERM, output
        assert "Traceback" not in output
        _wait_for_ends(children)
        assert list(scratch.glob("machd-bench-*")) == []


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGHUP, signal.SIGINT)),
    ],
)
def test_a_signal_ends_the_bare_loop_and_a_server_that_starts(
    tmp_path: Path, number: signal.Signals
) -> None:
    """SIGTERM while the server starts, the others while the bare loop loads."""

    def has_begun() -> bool:
        return _has_server(process) or (number != signal.SIGTERM and len(process.children()) > 1)

    with _running(tmp_path, "--requests", "1000") as process:
        _wait_until(process, has_begun, "a child")
        children = process.children(recursive=True)
        assert len(children) > 1

        process.send_signal(number)

        output = process.stdout.read().decode()
        assert process.wait(CEILING_S) == 128 + number, output
        assert "Traceback" not in output
        _wait_for_ends(children)
        assert list((tmp_path / "scratch").glob("machd-bench-*")) == []


@pytest.mark.long
def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """Under nohup a bench outlives its terminal."""
    wrapper = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    with _running(tmp_path, "--requests", "1000", wrapper=wrapper) as process:
        _wait_until(process, lambda: _has_server(process), "a server")

        process.send_signal(signal.SIGHUP)
        # Signals are delivered by their number: a hangup that is not ignored would come first.
        process.send_signal(signal.SIGTERM)

        output = process.stdout.read().decode()
        assert process.wait(CEILING_S) == 128 + signal.SIGTERM, output
