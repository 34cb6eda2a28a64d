"""``machd install-service``: which files it writes where, and what it says is to be done next."""

from __future__ import annotations

import plistlib
import shlex
import shutil
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from machd.cli.install_service import install_service, running_command
from machd.cli.launchd_plists import LABEL
from machd.errors import SettingsError, StartupError


@pytest.fixture(name="home")
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("LME_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    return home


def _install(*arguments: str) -> Result:
    return CliRunner().invoke(install_service, list(arguments))


def test_a_user_gets_units_in_their_own_folder(home: Path) -> None:
    """The files are there, run this very machd, and the next commands are named."""
    result = _install("--user", "--platform", "linux")
    assert result.exit_code == 0, result.output
    folder = home / ".config" / "systemd" / "user"
    service = folder / "machd.service"
    assert (folder / "machd.socket").is_file()
    assert stat.S_IMODE(service.stat().st_mode) == 0o644
    command = next(line for line in service.read_text().splitlines() if "ExecStart=" in line)
    assert Path(command.removeprefix("ExecStart=").split()[0]).is_absolute()
    assert "systemctl --user daemon-reload" in result.output
    assert "systemctl --user enable --now machd.service machd.socket" in result.output


def test_a_dry_run_writes_nothing(home: Path) -> None:
    """It prints every file with its path."""
    result = _install("--user", "--dry-run", "--platform", "linux")
    assert result.exit_code == 0
    assert f"# {home}/.config/systemd/user/machd.service\n[Unit]" in result.stdout
    assert "Next:" in result.stderr
    assert list(home.iterdir()) == []


def test_a_file_that_differs_is_not_overwritten(home: Path) -> None:
    """Nothing is written unless it is forced; the same again is no difference."""
    service = home / ".config" / "systemd" / "user" / "machd.service"
    service.parent.mkdir(parents=True)
    service.write_text("[Service]\nExecStart=/mine\n")
    result = _install("--user", "--platform", "linux")
    assert isinstance(result.exception, StartupError)
    assert "--force" in result.exception.message
    assert service.read_text() == "[Service]\nExecStart=/mine\n"
    assert not service.with_name("machd.socket").exists()

    assert _install("--user", "--force", "--platform", "linux").exit_code == 0
    assert "/mine" not in service.read_text()
    assert _install("--user", "--platform", "linux").exit_code == 0


def test_the_settings_file_is_that_of_the_service(home: Path, tmp_path: Path) -> None:
    """Its path is absolute in the unit, and its address is the socket's; a broken one is refused."""
    config = tmp_path / "mine.toml"
    config.write_text("[server]\nport = 9191\n")
    result = _install("--user", "--dry-run", "--config", "mine.toml", "--platform", "linux")
    assert f"serve --config {config}\n" in result.stdout
    assert "ListenStream=127.0.0.1:9191\n" in result.stdout
    assert home.is_dir()

    config.write_text("[server]\nport = 'x'\n")
    result = _install("--user", "--dry-run", "--config", "mine.toml", "--platform", "linux")
    assert isinstance(result.exception, SettingsError)


def test_what_a_system_service_cannot_see_is_refused() -> None:
    """A system service cannot read a settings file in a user's home."""
    result = _install("--system", "--dry-run", "--config", "/home/me/machd.toml")
    assert isinstance(result.exception, StartupError)
    assert "--user" in result.exception.message


def test_missing_rights_are_named(home: Path) -> None:
    """A folder that cannot be made is an error that says how to get further."""
    (home / ".config").write_text("not a folder")
    result = _install("--user", "--platform", "linux")
    assert isinstance(result.exception, StartupError)
    assert "sudo" in result.exception.message


def test_macos_gets_a_property_list(home: Path) -> None:
    """It goes to LaunchAgents, and launchctl is named."""
    result = _install("--user", "--platform", "macos")
    assert result.exit_code == 0, result.output
    path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    assert (
        plistlib.loads(path.read_bytes())["StandardErrorPath"] == f"{home}/Library/Logs/machd.log"
    )
    assert f"launchctl bootstrap gui/$(id -u) {path}" in result.output


def _commands(output: str) -> list[list[str]]:
    """The words of each command that is to be run next, as a shell reads them."""
    return [
        shlex.split(line.replace("$(id -u)", "501"), comments=True)
        for line in output.partition("Next:\n")[2].splitlines()
    ]


@pytest.mark.parametrize("word", ["with space", "do$llar", "quo'te"])
def test_a_strange_home_is_one_word_for_the_shell(home: Path, word: str) -> None:
    """The command that launchd is given the list with can be pasted, whatever the home is called."""
    strange = home / word
    strange.mkdir()
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("HOME", str(strange))
        result = _install("--user", "--platform", "macos")
    path = strange / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    assert _commands(result.output)[-1] == ["launchctl", "bootstrap", "gui/501", str(path)]


@pytest.mark.parametrize("platform", ["linux", "macos"])
@pytest.mark.parametrize("scope", ["--user", "--system"])
def test_default_model_is_to_be_fetched_before_the_service_starts(
    home: Path, machd: Path, monkeypatch: pytest.MonkeyPatch, scope: str, platform: str
) -> None:
    """A service fetches nothing: the command runs with the service's own cache, and before the start."""
    assert home.is_dir()
    monkeypatch.setattr(sys, "argv", [str(machd)])
    monkeypatch.setattr("machd.engine.loading.embedded.locate", lambda _: None)
    result = _install(scope, "--dry-run", "--platform", platform)
    commands = _commands(result.stderr)
    (pull,) = [one for one in commands if one[-3:] == [str(machd), "model", "pull"]]
    assert (pull[0] == "sudo") == (scope == "--system")
    starts = [one for one in commands if {"enable", "bootstrap"} & set(one)]
    assert commands.index(pull) < commands.index(starts[0])


@pytest.mark.parametrize(
    ("settings", "is_here"),
    [("[model]\npath = '/srv/model'\n", False), ("", True)],
    ids=["another", "here"],
)
def test_model_that_is_not_needed_or_is_here_is_not_fetched(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, *, is_here: bool
) -> None:
    """Only what the service would miss is named."""
    assert home.is_dir()
    config = tmp_path / "mine.toml"
    config.write_text(settings)
    found = tmp_path / "model.gguf" if is_here else None
    monkeypatch.setattr("machd.engine.loading.embedded.locate", lambda _: found)
    result = _install("--user", "--dry-run", "--config", "mine.toml", "--platform", "linux")
    assert result.exit_code == 0, result.output
    assert "model pull" not in result.stderr


@pytest.mark.parametrize("platform", ["linux", "macos"])
@pytest.mark.parametrize("word", ["with space", "do$llar", "quo'te"])
def test_a_strange_path_is_one_word_for_the_shell(
    machd: Path, monkeypatch: pytest.MonkeyPatch, word: str, platform: str
) -> None:
    """So can those that make the settings file, whatever machd's and the file's folders are called."""
    strange = machd.parent / word
    strange.mkdir()
    command = shutil.copy(machd, strange / "machd")
    monkeypatch.setattr(sys, "argv", [str(command)])
    config = strange / "machd.toml"
    monkeypatch.setattr("machd.cli.install_service.CONFIG_PATH", config)
    result = _install("--system", "--dry-run", "--platform", platform)
    assert result.exit_code == 0, result.output
    assert _commands(result.stderr)[:2] == [
        ["sudo", "mkdir", "-p", str(strange)],
        ["sudo", str(command), "config", "init", str(config)],
    ]


def test_for_whom_has_to_be_said() -> None:
    """Neither is the default: one of them needs root."""
    assert _install("--dry-run").exit_code == 2


def test_the_running_machd_is_found(machd: Path, tmp_path: Path) -> None:
    """Its script where it has one, without following links, else the interpreter."""
    link = tmp_path / "venv" / "machd"
    link.parent.mkdir()
    link.symlink_to(machd)
    assert running_command(str(link), sys.executable) == (str(link),)
    assert running_command("/x/machd/__main__.py", str(tmp_path / "python")) == (
        str(tmp_path / "python"),
        "-m",
        "machd",
    )
