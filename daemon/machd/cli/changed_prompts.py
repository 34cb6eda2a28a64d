"""Two prompts of which the later one parts from the earlier one: what changed, and what is the same behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from machd.cli.request_changes import Change, ChangeKind, first_change
from machd.reading.conversation import PreparedConversation
from machd.reading.prompt_places import PromptPart, PromptPlace
from machd.request.conversation import Conversation
from machd.request.media import media_of
from machd.scheduler.block_tree import common_tokens


@dataclass(frozen=True, slots=True)
class RenderedRequest:
    """A conversation and its prompt."""

    line: int
    conversation: Conversation
    prepared: PreparedConversation

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids."""
        return self.prepared.prompt

    def place(self, tokens: int) -> PromptPlace | None:
        """Return the place behind so many tokens; None where it is not known."""
        places = self.prepared.places
        return None if places is None else places.at(tokens)

    def first_token(self, start: int, is_wanted: Callable[[PromptPlace], bool]) -> int | None:
        """Return the first token from ``start`` on whose place is wanted; None if there is none, or places are not known."""
        for at in range(start, len(self.prompt)):
            if (place := self.place(at)) is not None and is_wanted(place):
                return at
        return None


def change_between(
    former: RenderedRequest, later: RenderedRequest, parted_at_tokens: int
) -> tuple[Change, int]:
    """Return what the later request has changed, and how many tokens behind the change are those of the former one.

    Args:
        former: A request that was kept.
        later: A request whose prompt parts from it.
        parted_at_tokens: Tokens that they have in common.
    """
    change = first_change(
        former.conversation, later.conversation, later.place(parted_at_tokens)
    )
    was = _behind(change, former, parted_at_tokens, is_former=True)
    now = _behind(change, later, parted_at_tokens, is_former=False)
    if was is None or now is None:
        return change, 0
    return change, common_tokens(later.prompt[now:], former.prompt, was)


def _behind(change: Change, request: RenderedRequest, start: int, *, is_former: bool) -> int | None:
    """Return the first token behind a change; None if there is none, or it is not known."""
    index = change.message_index or 0
    match change.kind:
        case ChangeKind.MESSAGE_TEXT:
            span = change.former_characters if is_former else change.characters
            if span is None:
                return None
            stop = span[1]
            return request.first_token(start, lambda at: _is_behind(at, index, stop))
        case ChangeKind.MESSAGE_IMAGES:
            return _behind_images(request, index)
        case ChangeKind.MESSAGES_ADDED | ChangeKind.MESSAGES_REMOVED:
            is_longer = is_former is (change.kind is ChangeKind.MESSAGES_REMOVED)
            index += change.count if is_longer else 0
            return request.first_token(start, lambda at: _is_behind(at, index, 0))
        case ChangeKind.MESSAGE_CALLS | ChangeKind.MESSAGE_THOUGHTS | ChangeKind.MESSAGE_REPLACED:
            return request.first_token(start, lambda at: _is_behind(at, index + 1, 0))
        case ChangeKind.TEMPLATE:
            return request.first_token(start, lambda at: at.part is PromptPart.MESSAGE)
    return _behind_tool(change, request, start, is_former=is_former)


def _is_behind(place: PromptPlace, index: int, character: int) -> bool:
    """Return whether a place is at or behind a character of a message's text."""
    if place.message_index is None or place.message_index > index:
        return True
    is_inside = place.message_index == index and place.part is PromptPart.MESSAGE
    return is_inside and (place.character or 0) >= character


def _behind_tool(
    change: Change, request: RenderedRequest, start: int, *, is_former: bool
) -> int | None:
    """Return the first token of the tool that both requests have behind a change, or behind all tools."""
    last: int | None = None
    if change.kind is not ChangeKind.TOOLS_ORDER:
        is_longer = is_former is (change.kind is ChangeKind.TOOLS_REMOVED)
        count = 1 if change.kind is ChangeKind.TOOL_CHANGED else change.count * is_longer
        last = (change.tool_index or 0) + count
    is_inside = False
    for at in range(start, len(request.prompt)):
        place = request.place(at)
        if place is None:
            return None
        if place.part is PromptPart.TOOLS:
            is_inside = True
            if last is not None and (place.tool_index or 0) >= last:
                return at
        elif is_inside or place.part is PromptPart.MESSAGE:
            return at
    return None


def _behind_images(request: RenderedRequest, index: int) -> int | None:
    before = len(media_of(request.conversation.messages[: index + 1]))
    spans = request.prepared.media
    return spans[before - 1].stop if 0 < before <= len(spans) else None
