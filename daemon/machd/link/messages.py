"""Messages between a model's front and its engine process.

Each message is a frozen Struct whose first item on the wire is its name. Both processes run one version of machd, so a
message has every field, and an unknown one is refused. The first frame of a link is no message: it has the settings as JSON. A question has a number, which its answer repeats.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from machd.capabilities.fit import MemoryNeeds
from machd.engine.protocol.encoder import EncoderInput
from machd.engine.protocol.media import PlainArray
from machd.errors import MachdError
from machd.link.block_events import KvEvent
from machd.link.logged_event import LoggedEvent
from machd.link.snapshot import LoopSnapshot
from machd.link.state import ServedState
from machd.request.constraint import Constraint
from machd.request.generation import Grammar
from machd.scheduler.events import Event
from machd.scheduler.subscriber import SequenceRequest
from machd.settings.model import Settings


class Message(Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of everything that crosses the link."""


class Submit(Message, frozen=True):
    """Start the sequences of one request."""

    requests: tuple[SequenceRequest, ...]


class Abort(Message, frozen=True):
    """End sequences; ``error`` is None if their client needs no more tokens."""

    sequence_ids: tuple[str, ...]
    error: MachdError | None


class ChangeConfig(Message, frozen=True):
    """Change the scheduler config; answered when the config is in force, or replaced by a later one.

    Attributes:
        is_measured: Whether the model is measured before.
    """

    number: int
    settings: Settings
    is_measured: bool


class SetLimits(Message, frozen=True):
    """Apply other limits to new, waiting and running requests, to the prefix cache and to stored answers."""

    settings: Settings


class ClearPrefixes(Message, frozen=True):
    """Drop the unused blocks of the prefix cache; answered with their number."""

    number: int
    is_disk_included: bool


class CompileGrammar(Message, frozen=True):
    """Compile a constraint; answered by :class:`GrammarCompiled`, or by :class:`Answered` with the error."""

    number: int
    constraint: Constraint


class Encode(Message, frozen=True):
    """Make vectors or labels of texts; answered by :class:`Encoded`, or by :class:`Answered` with the error.

    Attributes:
        is_suspect: It was open when a process ended, so it is computed alone, and before others.
    """

    number: int
    inputs: tuple[EncoderInput, ...]
    is_suspect: bool = False


class Drop(Message, frozen=True):
    """Stop working on a question whose request has ended: a constraint, or texts; not answered."""

    number: int


class Place(Message, frozen=True):
    """Put the model into memory, under these settings; answers :class:`Sized`."""

    settings: Settings


class Stop(Message, frozen=True):
    """End all sequences with ``error``, and then the process."""

    error: MachdError


ToEngine: TypeAlias = (
    Submit
    | Abort
    | ChangeConfig
    | SetLimits
    | ClearPrefixes
    | CompileGrammar
    | Encode
    | Drop
    | Place
    | Stop
)


class Progress(Message, frozen=True):
    """A stage of loading the model has begun, or moved on; see :class:`machd.engine.protocol.progress.LoadProgress`.

    Attributes:
        stage: Name of a stage that begins; None if the last one has moved on.
        total_bytes: Bytes of a stage that begins; None where that is not known.
        done_bytes: Bytes of the stage done since the last message.
    """

    stage: str | None
    total_bytes: int | None
    done_bytes: int


class Located(Message, frozen=True):
    """The model's files are on this machine, so the front can open its tokenizer while it loads.

    Attributes:
        kind: A :class:`machd.engine.loading.source.SourceKind`.
        path: Path of the directory or the file.
        model_id: Name that requests use.
    """

    kind: str
    path: str
    model_id: str


class Sized(Message, frozen=True):
    """The model's files are open, and it needs so much memory; the process waits for :class:`Place`.

    Attributes:
        device_memory_bytes: What the device can hold in all.
    """

    needs: MemoryNeeds
    device_memory_bytes: int


class Served(Message, frozen=True):
    """The model is loaded, or its state has changed.

    Attributes:
        changed: Features whose verdicts have changed; empty when the model has just been loaded.
        snapshot: The counts, so that a model that is ready has some; None if unchanged.
    """

    state: ServedState
    changed: frozenset[str]
    snapshot: LoopSnapshot | None


class LoadFailed(Message, frozen=True):
    """The model cannot be served; the process ends."""

    error: MachdError


class Report(Message, frozen=True):
    """The events of a step, or of the time between two.

    Attributes:
        snapshot: The counts after them; None if unchanged.
    """

    events: tuple[Event, ...]
    snapshot: LoopSnapshot | None


class Beat(Message, frozen=True):
    """The engine's heartbeat: it has begun a step, or is idle.

    Attributes:
        allowed_s: Extra time until the next beat, because the model is measured; else 0.
    """

    allowed_s: float


class Answered(Message, frozen=True):
    """The question ``number`` is done, or failed.

    Attributes:
        error: Why it failed; None if it is done.
        value: The answer, if it is a number; None otherwise, or after an error.
    """

    number: int
    error: MachdError | None
    value: int | None


class GrammarCompiled(Message, frozen=True):
    """The constraint of ``number`` is compiled; its compiled form stays in the engine process."""

    number: int
    grammar: Grammar


class Encoded(Message, frozen=True):
    """The texts of ``number`` are computed.

    Attributes:
        values: float32, [texts, dimensions].
    """

    number: int
    values: PlainArray


class BlocksChanged(Message, frozen=True):
    """The blocks in memory have changed."""

    event: KvEvent


class Logged(Message, frozen=True):
    """The process has written an event to the log."""

    event: LoggedEvent


class Ended(Message, frozen=True):
    """The engine has ended: after a stop, or with the fault ``error``."""

    error: MachdError | None


ToFront: TypeAlias = (
    Progress
    | Located
    | Sized
    | Served
    | LoadFailed
    | Report
    | Beat
    | Answered
    | GrammarCompiled
    | Encoded
    | BlocksChanged
    | Logged
    | Ended
)
