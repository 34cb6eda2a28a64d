"""The report of ``machd check --cache-report``, in the words of its JSON. It holds no text of a request."""

from __future__ import annotations

from msgspec import Struct

from machd.cli.request_changes import ChangeKind
from machd.reading.prompt_places import PromptPart
from machd.scheduler.events import CacheReason


class PartCost(Struct, frozen=True, kw_only=True):
    """Tokens that a part of the prompts cost.

    Attributes:
        part: Null where the places of tokens are not known, as in a prompt with images.
        role: Of messages.
    """

    part: PromptPart | None
    role: str | None
    computed_tokens: int


class Cause(Struct, frozen=True, kw_only=True):
    """A cause for which tokens are computed again.

    Attributes:
        reason: As the daemon tells it.
        change: What the requests have changed; null for other reasons than changes.
        message_index: The message that changes, from 0 and with the system message; null for tools and the template.
        role: Its role.
        tool_index: The tool that changes, from 0.
        characters: The first character of the message's text that changes, from 0, and the first one behind that does not; those of
            most lines.
        lines: Lines of the requests.
        saved_tokens: Tokens that would have been found without it.
        advice: What to do.
    """

    reason: CacheReason
    change: ChangeKind | None
    message_index: int | None
    role: str | None
    tool_index: int | None
    characters: tuple[int, int] | None
    lines: list[int]
    saved_tokens: int
    advice: str


class LookupReport(Struct, frozen=True, kw_only=True):
    """A prompt that was looked up.

    Attributes:
        line: The request's line in the file, from 1.
        prompt_tokens: Tokens of the prompt.
        found_tokens: Those that were found.
        reason: Why not more.
        parted_at_tokens: Tokens in common with an earlier prompt that is kept.
        part: Where in the conversation that is; null where it is not known.
        message_index: The message there, or behind there.
        role: Its role.
        character: Characters of its text before.
        tool_index: The tool there.
        change: What differs from the earlier request; null if nothing that it has does.
        saved_tokens: Tokens that would have been found without the change.
    """

    line: int
    prompt_tokens: int
    found_tokens: int
    reason: CacheReason
    parted_at_tokens: int
    part: PromptPart | None
    message_index: int | None
    role: str | None
    character: int | None
    tool_index: int | None
    change: ChangeKind | None
    saved_tokens: int


class SkippedReport(Struct, frozen=True, kw_only=True):
    """A line that is no part of the sums."""

    line: int
    reason: str


class CacheReport(Struct, frozen=True, kw_only=True):
    """A session of requests in the prefix cache.

    Attributes:
        cache: Where a prompt can go on from a kept one.
        prompt_tokens: Tokens of all prompts.
        found_tokens: Those that were found.
        computed_tokens: Those that were computed.
        parts: What was computed, the most expensive part first.
        causes: What is computed again and need not be, the most expensive cause first.
        lookups: Each prompt.
        skipped: Lines that are no part of the sums.
        notes: What a person should know.
    """

    model: str
    cache: str
    prompt_tokens: int
    found_tokens: int
    computed_tokens: int
    parts: list[PartCost]
    causes: list[Cause]
    lookups: list[LookupReport]
    skipped: list[SkippedReport]
    notes: list[str]
