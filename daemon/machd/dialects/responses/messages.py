"""From the items of a response to the messages that a chat template reads.

Thoughts, text and calls that follow each other become one message of the assistant's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from machd.dialects.responses.chain import PlacedItem
from machd.dialects.responses.items import InputItem
from machd.dialects.responses.tools import CUSTOM_INPUT
from machd.dialects.wire.raw_json import Allowance
from machd.dialects.wire.tools import past_arguments
from machd.errors import InvalidRequestError

_SYSTEM = "system"
_ASSISTANT = "assistant"


def item_messages(
    items: Iterable[PlacedItem], *, instructions: str | None
) -> list[dict[str, object]]:
    """The conversation as :class:`machd.request.conversation.Conversation` has it.

    Args:
        items: Checked items, oldest first.
        instructions: What the operator says before all of them.

    Raises:
        InvalidRequestError: A call has no output, an output has no call, or a call's arguments
            are nested too deeply.
    """
    messages = _Messages()
    if instructions:
        messages.say(_SYSTEM, instructions)
    for placed in items:
        messages.add(placed.item, placed.place)
    return messages.finished()


@dataclass(slots=True)
class _Turn:
    """What the assistant does in one go."""

    # Texts stay apart until the end: joining them one by one takes the square of their length.
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, object]] = field(default_factory=list)

    def message(self) -> dict[str, object]:
        message: dict[str, object] = {"role": _ASSISTANT, "content": "".join(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class _Messages:
    """Messages as they grow."""

    def __init__(self) -> None:
        self._opening_words: list[str] = []
        self._messages: list[dict[str, object] | _Turn] = []
        self._open: _Turn | None = None
        self._functions: dict[str, str] = {}
        self._unanswered: dict[str, str] = {}
        self._allowance = Allowance()

    def add(self, item: InputItem, place: str) -> None:
        match item.type:
            case "function_call" | "custom_tool_call":
                self._call(item, place)
            case "function_call_output" | "custom_tool_call_output":
                self._answer(item, place)
            case "reasoning":
                self._turn(may_have_text=False).thoughts.append(item.text)
            case _:
                self._say_checked(item, place)

    def say(self, role: str, text: str) -> None:
        """Add a text; the operator's first words are one message, as templates take one alone."""
        self._open = None
        if role == _SYSTEM and not self._messages:
            self._opening_words.append(text)
        else:
            self._messages.append({"role": role, "content": text})

    def finished(self) -> list[dict[str, object]]:
        self._check_answered("input")
        messages = [one.message() if isinstance(one, _Turn) else one for one in self._messages]
        if not self._opening_words:
            return messages
        opening: dict[str, object] = {"role": _SYSTEM, "content": "\n\n".join(self._opening_words)}
        return [opening, *messages]

    def _say_checked(self, item: InputItem, place: str) -> None:
        if item.role == _ASSISTANT:
            self._turn(may_have_text=False).texts.append(item.text)
            return
        self._check_answered(place)
        self.say("user" if item.role == "user" else _SYSTEM, item.text)

    def _call(self, item: InputItem, place: str) -> None:
        if item.status == "incomplete":
            return  # cut short: there is nothing that could be called, and no output of it
        assert item.call_id is not None, "checked before"
        if item.call_id in self._functions:
            param = f"{place}.call_id"
            raise InvalidRequestError(f"{param}: an earlier call has the same id", param=param)
        self._turn(may_have_text=True).calls.append(
            {
                "id": item.call_id,
                "type": "function",
                "function": {
                    "name": item.name,
                    "arguments": _arguments(item, self._allowance, place),
                },
            }
        )
        self._functions[item.call_id] = item.name or ""
        self._unanswered[item.call_id] = place

    def _answer(self, item: InputItem, place: str) -> None:
        assert item.call_id is not None, "checked before"
        if self._unanswered.pop(item.call_id, None) is None:
            param = f"{place}.call_id"
            raise InvalidRequestError(
                f"{param}: no call before it waits for this output", param=param
            )
        if not self._unanswered:
            self._open = None
        self._messages.append(
            {
                "role": "tool",
                "content": item.text,
                "tool_call_id": item.call_id,
                "name": self._functions[item.call_id],
            }
        )

    def _turn(self, *, may_have_text: bool) -> _Turn:
        """The assistant's turn to add to: the open one, or a new one.

        A turn whose calls wait stays open whatever is added: models write text and thoughts
        between calls, and outputs come after all of it.
        """
        if self._open is None or not (
            may_have_text or self._unanswered or not any(self._open.texts)
        ):
            self._open = _Turn()
            self._messages.append(self._open)
        return self._open

    def _check_answered(self, place: str) -> None:
        """Refuse to go on while a call waits for its output."""
        if self._unanswered:
            call = next(iter(self._unanswered.values()))
            raise InvalidRequestError(
                f"{call}: a function_call has no function_call_output after it; send one before "
                "anybody else says something",
                param=place,
            )


def _arguments(item: InputItem, allowance: Allowance, place: str) -> dict[str, object]:
    if item.type == "custom_tool_call":
        return {CUSTOM_INPUT: item.input}
    assert item.arguments is not None, "checked before"
    return past_arguments(item.arguments, param=f"{place}.arguments", allowance=allowance)
