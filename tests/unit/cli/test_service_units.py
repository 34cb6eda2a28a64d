"""The files for systemd and launchd, judged by the tools that will read them."""

from __future__ import annotations

import os
import plistlib
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from machd.cli.install_service import install_service, running_command
from machd.cli.launchd_plists import LABEL, agent_plist, daemon_plist
from machd.cli.service_units import Installation, UnitFile, cuda_drop_in, system_units, user_units
from machd.errors import SettingsError, StartupError

_SHIPPED = Path(__file__).parents[3] / "systemd"
_needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing"
)


@pytest.fixture(name="machd")
def _machd(tmp_path: Path) -> Path:
    """An executable of that name."""
    path = tmp_path / "bin" / "machd"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def _write(folder: Path, *units: UnitFile) -> Path:
    for unit in units:
        path = folder / unit.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unit.text)
    return folder / "machd.service"


def _analyze(*arguments: str | Path, runtime: Path) -> str:
    """What systemd-analyze has to say; fails unless it is content."""
    done = subprocess.run(
        ["systemd-analyze", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@_needs_systemd
@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_system_units_are_right_and_tight(
    tmp_path: Path, machd: Path, *, has_gpu: bool
) -> None:
    """``verify`` finds nothing to say and ``security`` an exposure of 1.5 at the most."""
    units = (*system_units(Installation((str(machd),))), *([cuda_drop_in()] if has_gpu else []))
    service = _write(tmp_path / "units", *units)
    socket = service.with_name("machd.socket")
    assert _analyze("verify", service, socket, runtime=tmp_path) == ""
    _analyze("security", "--offline=yes", "--threshold=15", service, runtime=tmp_path)


@_needs_systemd
@pytest.mark.parametrize("word", ["with space", "50%", "do$llar", "semi;colon"])
def test_strange_paths_are_quoted(tmp_path: Path, machd: Path, word: str) -> None:
    """A path with characters that mean something to systemd is still one word."""
    strange = tmp_path / word
    strange.mkdir()
    command = shutil.copy(machd, strange / "machd")
    installation = Installation((str(command),), strange / "with \"quotes'.toml")
    service = _write(tmp_path / "units", *system_units(installation))
    assert _analyze("verify", service, runtime=tmp_path) == ""


@_needs_systemd
def test_the_user_units_are_right(tmp_path: Path, machd: Path) -> None:
    """They are right for a user's own service manager, which enforces less."""
    service = _write(tmp_path / "units", *user_units(Installation((str(machd),), None)))
    assert _analyze("verify", "--user", service, runtime=tmp_path) == ""


@_needs_systemd
def test_the_shipped_units_are_right(tmp_path: Path, machd: Path) -> None:
    """So are the files of the repository, once there is a machd in /usr/bin."""
    folder = tmp_path / "units"
    shutil.copytree(_SHIPPED, folder)
    service = folder / "machd.service"
    service.write_text(service.read_text().replace("/usr/bin/machd", str(machd)))
    assert _analyze("verify", service, folder / "machd.socket", runtime=tmp_path) == ""
    _analyze("security", "--offline=yes", "--threshold=15", service, runtime=tmp_path)


@pytest.mark.parametrize(
    ("host", "port", "address", "has_wall"),
    [
        ("127.0.0.1", 8080, "127.0.0.1:8080", True),
        ("localhost", 9000, "127.0.0.1:9000", True),
        ("::1", 8080, "[::1]:8080", True),
        ("0.0.0.0", 8080, "0.0.0.0:8080", False),
        ("llm.example.org", 8080, None, False),
        ("unix:/run/machd/s", 8080, None, True),
        ("127.0.0.1", 0, None, True),
    ],
)
def test_the_socket_is_where_the_settings_have_it(
    host: str, port: int, address: str | None, *, has_wall: bool
) -> None:
    """An IP address gets a socket unit; beyond loopback other machines are not walled off."""
    service, *sockets = system_units(Installation(("/usr/bin/machd",), host=host, port=port))
    assert [f"ListenStream={address}\n" in unit.text for unit in sockets] == (
        [True] if address else []
    )
    assert ("Sockets=machd.socket" in service.text) == (address is not None)
    assert ("IPAddressDeny=any" in service.text) == has_wall


def test_the_service_says_what_the_daemon_keeps_to() -> None:
    """Readiness and signs of life come from the main process, and bad settings are not retried."""
    text = system_units(Installation(("/usr/bin/machd",)))[0].text
    for line in (
        "Type=notify",
        "NotifyAccess=main",
        "ExecStart=/usr/bin/machd serve --config /etc/machd/machd.toml",
        "Restart=on-failure",
        "RestartPreventExitStatus=2",
        "RuntimeDirectoryMode=0700",
        "KillMode=mixed",
    ):
        assert f"\n{line}\n" in text
    # ProcSubset=pid would hide /proc/meminfo, without which memory cannot be read.
    assert "\nProcSubset=all\n" in text


_KEYS = {
    "Label", "ProgramArguments", "RunAtLoad", "KeepAlive", "ThrottleInterval", "ExitTimeOut",
    "ProcessType", "Umask", "SoftResourceLimits", "HardResourceLimits", "EnvironmentVariables",
    "StandardOutPath", "StandardErrorPath", "LimitLoadToSessionType", "UserName",
    "WorkingDirectory",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["agent", "daemon"])
def test_the_property_lists_are_what_launchd_knows(kind: str) -> None:
    """They can be read back, have only keys of launchd.plist(5), and restart after failures alone."""
    installation = Installation(("/usr/local/bin/machd",))
    home = Path("/Users/a b")
    unit = agent_plist(installation, home=home) if kind == "agent" else daemon_plist(installation)
    job = plistlib.loads(unit.text.encode())
    assert unit.name == f"{LABEL}.plist"
    assert set(job) <= _KEYS
    assert job["Label"] == LABEL
    assert job["ProgramArguments"][:2] == ["/usr/local/bin/machd", "serve"]
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["Umask"] == 0o077
    assert job["ExitTimeOut"] > 60  # limits.drain_timeout_s
    assert ("UserName" in job) == (kind == "daemon"), "the machine's daemon is not root"


# --- machd install-service --------------------------------------------------------------------


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
    """A settings file in somebody's home would not be there for it."""
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
