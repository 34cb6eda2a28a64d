"""``machd check --all-archs --vision``, with workers that need no mlx."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from unit.probes.fake_vision_worker import COMMAND

from machd.errors import ModelArchitectureError, StartupError
from machd.installed import how_to_install
from machd_probes.results_cache import ResultsCache
from machd_probes.runner import Runner, RunnerLimits
from machd_probes.vision_matrix import command
from machd_probes.vision_matrix.command import check_families

_KNOWN = ["crash", "right", "single", "text", "wrong"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go to a directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "family_names", lambda: list(_KNOWN))


def _check(*names: str, as_json: bool = True, required: bool = False) -> int:
    return check_families(
        names or None,
        as_json=as_json,
        use_cache=True,
        require_batched=required,
        runner=Runner(
            os.environ, command=COMMAND, limits=RunnerLimits(architecture_s=20.0, workers=1)
        ),
    )


def test_every_family_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Verdicts follow from results: right, served one at a time, wrong, text only, and broken off."""
    assert _check() == 1
    answer = json.loads(capsys.readouterr().out)
    rows = {row["family"]: row for row in answer["families"]}
    assert list(rows) == _KNOWN
    assert answer["summary"] == {"supported": 2, "blocked": 1, "unknown": 1, "text_only": 1}
    assert answer["versions"]["mlx_vlm"]
    assert rows["right"]["continuous_batching"]["verdict"] == "supported"
    assert rows["right"]["images"]["evidence"]["cases"] > 0
    assert rows["single"]["continuous_batching"]["verdict"] == "unknown"
    assert rows["text"]["images"]["reason"] == "text alone"
    assert (rows["text"]["served"], rows["crash"]["served"]) == (False, True)


@pytest.mark.parametrize(
    ("names", "required", "code"),
    [
        (("right", "text"), False, 0),
        (("right",), True, 0),
        (("right", "single"), True, 1),
        (("right", "text"), True, 1),
        (("right", "wrong"), False, 1),
    ],
)
def test_exit_code_tells_what_holds(names: tuple[str, ...], *, required: bool, code: int) -> None:
    """A wrong answer is 1 in any case; with the requirement, so is a family that is not batched."""
    assert _check(*names, required=required) == code


def test_the_table_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns no line is longer, and reasons stand below the table."""
    monkeypatch.setenv("COLUMNS", "80")
    _check(as_json=False)
    output = capsys.readouterr().out
    assert max(len(line) for line in output.splitlines()) <= 80
    assert "text only: text" in output
    assert "wrong, images: blocked" in output
    _check("right", as_json=False)
    assert "1 of 1 were measured earlier" in capsys.readouterr().out


def test_an_interrupt_prints_what_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C gives the rows until then, marked as incomplete, and the code 130."""
    monkeypatch.setattr(
        ResultsCache, "put", lambda _cache, _report: signal.raise_signal(signal.SIGINT)
    )
    monkeypatch.setattr(command, "family_names", lambda: ["right", "hang"])
    assert _check() == 130
    said = capsys.readouterr()
    assert json.loads(said.out)["complete"] is False
    assert "1 of 2 families were probed" in said.err


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    """Bad usage starts no worker, and the message helps."""
    with pytest.raises(ModelArchitectureError, match=r"'rihgt'; the nearest are right"):
        _check("rihgt")


def test_without_the_extra_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the command that installs it."""
    monkeypatch.setattr(command, "installed_version", lambda _name: None)
    with pytest.raises(StartupError, match=re.escape(how_to_install("vision"))):
        _check("right")


def test_the_command_needs_no_mlx() -> None:
    """The process that starts workers imports neither mlx nor mlx-vlm."""
    script = (
        "import sys; from machd_probes.vision_matrix import command; command.family_names()\n"
        "print([one for one in ('mlx', 'mlx_lm', 'mlx_vlm', 'transformers') if one in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
