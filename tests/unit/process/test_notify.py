"""The service manager's protocol, said to a socket of ours."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import wait_until
from support.programs.notify_socket import NotifySocket

from machd.process.notify import ServiceNotifier, forget_service_variables


def _heard(notifier: ServiceNotifier, ear: NotifySocket, count: int = 1) -> dict[str, str]:
    wait_until(lambda: len(ear.heard) >= count, f"{count} datagrams are heard")
    assert notifier.is_heard
    return ear.heard[count - 1].fields


@pytest.mark.parametrize("is_abstract", [False, True])
def test_ready_is_heard_on_both_kinds_of_socket(*, is_abstract: bool) -> None:
    """A path and an abstract name are both reached, and the status goes with READY."""
    with NotifySocket(abstract=is_abstract) as ear:
        notifier = ServiceNotifier({"NOTIFY_SOCKET": ear.path}, ManualClock())
        notifier.ready("4 slots")
        assert _heard(notifier, ear) == {"READY": "1", "STATUS": "4 slots"}
        notifier.close()


def test_a_reload_carries_the_monotonic_time() -> None:
    """RELOADING=1 without MONOTONIC_USEC makes ``systemctl reload`` wait for minutes."""
    with NotifySocket() as ear:
        notifier = ServiceNotifier({"NOTIFY_SOCKET": ear.path}, ManualClock(12.5))
        notifier.reloading()
        fields = _heard(notifier, ear)
        assert fields["RELOADING"] == "1"
        assert fields["MONOTONIC_USEC"] == "12500000"
        notifier.close()


def test_every_other_word_is_said_as_the_manual_has_it() -> None:
    """Stopping and loading ask for time in microseconds; life and status are one line each."""
    with NotifySocket() as ear:
        notifier = ServiceNotifier({"NOTIFY_SOCKET": ear.path}, ManualClock())
        notifier.stopping(timeout_s=80, status="draining")
        notifier.loading(timeout_s=1.5)
        notifier.alive()
        notifier.status("one\nREADY=1")
        _heard(notifier, ear, 4)
        assert [one.fields for one in ear.heard] == [
            {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "80000000", "STATUS": "draining"},
            {"EXTEND_TIMEOUT_USEC": "1500000"},
            {"WATCHDOG": "1"},
            {"STATUS": "one READY=1"},
        ]
        notifier.close()


@pytest.mark.parametrize("variable", ["", "relative", "vsock:2:1", "@"])
def test_where_nobody_listens_nothing_is_said(variable: str) -> None:
    """Without an address that we can reach every word is silence, and no error."""
    notifier = ServiceNotifier({"NOTIFY_SOCKET": variable, "WATCHDOG_USEC": "1"}, ManualClock())
    assert not notifier.is_heard
    assert notifier.watchdog_interval_s is None
    notifier.ready("x")
    notifier.alive()


def test_a_socket_that_is_gone_or_full_raises_nothing(tmp_path: Path) -> None:
    """A service manager that died, or that reads nothing, does not end the daemon."""
    path = tmp_path / "notify"
    notifier = ServiceNotifier({"NOTIFY_SOCKET": str(path)}, ManualClock())
    notifier.ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(path))
        _fill(path)
        notifier.ready()
    notifier.close()


def _fill(path: Path) -> None:
    """Send until there is no room."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(BlockingIOError):
        sender.settimeout(0)
        while True:
            sender.sendto(b"x", str(path))


@pytest.mark.parametrize(
    ("variables", "interval_s"),
    [
        ({"WATCHDOG_USEC": "2000000"}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "own"}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_ours_to_feed(variables: dict[str, str], interval_s: float | None) -> None:
    """The interval counts where it is a number, and where it is this process's."""
    told = {
        name: str(os.getpid()) if value == "own" else value for name, value in variables.items()
    }
    notifier = ServiceNotifier({"NOTIFY_SOCKET": "/nowhere", **told}, ManualClock())
    assert notifier.watchdog_interval_s == interval_s


def test_children_inherit_none_of_it() -> None:
    """What the service manager said to the daemon alone is gone; everything else stays."""
    environ = {
        "NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "LISTEN_PID": "1",
        "LISTEN_FDS": "1", "LISTEN_FDNAMES": "public", "HOME": "/",
    }  # fmt: skip
    forget_service_variables(environ)
    assert environ == {"HOME": "/"}
