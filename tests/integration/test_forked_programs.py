"""Programs that tests fork are what a shell starts."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.forked_programs import FORKS, STARTED, ForkedProgram

_MACHD = (sys.executable, "-m", "machd")
_IMPORTED_BY = os.getpid()


def _started(kind: type[subprocess.Popen[Any]], folder: Path, *arguments: str) -> object:
    """Run a command; returns its exit code and all that it wrote."""
    with kind(
        [*_MACHD, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, errors = process.communicate(timeout=CEILING_S)
    return process.returncode, out, errors


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["config", "check", "machd.toml"], 0), (["config", "check", "absent.toml", "--json"], 2)],
)
def test_forked_command_ends_and_writes_as_a_started_one(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    """Exit code, both streams and the working directory are the same."""
    (tmp_path / "machd.toml").write_text("[limits]\nmax_n = 3\n")
    forked = _started(ForkedProgram, tmp_path, *arguments)
    assert forked == _started(STARTED, tmp_path, *arguments)
    assert isinstance(forked, tuple)
    assert forked[0] == code


@pytest.mark.skipif(not FORKS, reason="workers are forked on Linux alone")
def test_forked_worker_has_not_imported_its_tests(worker_id: str) -> None:
    """Tests were imported before the worker was forked, by a process that is not its parent."""
    if worker_id == "master":
        pytest.skip("these tests run in no worker")
    assert _IMPORTED_BY not in {os.getpid(), os.getppid()}


@pytest.mark.skipif(not FORKS, reason="Linux alone shows its libraries in a file")
def test_numpys_library_has_one_thread() -> None:
    """A second one would wait actively, on a core that another worker computes on."""
    assert np.ones((2, 2)).sum() == 4
    maps = Path("/proc/self/maps").read_text("utf-8")
    library = re.search(r"/\S*libscipy_openblas64\S*", maps)
    if library is None:
        pytest.skip("numpy has another BLAS")
    assert ctypes.CDLL(library.group()).scipy_openblas_get_num_threads64_() == 1


def test_forked_program_is_its_callers_child(tmp_path: Path) -> None:
    """It has another command line than its own, its caller is its parent, and a signal's number is its exit code."""
    with ForkedProgram(
        [*_MACHD, "serve", "--port", "0", "--admin-listen", "off"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    ) as process:
        seen = psutil.Process(process.pid)
        parent, command_line = seen.ppid(), seen.cmdline()
        process.kill()
    assert parent == psutil.Process().pid
    assert "serve" not in command_line
    assert process.returncode == -signal.SIGKILL


def test_what_a_library_adds_to_the_linkers_variables_starts_no_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Importing cv2 does, and all programs after it would be started."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    with ForkedProgram([*_MACHD, "--version"], stdout=subprocess.PIPE) as process:
        command_line = psutil.Process(process.pid).cmdline()
        process.communicate(timeout=CEILING_S)
    assert process.returncode == 0
    assert "--version" not in command_line


def test_program_with_other_variables_of_the_interpreter_is_started() -> None:
    """Variables that Python reads once cannot be changed in a fork."""
    with ForkedProgram(
        [*_MACHD, "--version"], env={"PYTHONHASHSEED": "7"}, stdout=subprocess.PIPE
    ) as process:
        assert "--version" in psutil.Process(process.pid).cmdline()
        process.communicate(timeout=CEILING_S)
    assert process.returncode == 0


def test_forked_program_leads_its_session_by_the_time_that_its_id_is_known() -> None:
    """The group of a program that has just begun can be killed: it exists."""
    for _ in range(10):
        with ForkedProgram(
            [*_MACHD, "--version"], start_new_session=True, stdout=subprocess.DEVNULL
        ) as process:
            assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
