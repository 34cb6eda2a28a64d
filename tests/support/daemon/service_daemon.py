"""A daemon with a scripted engine in a process of its own, as a service manager runs one.

As a program it serves until a signal ends it, and takes settings by dotted key as JSON. Its model
hangs for as long as the file ``$STALL_FILE`` is there, and loads for as long as the file ``$LOAD_FILE``
is there, with ``$LOAD_BUSY`` in a loop of Python that never ends. A reload says ``reloading`` and opens the pipe
``$RELOAD_PIPE``, where it hangs in the system call as on a file system that does not answer.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from machd.cli.commands import leave
from machd.daemon import Daemon
from machd.engine.protocol.step import StepPlan
from machd.errors import MachdError
from machd.process.notify import forget_service_variables
from machd.settings.sources import LoadedSettings, SettingsSources, process_environ
from machd.telemetry.logs import configure_logs
from support import module_command
from support.clocks.polling import CEILING_S
from support.daemon.hosted_engine import hosted
from support.engines.dialogue import told
from support.engines.fake_engine import FakeEngine
from support.programs.installed_programs import path_of

STEP_S = 0.005

_FLAGS: dict[str, object] = {
    "server.port": 0,
    "admin.listen": "off",
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": 8,
    "continuous_batching.window_ms": 0,
    # Longer than any test waits: only a test that sets it shorter sees the deadline.
    "limits.drain_timeout_s": 3600,
}
_LOG_CHARACTERS = 4000

_HANDED = "HANDED_DESCRIPTORS"
"""Sockets that the program moves to where a service manager puts them, as nothing stands between that knows its id."""


class ServiceDaemon:
    """A context manager around the process; leaving it kills what still runs."""

    def __init__(
        self,
        flags: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        descriptors: Sequence[int] = (),
        names: str = "public",
        activator: Sequence[str] = (),
        config_path: Path | None = None,
    ) -> None:
        """Start it.

        Args:
            flags: Settings by dotted key.
            environ: More variables.
            descriptors: Of sockets to hand over.
            names: What they are called, with colons between.
            activator: A program that starts it in its turn.
            config_path: Its settings file.
        """
        self.url = ""
        program = module_command("support.daemon.service_daemon")
        program += (json.dumps(dict(flags or {})), str(config_path or ""))
        command, variables = [*activator, *program], dict(environ or {})
        if descriptors and activator:
            # A shell knows the process that the program becomes, which LISTEN_PID has to name.
            moves = " ".join(f"{3 + i}<&{fd}" for i, fd in enumerate(descriptors))
            command = ["bash", "-c", f'export LISTEN_PID=$$; exec "$@" {moves}', "bash", *command]
            variables |= {"LISTEN_FDS": str(len(descriptors)), "LISTEN_FDNAMES": names}
        elif descriptors:
            variables |= {_HANDED: ":".join(map(str, descriptors)), "LISTEN_FDNAMES": names}
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            pass_fds=tuple(descriptors),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        """Already started."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End it, however it is; an error gets a note of what it logged."""
        if self.process.poll() is None:
            self.process.kill()
        log = self.process.communicate(timeout=CEILING_S)[1]
        if error is not None:
            error.add_note(f"The daemon's log:\n{log[-_LOG_CHARACTERS:]}")

    def read_url(self) -> str:
        """Return where it listens; said once it is ready."""
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, f"the daemon ended: {self.process.stderr and self.process.stderr.read()}"
        return self.url

    def read_error(self) -> str:
        """Return what it said at its end."""
        return self.process.communicate(timeout=CEILING_S)[1]

    def terminate(self) -> None:
        """What a service manager does first."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(CEILING_S)


def socket_activated(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The command that starts a program with the first connection, by systemd's own tool."""
    program = path_of("systemd-socket-activate")
    given = {name: value for name, value in {**os.environ, **environ}.items() if "PYTHON" in name}
    return (program, "--fdname=public", *(f"-E{n}={v}" for n, v in {**given, **environ}.items()))


def _pace(_plan: StepPlan) -> None:
    time.sleep(STEP_S)
    _wait_while_there("STALL_FILE")


class _HangingSources(SettingsSources):
    """Settings that can be read once; a second time the file system does not answer."""

    def load(self) -> LoadedSettings:
        """Read them, or hang."""
        pipe = self.environ["RELOAD_PIPE"]
        if threading.current_thread() is not threading.main_thread():
            _say("reloading")
            Path(pipe).read_bytes()
        return super().load()


def _wait_while_there(variable: str) -> None:
    path = os.environ.get(variable)
    while path and Path(path).exists():
        time.sleep(0.01)


def _load() -> FakeEngine:
    while os.environ.get("LOAD_BUSY"):
        pass
    _wait_while_there("LOAD_FILE")
    return FakeEngine(told, before_step=_pace, context_tokens=100_000)


def _take_handed() -> None:
    descriptors = os.environ.pop(_HANDED, "")
    if not descriptors:
        return
    high = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 512) for one in descriptors.split(":")]
    for number, one in enumerate(high, start=3):
        os.dup2(one, number)
        os.close(one)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(high))}


def _serve(flags: Mapping[str, object], config_path: Path | None) -> int:
    environ = process_environ()
    kind = _HangingSources if "RELOAD_PIPE" in environ else SettingsSources
    sources = kind(config_path, environ, {**_FLAGS, **flags})
    forget_service_variables(os.environ)
    try:
        loaded = sources.load()
        configure_logs(level=loaded.settings.logging.level, log_format="json")
        daemon = Daemon(sources, loaded, hosted(_load), on_ready=lambda url, _engine: _say(url))
        asyncio.run(daemon.run())
    except MachdError as error:
        print(f"machd: {error.message}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


def _say(url: str) -> None:
    with suppress(BrokenPipeError):
        print(url, flush=True)  # noqa: T201


def main() -> None:
    """Serve as the command's arguments say."""
    _take_handed()
    leave(_serve(json.loads(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None))


if __name__ == "__main__":
    main()
