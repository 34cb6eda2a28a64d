"""A conversation without the texts that rules take out of prompts, and what was taken out.

It is read once, before the template sees it, so that every dialect, the counting of tokens and the warming of prompts
have the same prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from machd.reading.prompt_marks import Messages
from machd.reading.prompt_places import Places, PromptPlace
from machd.reading.prompt_rules import PROMPT_RULES, PromptRule, RulePosition
from machd.settings.cache import PromptRuleName

_SYSTEM, _USER = "system", "user"


@dataclass(frozen=True, slots=True)
class RemovedText:
    """A text that a rule took out of a prompt.

    Attributes:
        message_index: Index in the request of the message that had it; None for one in another field of the request, and for
            a text of the chat template.
        role: The role of that message; None for a text of the chat template.
        characters: Its length.
    """

    rule: PromptRuleName
    message_index: int | None
    role: str | None
    characters: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """Characters of a message's text that a rule takes out."""

    start: int
    stop: int
    rule: PromptRuleName


class NormalisedMessages:
    """Messages without what rules take out.

    Attributes:
        messages: Messages for the template. Those without a match are the same objects; a system message of which nothing is
            left is not among them.
        removed: What was taken out, in the order of messages.
    """

    def __init__(
        self,
        messages: Messages,
        rules: Collection[PromptRuleName],
        *,
        indices: Sequence[int | None] | None = None,
    ) -> None:
        """Apply the rules of these names; ``indices`` are the messages' in the request, where they are others."""
        self._in_request = range(len(messages)) if indices is None else indices
        self._cuts = _found(messages, rules)
        self.messages = messages
        self._indices: Sequence[int] = range(len(messages))
        if self._cuts:
            self._cut_out()
        self.removed = tuple(
            RemovedText(
                one.rule,
                self._in_request[index],
                str(messages[index]["role"]),
                one.stop - one.start,
            )
            for index, cuts in self._cuts.items()
            for one in cuts
        )

    def _cut_out(self) -> None:
        shown = [
            (index, _without(message, self._cuts[index]) if index in self._cuts else message)
            for index, message in enumerate(self.messages)
        ]
        left = [one for one in shown if one[0] not in self._cuts or not _is_empty(one[1])]
        kept = left or shown[:1]  # a template needs a message, if only an empty one
        self._indices = [index for index, _ in kept]
        self.messages = [message for _, message in kept]

    def place_in_request(self, place: PromptPlace) -> PromptPlace:
        """Return a place in these messages as one in the messages that were given."""
        if place.message_index is None:
            return place
        index, character = self._indices[place.message_index], place.character
        if character is not None:
            for cut in self._cuts.get(index, ()):
                if character >= cut.start:
                    character += cut.stop - cut.start
        return replace(place, message_index=self._in_request[index], character=character)


class PlacesInRequest:
    """Places of a normalised conversation's tokens, in the messages that were given."""

    def __init__(self, places: Places, messages: NormalisedMessages) -> None:
        self._places = places
        self._messages = messages

    def at(self, tokens: int) -> PromptPlace | None:
        """Return the place behind so many tokens; None where it is not known."""
        place = self._places.at(tokens)
        return None if place is None else self._messages.place_in_request(place)


def _found(messages: Messages, rules: Collection[PromptRuleName]) -> dict[int, list[_Cut]]:
    """Return what rules take out of messages, by their indices, in order."""
    active = [(name, rule) for name, rule in PROMPT_RULES.items() if name in rules]
    if not active:
        return {}
    first_user = next((i for i, one in enumerate(messages) if one.get("role") == _USER), -1)
    found: dict[int, list[_Cut]] = {}
    for index, message in enumerate(messages):
        is_system = message.get("role") == _SYSTEM
        holds = {
            RulePosition.OPENING: is_system and index == 0,
            RulePosition.SYSTEM: is_system,
            RulePosition.FIRST_USER: index == first_user,
        }
        due = [one for one in active if holds[one[1].position]]
        if due and (cuts := _cuts(_text_of(message), due)):
            found[index] = cuts
    return found


def _cuts(text: str, rules: Sequence[tuple[PromptRuleName, PromptRule]]) -> list[_Cut]:
    """Return what rules take out of a text, in order; none overlap."""
    found = sorted(
        (cut for rule in rules for cut in _matches(text, *rule)), key=lambda one: one.start
    )
    cuts: list[_Cut] = []
    for cut in found:
        if not cuts or cut.start >= cuts[-1].stop:
            cuts.append(cut)
    return cuts


def _matches(text: str, name: PromptRuleName, rule: PromptRule) -> Iterator[_Cut]:
    for pattern in rule.patterns:
        matches = pattern.finditer(text)
        for match in matches if rule.removes_all else islice(matches, 1):
            yield _Cut(*match.span("removed"), name)


def _text_of(message: dict[str, object]) -> str:
    """Return a message's text; of one with images or videos the text in front of them."""
    content = message.get("content")
    if isinstance(content, list):
        content = content[0].get("text") if content else ""
    return content if isinstance(content, str) else ""


def _without(message: dict[str, object], cuts: Sequence[_Cut]) -> dict[str, object]:
    content, text = message["content"], _text_of(message)
    starts = [0, *(one.stop for one in cuts)]
    stops = [*(one.start for one in cuts), len(text)]
    rest = "".join(text[start:stop] for start, stop in zip(starts, stops, strict=True))
    if isinstance(content, list):
        return {**message, "content": [{**content[0], "text": rest}, *content[1:]]}
    return {**message, "content": rest}


def _is_empty(message: dict[str, object]) -> bool:
    return message.get("role") == _SYSTEM and not message["content"]
