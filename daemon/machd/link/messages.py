"""What a model's front and its engine process tell each other.

Each message is a frozen Struct whose first item on the wire is its name. Both processes run one version of machd, so a
message has every field, and an unknown one is refused. What is waited for has a number, which its answer repeats.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from machd.errors import MachdError
from machd.link.snapshot import LoopSnapshot
from machd.link.state import ServedState
from machd.request.constraint import Constraint
from machd.scheduler.events import Event
from machd.scheduler.subscriber import SequenceRequest
from machd.settings.model import Settings


class Message(Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of everything that crosses the link."""


class Submit(Message, frozen=True):
    """Start the sequences of one request."""

    requests: tuple[SequenceRequest, ...]


class Abort(Message, frozen=True):
    """End sequences; ``error`` is None when their client simply has enough."""

    sequence_ids: tuple[str, ...]
    error: MachdError | None


class ChangeConfig(Message, frozen=True):
    """Schedule by other settings; answered when the config is in force, or replaced by a later one.

    Attributes:
        is_measured: The model is measured before that.
    """

    number: int
    settings: Settings
    is_measured: bool


class SetLimits(Message, frozen=True):
    """Hold requests that come, wait or run, and what is kept of prompts and answers, against other limits."""

    settings: Settings


class ClearPrefixes(Message, frozen=True):
    """Forget the unused blocks of the prefix cache; answered with their number."""

    number: int
    is_disk_included: bool


class CompileGrammar(Message, frozen=True):
    """Compile a constraint; answered by :class:`GrammarCompiled`, or by :class:`Answered` with the error."""

    number: int
    constraint: Constraint


class DropGrammar(Message, frozen=True):
    """Stop compiling a constraint: its request has gone. Nothing answers."""

    number: int


class Stop(Message, frozen=True):
    """End all sequences with ``error``, and then the process."""

    error: MachdError


ToEngine: TypeAlias = (
    Submit | Abort | ChangeConfig | SetLimits | ClearPrefixes | CompileGrammar | DropGrammar | Stop
)


class Progress(Message, frozen=True):
    """A stage of loading the model has begun, or moved on.

    Attributes:
        stage: Its name.
        done_bytes: Bytes of the stage that are done.
        total_bytes: Bytes of the stage; None where that is not known.
    """

    stage: str
    done_bytes: int
    total_bytes: int | None


class Served(Message, frozen=True):
    """The model is loaded, or something else is known of it.

    Attributes:
        changed: Features whose verdict is another one than before; empty when the model has just been loaded.
    """

    state: ServedState
    changed: frozenset[str]


class LoadFailed(Message, frozen=True):
    """The model cannot be served; the process ends."""

    error: MachdError


class Report(Message, frozen=True):
    """The events of a step, or of the time between two.

    Attributes:
        snapshot: The counts after them; None where they are as before.
    """

    events: tuple[Event, ...]
    snapshot: LoopSnapshot | None


class Beat(Message, frozen=True):
    """The engine's heartbeat: it has begun a step, or found itself idle.

    Attributes:
        allowed_s: Time by which the next beat may be later than a step allows, because the model is measured; else 0.
    """

    allowed_s: float


class Answered(Message, frozen=True):
    """What was asked under ``number`` is done, or failed.

    Attributes:
        error: Why it failed; None if it is done.
        value: Number that was asked for; None where none was, or after an error.
    """

    number: int
    error: MachdError | None
    value: int | None


class GrammarCompiled(Message, frozen=True):
    """The constraint of ``number`` is compiled, and kept by the engine under the grammar's source.

    Attributes:
        source: The compiler's own text, as in :class:`~machd.request.generation.Grammar`.
        ignored_keywords: Keywords of a JSON schema that the grammar cannot express, sorted.
    """

    number: int
    source: str
    ignored_keywords: tuple[str, ...]


class BlockEntered(Message, frozen=True):
    """A block of the prefix cache is in memory. Blocks before it have entered before it.

    Attributes:
        number: Of the block, from now until it leaves; it stays when the engine stores the block anew.
        before: Number of the block before it; at the beginning of a text the digest of no tokens, which stands for the
            model and the namespace.
        token_ids: Its tokens.
    """

    number: int
    before: int | bytes
    token_ids: tuple[int, ...]


class BlockLeft(Message, frozen=True):
    """A block is not in memory any more; blocks behind it left before it."""

    number: int


class BlockSplit(Message, frozen=True):
    """A block became two.

    Attributes:
        number: Of the block, which keeps its tokens from ``at`` on.
        head_number: Of the new block, which has those before.
        at: Tokens of the new block.
    """

    number: int
    head_number: int
    at: int


class BlocksCleared(Message, frozen=True):
    """No block is in memory."""


BlockEvent: TypeAlias = BlockEntered | BlockLeft | BlockSplit | BlocksCleared


class BlocksChanged(Message, frozen=True):
    """What :class:`~machd.scheduler.block_observer.BlockObserver` was told, in order."""

    events: tuple[BlockEvent, ...]


class Ended(Message, frozen=True):
    """The engine has ended: as it was told to, or of the fault ``error``."""

    error: MachdError | None


ToFront: TypeAlias = (
    Progress
    | Served
    | LoadFailed
    | Report
    | Beat
    | Answered
    | GrammarCompiled
    | BlocksChanged
    | Ended
)
