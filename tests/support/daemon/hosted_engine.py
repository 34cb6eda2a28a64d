"""An engine on a thread of this process, behind the port that an engine process has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from machd.clock import Clock, SystemClock
from machd.engine.protocol.engine import Engine
from machd.engine_process.assembly import engine_loop
from machd.engine_process.startup_guard import NOTHING_MEASURED, Measures
from machd.link.port import OpenEngine


def hosted(
    load: Callable[[], Engine],
    *,
    clock: Clock | None = None,
    measures: Measures = NOTHING_MEASURED,
) -> OpenEngine:
    """Have a daemon's engine loaded by ``load``, on a thread beside it."""
    return partial(engine_loop, load=load, clock=clock or SystemClock(), measures=measures)
