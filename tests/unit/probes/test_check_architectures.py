"""``machd check --all-archs`` and ``--arch``, with workers that need no mlx."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from unit.probes.fake_worker import COMMAND, LOG_VARIABLE

from machd.capabilities.matrix import ArchitectureReport
from machd.errors import EngineFaultError, ModelArchitectureError, StartupError
from machd_probes import command
from machd_probes.command import check_architectures, measured_matrix
from machd_probes.results_cache import ResultsCache, results_directory
from machd_probes.runner import Runner, RunnerLimits
from machd_probes.worker_messages import BLAS_VARIABLE

KNOWN = ["fine-1", "fine-2", "crash", "exit"]


@pytest.fixture(name="log")
def _log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workers' log; results go to a directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "architecture_names", lambda: list(KNOWN))
    monkeypatch.setattr(command, "encoder_families", list)
    return tmp_path / "log"


def runner_of(log: Path) -> Runner:
    """Fake workers that log what they are given."""
    return Runner(
        {**os.environ, LOG_VARIABLE: str(log)},
        command=COMMAND,
        limits=RunnerLimits(architecture_s=5.0, workers=1),
    )


def probed(log: Path) -> list[str]:
    """The first name of each worker since the last look."""
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [line.split()[1] for line in lines]


def check(
    log: Path, *names: str, as_json: bool = True, use_cache: bool = True, required: bool = False
) -> int:
    """Run the command on names, or on all."""
    return check_architectures(
        names or None,
        as_json=as_json,
        use_cache=use_cache,
        require_batched=required,
        runner=runner_of(log),
    )


def test_every_architecture_has_a_row(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that mlx-lm has are in the answer, those that crash among them."""
    assert check(log) == 0
    answer = json.loads(capsys.readouterr().out)

    assert [row["architecture"] for row in answer["architectures"]] == sorted(KNOWN)
    assert answer["summary"] == {"supported": 2, "blocked": 0, "unknown": 2}
    assert answer["versions"]["backend"] == "cpu"
    assert answer["versions"]["blas"] == "FakeBLAS 1"


def test_what_was_measured_is_not_measured_again(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second answer comes from the cache, but for rows whose run broke off."""
    check(log)
    first = capsys.readouterr().out
    assert probed(log) == ["fine-1", "exit"]
    check(log)

    assert probed(log) == ["crash", "exit"]
    assert capsys.readouterr().out == first
    check(log, "fine-2")
    assert probed(log) == []


def test_without_the_cache_nothing_is_read_or_written(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--no-cache`` is as if there were none, for this run and for the next."""
    check(log, "fine-1", use_cache=False)
    assert not (tmp_path / "cache").exists()
    check(log, "fine-1")
    check(log, "fine-1", as_json=False, use_cache=False)

    assert probed(log) == ["fine-1"] * 3
    assert "measured earlier" not in capsys.readouterr().out


def test_the_table_says_what_is_old(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader of the table learns how to have it measured anew."""
    check(log, "fine-1", as_json=False)
    assert "measured earlier" not in capsys.readouterr().out
    check(log, "fine-1", as_json=False)

    assert "1 of 1 were measured earlier; --no-cache" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "required", "code"),
    [
        (("fine-1", "fine-2"), True, 0),
        (("fine-1", "exit"), True, 1),
        (("fine-1", "exit"), False, 0),
    ],
)
@pytest.mark.usefixtures("capsys")
def test_batching_can_be_required(
    log: Path, names: tuple[str, ...], *, required: bool, code: int
) -> None:
    """With the requirement the code is 1 unless each of them is supported; unknown is not."""
    assert check(log, *names, required=required) == code


def test_an_unknown_name_is_refused_with_the_nearest(log: Path) -> None:
    """Bad usage starts no worker, and the message helps."""
    with pytest.raises(ModelArchitectureError, match=r"'fine-3'; the nearest are fine-"):
        check(log, "fine-3")

    assert ModelArchitectureError.exit_code == 2
    assert probed(log) == []


def test_an_interrupt_prints_what_is_known(
    log: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C gives the rows until then, marked as incomplete, and they are kept; code 130."""
    real_put = ResultsCache.put

    def put(cache: ResultsCache, report: ArchitectureReport) -> None:
        real_put(cache, report)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ResultsCache, "put", put)
    monkeypatch.setattr(command, "architecture_names", lambda: ["fine-1", "hang", "fine-2"])
    code = check(log)
    said = capsys.readouterr()
    answer = json.loads(said.out)

    assert code == 130
    assert answer["complete"] is False
    assert [row["architecture"] for row in answer["architectures"]] == ["fine-1"]
    assert said.err == "machd: interrupted; 1 of 3 architectures were probed\n"
    directory = results_directory(tmp_path / "cache")
    assert len(list(directory.rglob("*.json"))) == 1


def test_kept_figures_are_measured_anew_and_whole(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the reference is written from a full run without the cache, or not at all."""
    check(log)
    probed(log)
    matrix = measured_matrix(runner=runner_of(log))

    assert probed(log) == ["fine-1", "exit"]
    assert set(matrix.reports) == set(KNOWN)

    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "measure", interrupt)
    with pytest.raises(EngineFaultError, match="interrupted"):
        measured_matrix(runner=runner_of(log))


@pytest.mark.parametrize("blas", ["off", None])
@pytest.mark.usefixtures("log", "capsys")
def test_the_setting_reaches_the_workers(
    blas: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that a flag or a file names is what measures; else the environment's."""
    monkeypatch.setenv(BLAS_VARIABLE, "auto")
    seen = tmp_path / "seen"
    script = (
        "import os, pathlib, sys\n"
        f"pathlib.Path(sys.argv[1]).write_text(os.environ[{BLAS_VARIABLE!r}])\n"
        "sys.exit('enough')\n"
    )
    monkeypatch.setattr(
        command,
        "Runner",
        lambda environ: Runner(environ, command=(sys.executable, "-c", script, str(seen))),
    )
    with pytest.raises(StartupError, match="enough"):
        check_architectures(None, as_json=True, use_cache=False, require_batched=False, blas=blas)

    assert seen.read_text("utf-8") == (blas or "auto")


def test_the_command_needs_no_mlx() -> None:
    """Neither mlx nor mlx-lm is imported by the process that reads the cache."""
    script = (
        "import sys, machd_probes.command\n"
        "print([one for one in ('mlx', 'mlx.core', 'mlx_lm', 'transformers')"
        " if one in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "[]"
