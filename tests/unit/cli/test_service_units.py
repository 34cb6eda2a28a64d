"""The files for systemd and launchd, judged by the tools that will read them."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest
from support.programs.installed_programs import needs_programs

from machd.cli.launchd_plists import LABEL, agent_plist, daemon_plist
from machd.cli.service_units import Installation, UnitFile, cuda_drop_in, system_units, user_units

_SHIPPED = Path(__file__).parents[3] / "systemd"
_needs_systemd = needs_programs("systemd-analyze")


def _write(folder: Path, *units: UnitFile) -> Path:
    for unit in units:
        path = folder / unit.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unit.text)
    return folder / "machd.service"


def _analyze(*arguments: str | Path, runtime: Path) -> str:
    """Return what systemd-analyze has to say; fails unless it is content."""
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


def test_a_stop_leaves_a_users_other_daemons_alone() -> None:
    """The user's directory holds the token of a daemon run by hand, too; the system's holds no other's."""
    (user, *_), (system, *_) = (
        units(Installation(("/usr/bin/machd",))) for units in (user_units, system_units)
    )
    assert "\nEnvironment=LME_ADMIN_LISTEN=unix:%t/machd/admin.sock\n" in user.text
    assert "\nRuntimeDirectory=machd\n" in user.text
    assert "\nRuntimeDirectoryPreserve=yes\n" in user.text
    assert "RuntimeDirectoryPreserve" not in system.text


@_needs_systemd
def test_the_shipped_units_are_right(tmp_path: Path) -> None:
    """So are the files of the repository, as they are."""
    folder = tmp_path / "units"
    shutil.copytree(_SHIPPED, folder)
    service = folder / "machd.service"
    assert _analyze("verify", service, folder / "machd.socket", runtime=tmp_path) == ""
    _analyze("security", "--offline=yes", "--threshold=15", service, runtime=tmp_path)


@_needs_systemd
def test_the_shipped_unit_of_ranks_is_right(tmp_path: Path) -> None:
    """It restarts a group whatever exit code it ended with, and lets rank 0 finish what is open."""
    unit = Path(shutil.copy(_SHIPPED / "ranks" / "machd-ranks.service", tmp_path))
    text = unit.read_text()

    assert _analyze("verify", unit, runtime=tmp_path) == ""
    for line in ("Type=notify", "NotifyAccess=all", "Restart=always", "KillMode=control-group"):
        assert f"\n{line}\n" in text
    assert "\nExecStop=/bin/sh -c 'pkill -TERM -P $MAINPID " in text


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
    assert "reset-failed machd.service machd.socket" in text
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


def test_the_shipped_property_list_of_ranks_is_what_launchd_knows() -> None:
    """It starts the same command as the unit for systemd, and starts it again whatever it ended with."""
    job = plistlib.loads((_SHIPPED / "ranks" / "org.machd.ranks.plist").read_bytes())
    unit = (_SHIPPED / "ranks" / "machd-ranks.service").read_text()
    launch, *arguments = job["ProgramArguments"]

    assert set(job) <= _KEYS
    assert Path(launch).name == "mlx.launch"
    assert f"mlx.launch {' '.join(arguments)}\n" in unit
    assert job["KeepAlive"] is True
