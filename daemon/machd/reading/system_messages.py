"""System messages, moved to where the model's chat template takes them.

Clients send several at the beginning and more later; many templates take one at the beginning, or none, and
otherwise refuse the conversation or silently drop the message.
"""

from __future__ import annotations

from collections.abc import Sequence

from machd.engine.protocol.chat_format import ChatFormat, SystemMessages
from machd.engine.protocol.tokenizer import ChatMessages

_SYSTEM, _USER, _TOOL = "system", "user", "tool"
_GAP = "\n\n"


def merge_opening(messages: ChatMessages) -> list[dict[str, object]]:
    """Join the system messages at the beginning, with an empty line between their texts."""
    count = next(
        (index for index, one in enumerate(messages) if one.get("role") != _SYSTEM), len(messages)
    )
    if count < 2:
        return list(messages)
    texts = [str(one.get("content") or "") for one in messages[:count]]
    opening = {**messages[0], "content": _GAP.join(text for text in texts if text)}
    return [opening, *messages[count:]]


def place_system_messages(
    messages: ChatMessages, chat_format: ChatFormat
) -> list[dict[str, object]]:
    """Turn system messages that the template does not take into user turns, in their places.

    Their text stands between ``<system>`` and ``</system>``. It joins the user's turn beside it, or the two around it, since
    many templates want roles to alternate, and goes behind the results of calls if it stands between
    a call and its result.

    At most one system message stands in front of the messages.
    """
    if chat_format.system_messages is SystemMessages.ANYWHERE:
        return list(messages)
    placed: list[dict[str, object]] = []
    waiting: list[str] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        is_opening = index == 0 and chat_format.system_messages is SystemMessages.FIRST
        if role == _SYSTEM and not is_opening:
            if message.get("content"):
                waiting.append(f"<system>\n{message['content']}\n</system>")
            continue
        if waiting and role != _TOOL:
            text = _GAP.join(waiting)
            waiting = []
            if role == _USER:
                _add_in_front(placed, text, message, chat_format)
                continue
            _add(placed, text, chat_format)
        placed.append(message)
    if waiting:
        _add(placed, _GAP.join(waiting), chat_format)
    return placed


def _takes_more(placed: Sequence[dict[str, object]], chat_format: ChatFormat) -> bool:
    """Tell whether the last message takes a text of the user's: it is one, or a result that no turn may follow."""
    role = placed[-1].get("role") if placed else None
    return role == _USER or (role == _TOOL and not chat_format.takes_user_after_tool)


def _add_in_front(
    placed: list[dict[str, object]],
    text: str,
    message: dict[str, object],
    chat_format: ChatFormat,
) -> None:
    """Add a user's turn with a text in front of it."""
    content = message.get("content")
    if placed and placed[-1].get("role") == _USER:
        said = _joined(placed[-1].get("content"), text)
        placed[-1] = {**placed[-1], "content": _joined(said, content)}
    elif _takes_more(placed, chat_format):
        _add(placed, text, chat_format)
        placed.append(message)
    else:
        placed.append({**message, "content": _joined(text, content)})


def _add(placed: list[dict[str, object]], text: str, chat_format: ChatFormat) -> None:
    if _takes_more(placed, chat_format):
        placed[-1] = {**placed[-1], "content": _joined(placed[-1].get("content"), text)}
    else:
        placed.append({"role": _USER, "content": text})


def _joined(before: object, behind: object) -> str | list[object]:
    if isinstance(before, list) and isinstance(behind, list):
        return [*before, {"type": "text", "text": _GAP}, *behind]
    if isinstance(before, list):
        return [*before, {"type": "text", "text": f"{_GAP}{behind}"}]
    if isinstance(behind, list):
        return [{"type": "text", "text": f"{before}{_GAP}"}, *behind]
    return _GAP.join(str(text) for text in (before, behind) if text)
