"""Shells complete machd's commands, options and paths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.clocks.polling import CEILING_S
from support.programs.installed_programs import needs_programs

from machd.cli.commands import command_line
from machd.cli.completion import Shell, completion_script

_PLACES = {
    "bash": ".local/share/bash-completion/completions/machd",
    "zsh": ".local/share/machd/completion.zsh",
    "fish": ".config/fish/completions/machd.fish",
}


@pytest.fixture(name="home")
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(command_line, ["completion", *arguments])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_one_command_installs_what_another_prints(home: Path, shell: Shell) -> None:
    """The file lies where the shell looks for it, or where its start-up file says."""
    result = _run(shell, "--install")
    assert result.exit_code == 0, result.output
    script = home / _PLACES[shell]
    assert f"Wrote {script}" in result.output
    assert _run(shell).output.rstrip("\n") == script.read_text("utf-8").rstrip("\n")
    if shell == "zsh":
        assert f"source {script}" in (home / ".zshrc").read_text("utf-8").splitlines()


def test_the_zshrc_gets_its_line_once_and_keeps_the_others(home: Path) -> None:
    """A last line without an end is not joined to it."""
    startup = home / ".zshrc"
    startup.write_text("alias ll='ls -l'", "utf-8")
    for _ in range(2):
        assert _run("zsh", "--install").exit_code == 0
    assert startup.read_text("utf-8").splitlines() == [
        "alias ll='ls -l'",
        f"source {home / _PLACES['zsh']}",
    ]


def test_a_place_that_cannot_be_written_is_named(home: Path) -> None:
    """The error says how to get the script all the same."""
    (home / ".local").write_text("a file")
    result = _run("bash", "--install")
    assert result.exception is not None
    assert "machd completion bash" in str(result.exception)


@needs_programs("bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["machd", "serv"], ["serve"]),
        (["machd", "ctl", "dra"], ["drain"]),
        (["machd", "completion", "f"], ["fish"]),
        (["machd", "serve", "--server-ho"], ["--server-host"]),
    ],
    ids=" ".join,
)
def test_bash_completes_with_the_script(
    tmp_path: Path, typed: list[str], completed: list[str]
) -> None:
    """The script asks the program that is on the path, and bash gets its answer."""
    program = tmp_path / "machd"
    program.write_text(f"#!{sys.executable}\nfrom machd.cli.main import main\nmain()\n")
    program.chmod(0o755)
    (tmp_path / "script").write_text(completion_script("bash", command_line), "utf-8")
    ask = (
        f"source {tmp_path}/script; COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; "
        '_machd_completion machd; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", ask],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=True,
    )  # fmt: skip
    assert done.stdout.split() == completed, done.stderr
