"""The counts of an engine process at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from machd.engine.protocol.memory import MemoryReading
from machd.scheduler.draft_reading import DraftReading
from machd.scheduler.events import DecodeMode
from machd.scheduler.prefix_limits import PrefixReading
from machd.scheduler.waits import Waits

_NO_MEMORY = MemoryReading(0, 0, 0, 0)
_NO_DRAFTS = DraftReading()


@dataclass(frozen=True, slots=True)
class LoopSnapshot:
    """Counts of the engine thread at one moment; immutable.

    Attributes:
        is_changing_config: A requested scheduler config is not in force yet.
        prefix: The prefix cache; None without one.
        mode: Decode mode of the config in force.
        step_mode: Decode mode of the next step.
        drafts: Counts of draft tokens since the start.
        prefilled_tokens: Prompt tokens computed or reused so far, by the id of each running sequence.
        waits: Why the others wait.
    """

    taken_unix_s: float = 0.0
    mode: DecodeMode = DecodeMode.SINGLE
    slot_count: int = 0
    running_count: int = 0
    waiting_count: int = 0
    active_loops: int = 0
    kv_budget_bytes: int | None = None
    kv_reserved_bytes: int = 0
    memory: MemoryReading = _NO_MEMORY
    is_changing_config: bool = False
    prefix: PrefixReading | None = None
    step_mode: DecodeMode = DecodeMode.SINGLE
    drafts: DraftReading = _NO_DRAFTS
    prefilled_tokens: Mapping[str, int] = field(default_factory=dict)
    waits: Waits = field(default_factory=Waits)
