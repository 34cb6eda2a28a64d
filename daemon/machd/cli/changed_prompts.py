"""Two prompts of which the later one parts from the earlier one: what changed, and what is the same behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from machd.cli.request_changes import Change, ChangeKind, first_change
from machd.reading.conversation import PreparedConversation
from machd.reading.prompt_places import PromptPart, PromptPlace
from machd.request.conversation import Conversation
from machd.request.media import media_of
from machd.scheduler.block_tree import common_tokens

_STRIDE = 16
"""Tokens of a prompt that are skipped where all between two of them is alike."""


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

    def first_of_part(self, is_wanted: Callable[[PromptPlace], bool], start: int = 0) -> int | None:
        """Return the first token from ``start`` on whose part or message is wanted; None if there is none, or none is known."""
        for place, tokens in self.part_tokens(start):
            if place is not None and is_wanted(place):
                return start
            start += tokens
        return None

    def token_behind(self, message_index: int, character: int = 0) -> int | None:
        """Return the first token at or behind a character of a message; None if there is none, or places are not known."""

        def is_behind(tokens: int) -> bool | None:
            place = self.place(tokens)
            if place is None:
                return None
            if place.message_index is None or place.message_index > message_index:
                return True
            is_inside = place.message_index == message_index and place.part is PromptPart.MESSAGE
            return is_inside and (place.character or 0) >= character

        # Where a token is not behind, no earlier one is, so most tokens need no look.
        start, count = 0, len(self.prompt)
        for at in range(0, count, _STRIDE):
            if found := is_behind(at):
                break
            if found is False:
                start = at
        return next(filter(is_behind, range(start, count)), None)

    def part_tokens(self, start: int) -> Iterator[tuple[PromptPlace | None, int]]:
        """Yield stretches of tokens from ``start`` on: a place of each, and how many of the same part and message they are."""
        stop = len(self.prompt)
        while start < stop:
            place, end = self.place(start), min(start + _STRIDE, stop)
            # Nothing else lies between two tokens of one part that are so close; between two of no known part something may.
            if place is None or _key(place) != _key(self.place(end - 1)):
                end = start + 1
            yield place, end - start
            start = end


def _key(place: PromptPlace | None) -> object:
    return None if place is None else (place.part, place.message_index, place.tool_index)


def change_between(
    former: RenderedRequest, later: RenderedRequest, parted_at_tokens: int
) -> tuple[Change, int]:
    """Return what the later request has changed, and how many tokens behind the change are those of the former one.

    Args:
        former: A request that was kept.
        later: A request whose prompt parts from it.
        parted_at_tokens: Tokens that they have in common.
    """
    change = first_change(former.conversation, later.conversation, later.place(parted_at_tokens))
    was = _behind(change, former, parted_at_tokens, is_former=True)
    now = _behind(change, later, parted_at_tokens, is_former=False)
    if was is None or now is None:
        return change, 0
    return change, common_tokens(later.prompt[now:], former.prompt, was)


def _behind(change: Change, request: RenderedRequest, start: int, *, is_former: bool) -> int | None:
    """Return the first token behind a change; None if there is none, or it is not known."""
    index = change.message_index
    count = change.former_count if is_former else change.count
    if change.kind is ChangeKind.TEMPLATE:
        return request.first_of_part(_is_message, start)
    if index is None:
        return _behind_tools(change, request, start, count)
    if change.kind is ChangeKind.MESSAGE_IMAGES:
        return _behind_images(request, index)
    if change.kind is ChangeKind.MESSAGE_TEXT:
        span = change.former_characters if is_former else change.characters
        return None if span is None else request.token_behind(index, span[1])
    is_inside = change.kind in (ChangeKind.MESSAGE_CALLS, ChangeKind.MESSAGE_THOUGHTS)
    return request.token_behind(index + (1 if is_inside else count))


def _is_message(place: PromptPlace) -> bool:
    return place.part is PromptPart.MESSAGE


def _behind_tools(change: Change, request: RenderedRequest, start: int, count: int) -> int | None:
    if change.kind is not ChangeKind.TOOLS_ORDER:
        changed = 1 if change.kind is ChangeKind.TOOL_CHANGED else count
        following = (change.tool_index or 0) + changed
        found = request.first_of_part(
            lambda at: (-1 if at.tool_index is None else at.tool_index) >= following
        )
        if found is not None:
            return found
    return request.first_of_part(_is_message, _end_of_tools(request, start))


def _end_of_tools(request: RenderedRequest, start: int) -> int:
    """Return the first token behind all tools that is not before ``start``."""
    at = end = 0
    for place, tokens in request.part_tokens(0):
        at += tokens
        if place is not None and place.part is PromptPart.TOOLS:
            end = at
    return max(start, end)


def _behind_images(request: RenderedRequest, index: int) -> int | None:
    before = len(media_of(request.conversation.messages[: index + 1]))
    spans = request.prepared.media
    return spans[before - 1].stop if 0 < before <= len(spans) else None
