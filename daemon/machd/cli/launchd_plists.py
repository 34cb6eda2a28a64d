"""machd as a launchd job: the property lists, for a user's session and for the machine.

launchd has no watchdog: a daemon whose engine hangs for ``engine.stall_timeout_s`` ends itself
with 70, and ``KeepAlive`` starts it again. It cannot tell one exit code from another either: after
2, bad settings, it tries every ``ThrottleInterval`` seconds.
"""

from __future__ import annotations

import plistlib
from pathlib import Path

from machd.cli.service_units import Installation, UnitFile

LABEL = "org.machd.machd"

_EXIT_S = 90
"""Between the first signal and SIGKILL; more than limits.drain_timeout_s by default."""

_THROTTLE_S = 10
_OPEN_FILES = 8192
_UMASK = 0o077
DAEMON_USER = "_machd"
DAEMON_HOME = Path("/usr/local/var/machd")


def agent_plist(installation: Installation, *, home: Path) -> UnitFile:
    """For a user, while logged in; ``home`` is theirs."""
    log = str(home / "Library" / "Logs" / "machd.log")
    return _plist(_job(installation, log=log) | {"LimitLoadToSessionType": "Aqua"})


def daemon_plist(installation: Installation) -> UnitFile:
    """For the machine, as a user of its own."""
    job = _job(installation, log=str(DAEMON_HOME / "machd.log"))
    environment = {"HOME": str(DAEMON_HOME), "LME_LOGGING_FORMAT": "json"}
    return _plist(
        job
        | {
            "UserName": DAEMON_USER,
            "WorkingDirectory": str(DAEMON_HOME),
            "EnvironmentVariables": environment,
        }
    )


def _job(installation: Installation, *, log: str) -> dict[str, object]:
    return {
        "Label": LABEL,
        "ProgramArguments": list(installation.serve_words),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _THROTTLE_S,
        "ExitTimeOut": _EXIT_S,
        # Anything else is slowed down in favour of what is on the screen.
        "ProcessType": "Interactive",
        "Umask": _UMASK,
        "SoftResourceLimits": {"NumberOfFiles": _OPEN_FILES},
        "HardResourceLimits": {"NumberOfFiles": _OPEN_FILES, "Core": 0},
        "EnvironmentVariables": {"LME_LOGGING_FORMAT": "json"},
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }


def _plist(job: dict[str, object]) -> UnitFile:
    return UnitFile(f"{LABEL}.plist", plistlib.dumps(job, sort_keys=False).decode())
