"""Encoders in ``machd check --all-archs`` and ``--arch``, with workers that need no mlx."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unit.probes import fake_encoder_worker as encoders
from unit.probes import fake_worker

from machd.errors import EngineFaultError, ModelArchitectureError
from machd_probes import command
from machd_probes.command import check_architectures
from machd_probes.encoder_matrix.catalogue import encoder_families
from machd_probes.encoder_matrix.command import measured_encoders
from machd_probes.encoder_matrix.tiny_encoders import TINY_ENCODERS
from machd_probes.runner import Runner, RunnerLimits

_GENERATING = ["fine-1", "qwen3"]
_LIMITS = RunnerLimits(architecture_s=20.0, workers=1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go to a directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "architecture_names", lambda: list(_GENERATING))


def _encoders(limits: RunnerLimits = _LIMITS) -> Runner:
    return Runner(os.environ, command=encoders.COMMAND, limits=limits)


def _check(*names: str, as_json: bool = True, required: bool = False) -> int:
    return check_architectures(
        names or None,
        as_json=as_json,
        use_cache=True,
        require_batched=required,
        runner=Runner(os.environ, command=fake_worker.COMMAND, limits=_LIMITS),
        encoders=_encoders(),
    )


def test_every_family_has_rows_beside_the_architectures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts and figures follow from results: right, wrong, broken off, and not built."""
    families = ["bert", "qwen3", "mistral", "modernbert"]
    monkeypatch.setattr(command, "encoder_families", lambda: families)
    assert _check() == 1
    answer = json.loads(capsys.readouterr().out)
    assert [row["architecture"] for row in answer["architectures"]] == _GENERATING
    found = answer["encoders"]
    rows = {row["encoder"]: row for row in found["rows"]}
    assert rows.keys() == {
        name for name, one in TINY_ENCODERS.items() if one.config["model_type"] in families
    }
    assert found["versions"]["blas"] == "FakeBLAS 1"
    assert sum(found["summary"].values()) == len(rows)
    right, wrong = rows[encoders.RIGHT], rows[encoders.WRONG]
    assert right["batch"]["verdict"] == "supported"
    assert right["batch"]["texts"] == 20
    assert right["batch"]["least_cosine"] == pytest.approx(1 - 2.5e-12, abs=1e-15)
    assert "1 - 2.5e-12" in right["batch"]["reason"]
    assert right["kernels"] is None
    assert wrong["batch"]["verdict"] == "blocked"
    assert "texts of 7 tokens" in wrong["batch"]["reason"]
    assert rows[encoders.CLASSIFIER]["batch"]["max_logit_diff"] == 3e-6
    assert "least_cosine" not in rows[encoders.CLASSIFIER]["batch"]
    assert rows[encoders.CRASHING]["batch"]["verdict"] == "unknown"
    assert "SIGSEGV" in rows[encoders.CRASHING]["problem"]
    assert rows[encoders.NOT_BUILT]["batch"]["reason"] == "the extra vision is not installed"


@pytest.mark.parametrize(
    ("names", "required", "code"),
    [
        (("fine-1", "bert"), True, 0),
        (("qwen3",), False, 1),
        (("mistral",), False, 0),
        (("mistral",), True, 1),
    ],
)
def test_exit_code_tells_what_holds(names: tuple[str, ...], *, required: bool, code: int) -> None:
    """A text that is wrong in a batch is 1 in any case; with the requirement, so is an encoder of which nothing is known."""
    assert _check(*names, required=required) == code


def test_a_name_stands_for_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    """qwen3 generates and embeds; fine-1 generates alone, and bert embeds alone."""
    _check("qwen3", "fine-1")
    both = json.loads(capsys.readouterr().out)
    assert [row["architecture"] for row in both["architectures"]] == ["fine-1", "qwen3"]
    assert [row["encoder"] for row in both["encoders"]["rows"]] == ["qwen3"]
    _check("fine-1")
    assert "encoders" not in json.loads(capsys.readouterr().out)
    _check("bert")
    embeds = json.loads(capsys.readouterr().out)
    assert embeds["architectures"] == []
    assert "bert-cls" in [row["encoder"] for row in embeds["encoders"]["rows"]]


def test_an_unknown_name_is_refused_with_the_nearest_of_both() -> None:
    """A slip of the pen finds a family of encoders, too."""
    with pytest.raises(ModelArchitectureError, match=r"'camembrt'; the nearest are camembert"):
        _check("camembrt")


def test_the_table_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns no line is longer; the least cosine stands in its column, and reasons below."""
    monkeypatch.setenv("COLUMNS", "80")
    _check("bert", "qwen3", "camembert", as_json=False)
    output = capsys.readouterr().out
    assert max(len(line) for line in output.splitlines()) <= 80
    line = next(line for line in output.splitlines() if line.startswith("bert "))
    assert line.split() == ["bert", "yes", "yes", "-", "40", "1", "-", "2.5e-12", "-"]
    assert "qwen3, batch: blocked" in output
    assert "least cosine of 20 is 0.75" in " ".join(output.split())
    _check("bert", as_json=False)
    assert "were measured earlier" in capsys.readouterr().out


def test_kept_figures_are_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the reference holds every encoder, or is not written."""
    monkeypatch.setattr(
        "machd_probes.encoder_matrix.command.encoder_families", lambda: ["bert", "roberta"]
    )
    kept = measured_encoders(runner=_encoders())
    assert {row.family for row in kept.matrix.rows} == {"bert", "roberta"}

    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "measure", interrupt)
    with pytest.raises(EngineFaultError, match="interrupted"):
        measured_encoders(runner=_encoders())


def test_the_catalogue_has_every_family_that_is_served() -> None:
    """A family or a classifier without a tiny encoder would have no row, and nothing would say so."""
    from machd.engine.encoding.families import FAMILIES  # noqa: PLC0415 - compared with, not used

    assert encoder_families() == sorted(FAMILIES)
    heads = {head for one in FAMILIES.values() for head in one.classifiers}
    architectures = {str(name) for one in TINY_ENCODERS.values() for name in _names(one.config)}
    assert heads <= architectures


def _names(config: object) -> list[object]:
    assert isinstance(config, dict)
    names = config["architectures"]
    assert isinstance(names, list)
    return names


def test_the_command_needs_no_mlx() -> None:
    """The process that starts workers imports neither mlx nor mlx-vlm nor numpy."""
    script = (
        "import sys; from machd_probes.encoder_matrix import command, matrix_file, markdown\n"
        "print([one for one in ('mlx', 'mlx_lm', 'mlx_vlm', 'numpy') if one in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
