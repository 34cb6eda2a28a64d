"""Number of connections that the process's limit of open files leaves room for.

The soft limit is raised as far as the connections need it, never above the hard limit: the soft one is
low by tradition, for programs that call select(2), and machd does not. See docs/decisions/http.md, 0036.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Literal

from machd.errors import SettingsError

ADMIN_CONNECTIONS = 16
"""Connections of the admin listener: its own share, so that an operator always gets in."""

SPARE_CONNECTIONS = 16
"""Connections beyond a listener's budget, for clients that wait while all others are busy: a request on one
of them is answered 503 instead of not at all."""

ACCEPTS_PER_TURN = 8
"""Connections accepted in one turn of the event loop: what an accepted client has sent is read before newer
connections can push it out. Those that make room for them give their descriptors back a turn later."""

_OWN_FILES = 96
"""For model files, blocks on disk, sockets, logs and compilers; an idle daemon has ten open."""

_AUTO_CONNECTIONS = 4096
"""The most that ``auto`` takes: eight times the default of ``limits.max_in_flight``."""

_FEWEST_CONNECTIONS = 16
"""Below this ``auto`` refuses to start."""

_RESERVED = _OWN_FILES + ADMIN_CONNECTIONS + 2 * (SPARE_CONNECTIONS + ACCEPTS_PER_TURN)


def fit_connections(max_connections: int | Literal["auto"], *, other_files: int = 0) -> int:
    """Connections that the public listener may have, raising the soft limit of open files for them.

    ``auto`` leaves a quarter of the limit to the daemon itself, where that is more than its share:
    a fixed one, and ``other_files``.

    Raises:
        SettingsError: The limit of open files has no room for them.
    """
    wanted = _AUTO_CONNECTIONS if max_connections == "auto" else max_connections
    reserved = _RESERVED + other_files
    limit = _raise_soft_limit(wanted * 4 // 3 + reserved)
    room = limit - reserved
    fewest = _FEWEST_CONNECTIONS if max_connections == "auto" else wanted
    if room < fewest:
        problem = (
            f"limits.max_connections: {fewest} connections need a limit of {fewest + reserved} open "
            f"files, and it is {limit}; raise it (ulimit -n, or LimitNOFILE= of the service)"
        )
        raise SettingsError([problem + (f", or set at most {room}" if room > 0 else "")])
    if max_connections == "auto":
        return min(wanted, room, max(fewest, limit * 3 // 4))
    return wanted


def _raise_soft_limit(needed: int) -> int:
    """Raise the soft limit to ``needed`` where the hard limit allows; returns the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return needed
    if soft < needed:
        target = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        # The system may have a lower limit of its own, as macOS does under an infinite hard limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
