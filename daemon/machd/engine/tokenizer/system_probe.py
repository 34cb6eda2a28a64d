"""What a chat template does with system messages, found by rendering a few words."""

from __future__ import annotations

from collections.abc import Callable

from machd.engine.protocol.chat_format import SystemMessages
from machd.engine.tokenizer.template_renderer import MARK, SYSTEM, USER

_Messages = list[dict[str, object]]

_OPENING: dict[str, object] = {"role": "system", "content": "Be brief."}
_ANSWER: dict[str, object] = {"role": "assistant", "content": "Hi."}
_CALL: dict[str, object] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            # Mistral's templates want nine letters or digits.
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "look_up", "arguments": {"key": "a"}},
        }
    ],
}
_RESULT: dict[str, object] = {
    "role": "tool",
    "tool_call_id": "abcdefghi",
    "name": "look_up",
    "content": "found",
}
_LATER: tuple[_Messages, ...] = (
    [_OPENING, USER, _ANSWER, SYSTEM, USER],
    [USER, _ANSWER, SYSTEM, USER],
    [_OPENING, USER, SYSTEM],
)


def find_system_messages(render: Callable[[_Messages], str | None]) -> SystemMessages:
    """Find where the template shows a system message; ``render`` gives None where it refuses the messages."""

    def shows(messages: _Messages) -> bool:
        return MARK in (render(messages) or "")

    if not shows([SYSTEM, USER]):
        return SystemMessages.NONE
    return SystemMessages.ANYWHERE if all(map(shows, _LATER)) else SystemMessages.FIRST


def takes_user_after_tool(render: Callable[[_Messages], str | None]) -> bool:
    """Tell whether a user's turn may follow the result of a call; true where results are refused anyway."""
    called = [USER, _CALL, _RESULT]
    return render(called) is None or render([*called, USER]) is not None
