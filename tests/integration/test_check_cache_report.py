"""``machd check --cache-report``: the command, with the template and the tokenizer of a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.clients.planted_changes import PLANTS

from machd.cli.check import check
from machd.engine.backend.mlx_lm_import import import_mlx_lm


@pytest.fixture(autouse=True, scope="module")
def _whole_mlx_lm() -> None:
    """Other tests of this process need more of it than the command imports."""
    import_mlx_lm()


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    """Two requests, the later one with a change in its system message."""
    plant = next(one for one in PLANTS if one.name == "opencode_reminder_in_system")
    lines = [{"path": one.path, "body": one.body} for one in plant.requests()]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return file


def test_cache_report_names_change_with_real_template(file: Path) -> None:
    """The report of the embedded model names the message that changed, and the tokens behind it that it shares."""
    result = CliRunner().invoke(check, ["--cache-report", str(file), "--json"])

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (cause,) = report["causes"]
    assert (cause["change"], cause["message_index"], cause["role"]) == ("message_text", 0, "system")
    computed = report["lookups"][1]["prompt_tokens"] - report["lookups"][1]["found_tokens"]
    assert 0 < cause["saved_tokens"] < computed
    assert "190412" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--measure"], "--measure and --cache-report do not go together"),
        (["--arch", "llama"], "--cache-report and --arch do not go together"),
        (["--no-cache-prefix"], "needs cache.prefix"),
    ],
)
def test_cache_report_refuses_contradictions(file: Path, arguments: list[str], told: str) -> None:
    """Options that ask for something else, and a cache that is off, are usage errors of one line."""
    result = CliRunner().invoke(check, ["--cache-report", str(file), *arguments])

    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
