"""From settings to the engine loop of one model."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from machd.clock import Clock
from machd.engine.protocol.engine import Engine
from machd.engine_process.block_ledger import BlockLedger
from machd.engine_process.loop import EngineLoop
from machd.engine_process.scheduling import ModelScheduling
from machd.engine_process.startup_guard import NOTHING_MEASURED, Measures, OnStart, StartupGuard
from machd.link.port import EngineListener
from machd.link.snapshot import LoopSnapshot
from machd.settings.model import Settings

_SECRET_BYTES = 32


def engine_loop(  # noqa: PLR0913 - one argument for each thing that it calls
    settings: Settings,
    listener: EngineListener,
    *,
    load: Callable[[], Engine],
    clock: Clock,
    measures: Measures = NOTHING_MEASURED,
    on_note: Callable[[LoopSnapshot], None] = lambda _snapshot: None,
    on_beat: Callable[[float], None] = lambda _allowed_s: None,
) -> EngineLoop:
    """Make the loop of the model that the settings name; nothing runs yet.

    Args:
        settings: Settings in force until they are changed.
        listener: Called with events and changes, on the engine thread.
        load: Makes the engine; called on the engine thread.
        clock: Reads time.
        measures: Measure the loaded model; called on the engine thread. Their errors are logged.
        on_note: See :class:`EngineLoop`.
        on_beat: See :class:`EngineLoop`.
    """
    secret = secrets.token_bytes(_SECRET_BYTES)
    ledger = partial(BlockLedger, listener.block_changed, settings.cache.block_tokens, secret)
    is_published = settings.kv_events.endpoint is not None
    return EngineLoop(
        load=load,
        scheduling=ModelScheduling(ledger if is_published else None),
        settings=settings,
        publish=listener.publish,
        clock=clock,
        on_verdicts=listener.verdicts_changed,
        on_note=on_note,
        on_beat=on_beat,
        probe=StartupGuard(
            on_start=OnStart(settings.probe.on_start),
            is_batching_asked=settings.continuous_batching.enabled,
            measures=measures,
            clock=clock,
        ),
    )
