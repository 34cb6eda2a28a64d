"""Tools for models whose chat template shows none: machd writes them into the system message.

The text is the same for every model. Calls are asked for in the spelling that most models have seen,
and earlier calls and their results are shown in it, so that the model goes on as it began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from machd.engine.protocol.chat_format import JSON_TOOL_MARKERS
from machd.engine.protocol.tokenizer import ChatMessages
from machd.request.media import MEDIA_KEY, MediaSource, message_content

_START, _END = JSON_TOOL_MARKERS
_RESULT_START, _RESULT_END = "<tool_response>", "</tool_response>"

_INTRODUCTION = (
    "You can call functions. Each line is one of them, with the JSON schema of its parameters:"
)
_INSTRUCTION = f"""To call a function, write its name and its arguments as JSON between markers, like this:
{_START}
{{"name": "function name", "arguments": {{"parameter": "value"}}}}
{_END}
Write one such block for each call and nothing after the last one; the results come in \
{_RESULT_START} markers. Call a function only if the answer needs it; otherwise answer as usual."""


def write_tools(
    messages: ChatMessages, tools: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Return the conversation with its tools, calls and results as plain messages.

    There are no tools if the model is not to call.

    Returns:
        Messages of the roles system, user and assistant.
    """
    written: list[dict[str, object]] = []
    follows_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result and follows_result:
            # Results of parallel calls share a message: many templates want roles to alternate.
            before = _pieces(written[-1])
            written[-1]["content"] = message_content([*before, "\n", *_result(message)])
        elif is_result:
            written.append({"role": "user", "content": message_content(_result(message))})
        else:
            written.append(_with_calls_as_text(message))
        follows_result = is_result
    return _with_system_text(written, _tools_text(tools)) if tools else written


def _tools_text(tools: Sequence[Mapping[str, object]]) -> str:
    functions = [_json(tool.get("function")) for tool in tools]
    return "\n".join([_INTRODUCTION, *functions, "", _INSTRUCTION])


def _with_system_text(messages: list[dict[str, object]], text: str) -> list[dict[str, object]]:
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer"):
        content = f"{first.get('content') or ''}\n\n{text}".lstrip()
        return [{**first, "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_calls_as_text(message: dict[str, object]) -> dict[str, object]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    content = message.get("content")
    blocks = [content] if isinstance(content, str) and content else []
    text = "\n".join([*blocks, *(_call(call) for call in calls)])
    return {**{key: message[key] for key in message if key != "tool_calls"}, "content": text}


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    found = function if isinstance(function, Mapping) else {}
    arguments = found.get("arguments")
    written = arguments if isinstance(arguments, str) and arguments else _json(arguments or {})
    name = _json(found.get("name"))
    return f'{_START}\n{{"name": {name}, "arguments": {written}}}\n{_END}'


def _result(message: Mapping[str, object]) -> list[str | MediaSource]:
    return [f"{_RESULT_START}\n", *_pieces(message), f"\n{_RESULT_END}"]


def _pieces(message: Mapping[str, object]) -> list[str | MediaSource]:
    """Split a message's content, as the inverse of :func:`message_content`."""
    content = message.get("content")
    if not isinstance(content, list):
        return [f"{content or ''}"]
    return [part[MEDIA_KEY] if MEDIA_KEY in part else part["text"] for part in content]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
