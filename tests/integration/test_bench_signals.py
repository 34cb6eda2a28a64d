"""``machd bench`` that is told to end before it is done: nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def _servers(process: psutil.Popen) -> list[psutil.Process]:
    return [one for one in process.children(recursive=True) if _is_server(one)]


def _is_server(process: psutil.Process) -> bool:
    try:
        return "serve" in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


@pytest.mark.long
def test_a_signal_ends_the_servers_and_removes_their_directory(tmp_path: Path) -> None:
    """Of the prefix bench while it measures; the exit code is the signal's, as a shell has it."""
    with _running(tmp_path, "--prefix") as process:
        scratch = tmp_path / "scratch"
        _wait_until(process, lambda: any(scratch.glob("machd-bench-*/blocks/*/*")), "blocks")
        children = process.children(recursive=True)
        assert _servers(process)

        process.send_signal(signal.SIGTERM)

        output = process.stdout.read().decode()
        assert process.wait(CEILING_S) == 128 + signal.SIGTERM, output
        assert "Traceback" not in output
        assert [one for one in children if one.is_running()] == []
        assert list(scratch.glob("machd-bench-*")) == []


@pytest.mark.long
def test_tables_are_in_the_pipe_before_the_next_is_measured(tmp_path: Path) -> None:
    """Whoever ends a bench has what was measured until then, and no server of it."""
    with _running(tmp_path, "--prefix", "--prefix-tokens", "60") as process:
        lines = iter(process.stdout.readline, b"")
        assert any(line.startswith(b"The goals are for") for line in lines)
        _wait_until(process, lambda: bool(_servers(process)), "a server")
        children = process.children(recursive=True)

        process.send_signal(signal.SIGTERM)

        rest = b"".join(lines)
        assert process.wait(CEILING_S) == 128 + signal.SIGTERM, rest
        assert b"full cache of" not in rest
        assert [one for one in children if one.is_running()] == []


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
    """Each signal ends them, also while neither has said that it is ready."""
    with _running(tmp_path, "--requests", "1000") as process:
        _wait_until(process, lambda: bool(_servers(process)), "a server")
        children = process.children(recursive=True)
        assert len(children) > 1

        process.send_signal(number)

        output = process.stdout.read().decode()
        assert process.wait(CEILING_S) == 128 + number, output
        assert "Traceback" not in output
        assert [one for one in children if one.is_running()] == []
        assert list((tmp_path / "scratch").glob("machd-bench-*")) == []


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """Under nohup a bench outlives its terminal."""
    wrapper = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    with _running(tmp_path, "--requests", "1000", wrapper=wrapper) as process:
        _wait_until(process, lambda: bool(_servers(process)), "a server")

        process.send_signal(signal.SIGHUP)
        # Signals are delivered by their number: a hangup that is not ignored would come first.
        process.send_signal(signal.SIGTERM)

        output = process.stdout.read().decode()
        assert process.wait(CEILING_S) == 128 + signal.SIGTERM, output
