"""What the service manager is told: sd_notify(3), which is silence where nobody listens."""

from __future__ import annotations

from collections.abc import Mapping

from machd.clock import Clock

__all__ = ["ServiceNotifier"]


class ServiceNotifier:
    """Sends datagrams to ``$NOTIFY_SOCKET``. Never raises: a deaf service manager stops no daemon."""

    def __init__(self, environ: Mapping[str, str], clock: Clock) -> None:
        """Find out from the process's variables whether anybody listens."""

    @property
    def watchdog_interval_s(self) -> float | None:
        """Within which the service manager wants signs of life; None where it wants none."""
        return None

    def loading(self, *, timeout_s: float) -> None:
        """The model is loading and needs so much longer."""

    def ready(self) -> None:
        """Requests are answered."""

    def reloading(self) -> None:
        """Settings are being read again; :meth:`ready` follows."""

    def stopping(self, *, timeout_s: float) -> None:
        """No new work is taken; what is open gets so long."""

    def status(self, text: str) -> None:
        """One line for people."""

    def alive(self) -> None:
        """The engine moves."""
