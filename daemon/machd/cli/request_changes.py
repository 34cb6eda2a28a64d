"""Comparison of two conversations: the first thing that differs, and where both go on alike behind it.

What is compared are the requests, not the prompts, so that a change is named even where a template hides its place. A change's
place in the prompt then says which tokens would still be found, had it not been made there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from machd.reading.prompt_places import PromptPart, PromptPlace
from machd.request.conversation import Conversation, FunctionTool, ToolChoiceMode
from machd.request.media import media_of

Message = Mapping[str, object]

_MAX_COMPARED = 1000
"""Most messages behind the first that differs in which one that both have is looked for."""


class ChangeKind(StrEnum):
    """A difference between a request and an earlier one, in what both have."""

    MESSAGE_TEXT = "message_text"
    MESSAGE_CALLS = "message_calls"
    MESSAGE_THOUGHTS = "message_thoughts"
    MESSAGE_IMAGES = "message_images"
    MESSAGES_REPLACED = "messages_replaced"
    MESSAGES_ADDED = "messages_added"
    MESSAGES_REMOVED = "messages_removed"
    TOOLS_ORDER = "tools_order"
    TOOL_CHANGED = "tool_changed"
    TOOLS_ADDED = "tools_added"
    TOOLS_REMOVED = "tools_removed"
    TEMPLATE = "template"
    """Both requests say the same, or their template's variables differ: the text is the template's own."""


@dataclass(frozen=True, slots=True)
class Change:
    """The first difference of two conversations.

    Attributes:
        message_index: The later one's message that differs; None for tools and the template.
        role: Its role.
        tool_index: The later one's tool that differs; None for messages and the template.
        characters: The first character of the message's text that differs, from 0, and the first one that does not any more;
            None for other changes.
        former_characters: The same in the former one.
        count: Messages or tools of the later one that the former one has not, if some were added or removed.
        former_count: The other way round.
    """

    kind: ChangeKind
    message_index: int | None = None
    role: str | None = None
    tool_index: int | None = None
    characters: tuple[int, int] | None = None
    former_characters: tuple[int, int] | None = None
    count: int = 0
    former_count: int = 0


def first_change(
    former: Conversation, later: Conversation, parted_at: PromptPlace | None
) -> Change:
    """Return what differs first in their prompts, which part at ``parted_at``, if that is known."""
    tools = _tool_change(former, later)
    messages = _message_change(former, later, start=_first_suspect(parted_at))
    if tools is None or messages is None:
        return tools or messages or Change(ChangeKind.TEMPLATE)
    is_in_message = parted_at is not None and parted_at.part is PromptPart.MESSAGE
    is_behind = parted_at is not None and (
        parted_at.message_index is None
        or parted_at.message_index > (messages.message_index or 0)
        or parted_at.part is PromptPart.TOOLS
    )
    return messages if is_in_message and not is_behind else tools


def _tool_change(former: Conversation, later: Conversation) -> Change | None:
    was, now = _shown_tools(former), _shown_tools(later)
    if was == now:
        return None
    index = _first_difference(was, now)
    names_were, names_now = [one.name for one in was], [one.name for one in now]
    if names_were == names_now:
        return Change(ChangeKind.TOOL_CHANGED, tool_index=index)
    if sorted(names_were) == sorted(names_now):
        return Change(ChangeKind.TOOLS_ORDER, tool_index=index)
    if len(now) >= len(was):
        return Change(ChangeKind.TOOLS_ADDED, tool_index=index, count=len(now) - len(was))
    return Change(ChangeKind.TOOLS_REMOVED, tool_index=index, former_count=len(was) - len(now))


def _shown_tools(conversation: Conversation) -> tuple[FunctionTool, ...]:
    is_shown = conversation.tool_choice.mode is not ToolChoiceMode.NONE
    return conversation.tools if is_shown else ()


def _first_suspect(parted_at: PromptPlace | None) -> int:
    """Return the first message whose difference may show at a place: what a template leaves out of earlier ones does not.

    Calls and thoughts are the template's text around a message's own.
    """
    if parted_at is None or parted_at.message_index is None:
        return 0
    is_inside = parted_at.part is PromptPart.MESSAGE
    return parted_at.message_index if is_inside else max(0, parted_at.message_index - 1)


def _message_change(former: Conversation, later: Conversation, *, start: int) -> Change | None:
    was, now = former.messages, later.messages
    index = start + _first_difference(was[start:], now[start:])
    if index == len(was):
        return None  # it goes on behind the former one, or is the same
    if index == len(now):
        count = len(was) - index
        return Change(ChangeKind.MESSAGES_REMOVED, message_index=index, former_count=count)
    role = str(now[index].get("role"))
    gone, came = _until_common(was[index:], now[index:])
    if (gone, came) in ((0, 0), (1, 1)):
        return _inside_message(was[index], now[index], index, role)
    kind = ChangeKind.MESSAGES_REPLACED
    if not came:
        kind = ChangeKind.MESSAGES_REMOVED
    elif not gone:
        kind = ChangeKind.MESSAGES_ADDED
    return Change(kind, index, role, count=came, former_count=gone)


def _until_common(was: Sequence[Message], now: Sequence[Message]) -> tuple[int, int]:
    """Return how many messages of both come before the first one that both have; 0 and 0 if they have none."""
    known: dict[bytes, int] = {}
    for index, one in enumerate(was[:_MAX_COMPARED]):
        known.setdefault(_key(one), index)
    pairs = [
        (known[key], index)
        for index, one in enumerate(now[:_MAX_COMPARED])
        if (key := _key(one)) in known
    ]
    return min(pairs, key=sum, default=(0, 0))


def _key(message: Message) -> bytes:
    return repr(message).encode()


def _inside_message(was: Message, now: Message, index: int, role: str) -> Change:
    def differs(key: str) -> bool:
        return was.get(key) != now.get(key)

    if was.get("role") != role:
        return Change(ChangeKind.MESSAGES_REPLACED, index, role, count=1, former_count=1)
    if differs("content"):
        former, later = was.get("content"), now.get("content")
        if isinstance(former, str) and isinstance(later, str):
            was_span, now_span = _changed_span(former, later)
            return Change(
                ChangeKind.MESSAGE_TEXT,
                index,
                role,
                characters=now_span,
                former_characters=was_span,
            )
        is_media = media_of([was]) != media_of([now])
        return Change(
            ChangeKind.MESSAGE_IMAGES if is_media else ChangeKind.MESSAGE_TEXT, index, role
        )
    if differs("reasoning_content"):
        return Change(ChangeKind.MESSAGE_THOUGHTS, index, role)
    if differs("tool_calls"):
        return Change(ChangeKind.MESSAGE_CALLS, index, role)
    return Change(ChangeKind.MESSAGES_REPLACED, index, role, count=1, former_count=1)


def _first_difference(was: Sequence[object], now: Sequence[object]) -> int:
    pairs = enumerate(zip(was, now, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(was), len(now)))


def _changed_span(was: str, now: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first characters that differ and those behind the last ones, in both texts."""
    shorter = min(len(was), len(now))
    start = _first_difference(was, now)
    ending = _first_difference(was[::-1][: shorter - start], now[::-1][: shorter - start])
    return (start, len(was) - ending), (start, len(now) - ending)
