"""From the items of a response to the messages that a chat template reads."""

from __future__ import annotations

from collections.abc import Iterable

from machd.api.raw_json import raw_object
from machd.api.responses_items import InputItem, PlacedItem
from machd.errors import InvalidRequestError

__all__ = ["item_messages"]

_SYSTEM = "system"
_ASSISTANT = "assistant"


def item_messages(
    items: Iterable[PlacedItem], *, instructions: str | None
) -> list[dict[str, object]]:
    """The conversation as :class:`machd.api.conversation.Conversation` has it.

    Args:
        items: Checked items, oldest first.
        instructions: What the operator says before all of them.

    Raises:
        InvalidRequestError: A call has no output, an output has no call, or a call's arguments
            are no JSON object.
    """
    messages = _Messages()
    if instructions:
        messages.say(_SYSTEM, instructions)
    for placed in items:
        messages.add(placed.item, placed.place)
    return messages.finished()


class _Messages:
    """Messages as they grow; what the assistant does in one go is one message."""

    def __init__(self) -> None:
        # Texts stay apart until the end: joining them one by one takes the square of their length.
        self._opening_words: list[str] = []
        self._thoughts: list[tuple[dict[str, object], list[str]]] = []
        self._messages: list[dict[str, object]] = []
        self._open: dict[str, object] | None = None
        self._functions: dict[str, str] = {}
        self._unanswered: dict[str, str] = {}

    def add(self, item: InputItem, place: str) -> None:
        match item.type:
            case "function_call":
                self._call(item, place)
            case "function_call_output":
                self._answer(item, place)
            case "reasoning":
                self._think(item.text)
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
        for message, texts in self._thoughts:
            message["reasoning_content"] = "".join(texts)
        if not self._opening_words:
            return self._messages
        opening: dict[str, object] = {"role": _SYSTEM, "content": "\n\n".join(self._opening_words)}
        return [opening, *self._messages]

    def _say_checked(self, item: InputItem, place: str) -> None:
        if item.role == _ASSISTANT:
            self._assistant(taken=("content", "tool_calls"))["content"] = item.text
            return
        self._check_answered(place)
        self.say("user" if item.role == "user" else _SYSTEM, item.text)

    def _think(self, text: str) -> None:
        message = self._assistant(taken=("content", "tool_calls"))
        if not self._thoughts or self._thoughts[-1][0] is not message:
            self._thoughts.append((message, []))
        self._thoughts[-1][1].append(text)

    def _call(self, item: InputItem, place: str) -> None:
        if item.status == "incomplete":
            return  # cut short: there is nothing that could be called, and no output of it
        assert item.call_id is not None, "checked before"
        assert item.arguments is not None, "checked before"
        if item.call_id in self._functions:
            param = f"{place}.call_id"
            raise InvalidRequestError(f"{param}: an earlier call has the same id", param=param)
        calls = self._assistant(taken=()).setdefault("tool_calls", [])
        assert isinstance(calls, list), "it was made right here"
        calls.append(
            {
                "id": item.call_id,
                "type": "function",
                "function": {
                    "name": item.name,
                    "arguments": _arguments(item.arguments, param=f"{place}.arguments"),
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
                f"{param}: no function_call before it waits for this output", param=param
            )
        self._open = None
        self._messages.append(
            {
                "role": "tool",
                "content": item.text,
                "tool_call_id": item.call_id,
                "name": self._functions[item.call_id],
            }
        )

    def _assistant(self, *, taken: tuple[str, ...]) -> dict[str, object]:
        """The assistant's message to add to: the open one, unless it has one of these already."""
        if self._open is None or any(self._open.get(name) for name in taken):
            self._check_answered("input")
            self._open = {"role": _ASSISTANT, "content": ""}
            self._messages.append(self._open)
        return self._open

    def _check_answered(self, place: str) -> None:
        """Refuse to go on while a call waits for its output."""
        if self._unanswered:
            call = next(iter(self._unanswered.values()))
            raise InvalidRequestError(
                f"{call}: a function_call has no function_call_output after it; send one before "
                "anything else is said",
                param=place,
            )


def _arguments(text: str, *, param: str) -> dict[str, object]:
    """A call's arguments as an object; clients write no text for no arguments."""
    return raw_object(text, param=param, max_bytes=None) if text else {}
