"""What breaks one architecture's run breaks no other's."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from support.clocks.polling import CEILING_S, wait_until
from unit.probes.fake_worker import COMMAND, LOG_VARIABLE, made_report

from machd.capabilities.evidence import Outcome
from machd.capabilities.matrix import ArchitectureReport
from machd.errors import StartupError
from machd_probes.progress import RunProgress
from machd_probes.runner import Runner, RunnerLimits
from machd_probes.worker_messages import is_faulted, shortened

PATIENT = RunnerLimits(
    start_s=CEILING_S, architecture_s=CEILING_S, end_s=CEILING_S, workers=2, group=4
)


def runner_of(*command: str, limits: RunnerLimits = PATIENT, log: Path | None = None) -> Runner:
    """A runner of fake workers, or of another command."""
    environ = dict(os.environ) if log is None else {**os.environ, LOG_VARIABLE: str(log)}
    return Runner(environ, command=command or COMMAND, limits=limits)


def measured(*names: str, runner: Runner | None = None) -> dict[str, ArchitectureReport]:
    """Rows by name, each of which was told once."""
    reports: list[ArchitectureReport] = []
    with RunProgress(len(names)) as progress:
        (runner or runner_of()).measure(names, found=reports.append, progress=progress)
    rows = {report.architecture: report for report in reports}
    assert len(rows) == len(reports)
    return rows


def the_fault(report: ArchitectureReport) -> str:
    """The detail of a row whose run broke off; the row says nothing else."""
    (result,) = report.results
    assert result.outcome is Outcome.ERRORED
    assert report.facts is None
    assert report.problem == result.detail
    return result.detail


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("crash", "it crashed with SIGSEGV"),
        ("abort", "it crashed with SIGABRT: loading tiny.bin; terminate called"),
        ("leave", "it ended with exit code 7"),
        ("exit", "SystemExit: install the optional package"),
        ("memory", "MemoryError"),
        ("other", "its worker answered for somebody_else"),
    ],
)
def test_a_fault_is_one_row_and_the_rest_of_its_group_goes_on(name: str, detail: str) -> None:
    """Crash, exit and out-of-memory are each one errored row; neighbours are measured."""
    check_one_faulty_row(name, detail, PATIENT)


def test_a_hang_is_one_row_and_the_rest_of_its_group_goes_on() -> None:
    """An architecture that takes longer than it may is one errored row; neighbours are measured."""
    # Its neighbours take a millisecond.
    check_one_faulty_row("hang", "it took more than 3 s", replace(PATIENT, architecture_s=3.0))


def check_one_faulty_row(name: str, detail: str, limits: RunnerLimits) -> None:
    """Measure an architecture that breaks its run between three that do not."""
    rows = measured("fine-1", name, "fine-2", "fine-3", runner=runner_of(limits=limits))

    assert set(rows) == {"fine-1", name, "fine-2", "fine-3"}
    assert the_fault(rows[name]) == detail
    assert is_faulted(rows[name])
    assert [rows[f"fine-{index}"] for index in (1, 2, 3)] == [
        made_report(f"fine-{index}") for index in (1, 2, 3)
    ]


@pytest.mark.parametrize(("backend", "limit_s"), [("cpu", 60.0), ("cuda", 600.0), ("metal", 600.0)])
def test_a_gpu_has_time_to_compile(backend: str, limit_s: float) -> None:
    """An architecture whose kernels are compiled is not taken for one that hangs."""
    assert RunnerLimits().of_architecture_s(backend) == limit_s
    assert RunnerLimits(architecture_s=900.0).of_architecture_s(backend) == 900.0


def test_without_a_fault_there_is_no_errored_row() -> None:
    """The inverse: a run that nothing breaks reports no fault, in one process a group."""
    rows = measured("fine-1", "fine-2", "chatter")

    assert not any(is_faulted(report) for report in rows.values())


def test_a_group_that_fails_everywhere_ends(tmp_path: Path) -> None:
    """Each process settles one row at least, so a run ends however much of it is broken."""
    log = tmp_path / "log"
    rows = measured("crash-1", "crash-2", "crash-3", runner=runner_of(log=log))

    assert all(is_faulted(report) for report in rows.values())
    assert [line.split()[1:] for line in log.read_text("utf-8").splitlines()] == [
        ["crash-1", "crash-2", "crash-3"],
        ["crash-2", "crash-3"],
        ["crash-3"],
    ]


def test_what_models_print_is_not_taken_for_a_message() -> None:
    """Output of Python, of C and of the bare descriptor goes past the messages."""
    rows = measured("print", "fine")

    assert rows == {"print": made_report("print"), "fine": made_report("fine")}


def test_figures_that_json_has_no_numbers_for_stay_large() -> None:
    """An undefined difference arrives as an enormous one, never as none and never as a fault."""
    (result,) = measured("nan")["nan"].results

    assert result.evidence.max_logprob_diff > 1e6
    assert result.outcome is Outcome.FAILED


def test_names_are_shared_out_in_groups(tmp_path: Path) -> None:
    """No process gets more names than a group has, and no name goes to two."""
    log = tmp_path / "log"
    names = [f"fine-{index}" for index in range(10)]
    rows = measured(*names, runner=runner_of(log=log))

    given = [line.split()[1:] for line in log.read_text("utf-8").splitlines()]
    assert sorted(map(len, given)) == [2, 4, 4]
    assert sorted(name for group in given for name in group) == names == sorted(rows)


def test_a_worker_that_does_not_start_is_told_apart_from_a_slow_architecture() -> None:
    """Before its first message a worker has another limit, and another reason."""
    limits = replace(PATIENT, start_s=0.5)

    assert the_fault(measured("late", runner=runner_of(limits=limits))["late"]) == (
        "its worker did not start"
    )


def test_an_interrupt_ends_the_workers_at_once(tmp_path: Path) -> None:
    """On Ctrl-C rows that are there stay, and no worker outlives the run."""
    log = tmp_path / "log"
    reports: list[ArchitectureReport] = []

    def found(report: ArchitectureReport) -> None:
        reports.append(report)
        if report.architecture == "fine":
            signal.raise_signal(signal.SIGINT)

    limits = replace(PATIENT, architecture_s=3600.0, group=2)
    with pytest.raises(KeyboardInterrupt), RunProgress(4) as progress:
        runner_of(limits=limits, log=log).measure(
            ("fine", "hang-1", "fine-2", "hang-2"), found=found, progress=progress
        )

    assert "fine" in {report.architecture for report in reports}
    assert not any(is_faulted(report) for report in reports)
    numbers = [int(line.split()[0]) for line in log.read_text("utf-8").splitlines()]
    assert numbers
    assert not any(psutil.pid_exists(number) for number in numbers)


def test_a_worker_says_what_computes() -> None:
    """Backend and BLAS come from a process that knows, also behind garbage."""
    ready = runner_of().what_computes()

    assert (ready.backend, ready.blas) == ("cpu", "FakeBLAS 1")


@pytest.mark.parametrize(
    ("script", "start_s", "message"),
    [
        ("import sys; sys.exit('no such library')", CEILING_S, "no such library"),
        ("import time; time.sleep(600)", 0.5, "within 0.5 s"),
        ("print('garbage')", CEILING_S, "exit code 0"),
    ],
)
def test_without_any_worker_there_is_an_error_and_no_matrix(
    script: str, start_s: float, message: str
) -> None:
    """Where nothing can be probed at all, the reason is told once and not of 126 rows."""
    runner = runner_of(sys.executable, "-c", script, limits=replace(PATIENT, start_s=start_s))
    with pytest.raises(StartupError, match=message):
        runner.what_computes()


def test_workers_share_the_cores() -> None:
    """So many threads as two at a time leave each, whatever the user's environment says."""
    script = "import os; print(os.environ['OPENBLAS_NUM_THREADS'], os.environ['HOME'])"
    cores = os.cpu_count() or 1
    runner = Runner({"HOME": "/h", "OPENBLAS_NUM_THREADS": "64"}, limits=RunnerLimits(workers=2))
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=runner.process(())._environ,
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.split() == [str(max(1, cores // 2)), "/h"]


def test_an_orphaned_worker_leaves(tmp_path: Path) -> None:
    """A worker whose runner was killed ends by itself, though its architecture hangs."""
    pid_file = tmp_path / "pid"
    hanging = (
        "import os, sys, time\n"
        "from machd_probes.worker import _end_with_parent\n"
        "_end_with_parent()\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    parent = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]])\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent, hanging, str(pid_file)]) as process:
        wait_until(lambda: pid_file.exists() and pid_file.read_text("utf-8") != "", "a worker")
        worker_pid = int(pid_file.read_text("utf-8"))
        process.kill()
    wait_until(lambda: not _runs(worker_pid), "the orphan ends")


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_terminal_shows_what_runs() -> None:
    """The bar names the architectures that are being probed, and how many are done."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with RunProgress(3, console) as progress:
        progress.advance()
        progress.running(["qwen3", "[llama]"])
        progress._progress.refresh()
        text = stream.getvalue()

    assert "[llama], qwen3" in text
    assert "1/3" in text


def test_a_pipe_gets_no_bar() -> None:
    """Off a terminal nothing is drawn."""
    stream = io.StringIO()
    with RunProgress(3, Console(file=stream)) as progress:
        progress.running(["qwen3"])
        progress.advance()

    assert stream.getvalue().strip() == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("/home/u/x/model.py failed", "model.py failed"),
        ('File "/usr/lib/python3.11/a.py", line 3', 'File "a.py", line 3'),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("one\n\n  two  \n", "one; two"),
        ("a/b and 1/2", "a/b and 1/2"),
        ("half \ud800 a character", "half ? a character"),
    ],
)
def test_a_detail_is_one_line_without_paths_of_this_machine(text: str, line: str) -> None:
    """A report can be shown to anyone: of a path only its last part is left."""
    assert shortened(text) == line


def test_a_long_detail_keeps_its_end() -> None:
    """The end of what a process says is what it died of."""
    line = shortened("start " + "x" * 5000 + " end")

    assert len(line) < 300
    assert line.startswith("…")
    assert line.endswith(" end")
