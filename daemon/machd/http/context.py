"""What the endpoints are given: the running parts and the settings they obey."""

from __future__ import annotations

from dataclasses import dataclass

from machd.api.capabilities import Versions
from machd.clock import Clock
from machd.serving.loop import EngineLoop
from machd.serving.service import GenerationService
from machd.settings.model import Settings
from machd.telemetry.metrics import Metrics

__all__ = ["ENGINE_STALL_S", "ServerContext"]

ENGINE_STALL_S = 60.0
"""Age of the heartbeat at which the engine counts as stuck.

A step is one prefill chunk or one token; on the slowest machine we know, a chunk takes 10 s.
"""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Made once by ``compose``, read by every handler."""

    service: GenerationService
    loop: EngineLoop
    metrics: Metrics
    clock: Clock
    settings: Settings
    versions: Versions
