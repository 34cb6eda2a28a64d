"""Changes planted into recorded sessions, each with the cause that a diagnosis has to name.

A plant takes two requests of a session that follow one another, and changes the later one. Message indices are those of the
conversation as machd reads it: the system message is message 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from machd.cli.request_changes import ChangeKind
from support.clients.recorded_sessions import RecordedRequest, read_session

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plant:
    """A planted change.

    Attributes:
        former: Index of the request before the changed one.
        change: Changes the body of the later request.
        kind: The cause to name; None where the prompt stays as it is.
        message_index: The message to name, of changes of messages.
        role: Its role.
        tool_index: The tool to name, of changes of tools.
        changed: What of the message's text changes, as it is afterwards; None to leave that unchecked.
    """

    name: str
    client: str
    former: int
    change: Callable[[Body], None]
    kind: ChangeKind | None
    message_index: int | None = None
    role: str | None = None
    tool_index: int | None = None
    changed: str | None = None

    def requests(self) -> tuple[RecordedRequest, RecordedRequest]:
        """Return the two requests, the later one changed."""
        session = read_session(self.client)
        later = copy.deepcopy(session[self.former + 1])
        self.change(later.body)
        return session[self.former], later


def _in_text(
    holder: Callable[[Body], Body], key: str, was: str, now: str
) -> Callable[[Body], None]:
    """Replace a part of a text, which has to be there."""

    def change(body: Body) -> None:
        place = holder(body)
        assert was in place[key], "the text to change is there"
        place[key] = place[key].replace(was, now, 1)

    return change


def _claude_system(index: int) -> Callable[[Body], Body]:
    return lambda body: body["system"][index]


def _content(index: int, part: int = 0, key: str = "messages") -> Callable[[Body], Body]:
    return lambda body: body[key][index]["content"][part]


def _message(index: int) -> Callable[[Body], Body]:
    return lambda body: body["messages"][index]


def _function(index: int) -> Callable[[Body], Body]:
    return lambda body: body["tools"][index]["function"]


def _call(index: int) -> Callable[[Body], Body]:
    return lambda body: body["messages"][index]["tool_calls"][0]["function"]


def _item(index: int) -> Callable[[Body], Body]:
    return lambda body: body["input"][index]


def _tool(name: str) -> Body:
    return {"name": name, "description": "A planted tool.", "input_schema": {"type": "object"}}


def _function_tool(name: str) -> Body:
    return {
        "type": "function",
        "function": {"name": name, "description": "Planted.", "parameters": {"type": "object"}},
    }


def _swap_tools(body: Body) -> None:
    body["tools"][2], body["tools"][3] = body["tools"][3], body["tools"][2]


def _compact(body: Body) -> None:
    """Put a summary in place of the middle, as compaction does."""
    summary = {"role": "user", "content": "So far: the notes were read and summed up."}
    body["messages"][4:10] = [summary]


def _move_cache_marks(body: Body) -> None:
    for message in body["messages"]:
        if isinstance(message["content"], list):
            message["content"][-1]["cache_control"] = {"type": "ephemeral"}


_TEXT = ChangeKind.MESSAGE_TEXT
_NEXT_DAY = ("2026-11-28", "2026-11-29")

PLANTS = (
    Plant(
        "claude_code_billing_header", "claude_code", 5,
        _in_text(_claude_system(0), "text", "cc_version=2.1.197.092", "cc_version=2.1.197.f84"),
        _TEXT, 0, "system", changed="f84",
    ),
    Plant(
        "claude_code_billing_token_added", "claude_code", 5,
        _in_text(_claude_system(0), "text", "sdk-cli;", "sdk-cli; cch=1f0c7;"),
        _TEXT, 0, "system", changed=" cch=1f0c7;",
    ),
    Plant(
        "claude_code_git_status", "claude_code", 5,
        _in_text(_claude_system(2), "text", "?? summary.txt", "?? summary.txt\n?? more.txt"),
        _TEXT, 0, "system", changed="?? more.txt\n",
    ),
    Plant(
        "claude_code_date", "claude_code", 5,
        _in_text(_content(0), "text", *_NEXT_DAY), _TEXT, 1, "user", changed="9",
    ),
    Plant(
        "claude_code_tools_swapped", "claude_code", 5, _swap_tools,
        ChangeKind.TOOLS_ORDER, tool_index=2,
    ),
    Plant(
        "claude_code_tool_description", "claude_code", 5,
        lambda body: body["tools"][5].update(description=body["tools"][5]["description"] + " New."),
        ChangeKind.TOOL_CHANGED, tool_index=5,
    ),
    Plant(
        "claude_code_tool_put_in_front", "claude_code", 5,
        lambda body: body["tools"].insert(0, _tool("planted")),
        ChangeKind.TOOLS_ADDED, tool_index=0,
    ),
    Plant(
        "claude_code_tool_taken_out", "claude_code", 5, lambda body: body["tools"].pop(3),
        ChangeKind.TOOLS_REMOVED, tool_index=3,
    ),
    Plant(
        "claude_code_no_tools", "claude_code", 5,
        lambda body: body.update(tool_choice={"type": "none"}),
        ChangeKind.TOOLS_REMOVED, tool_index=0,
    ),
    Plant(
        "claude_code_one_character", "claude_code", 5,
        _in_text(_content(4), "text", "three", "thxee"), _TEXT, 5, "assistant", changed="x",
    ),
    Plant(
        "claude_code_tool_result", "claude_code", 5,
        _in_text(_content(3), "content", "garden", "forest"), _TEXT, 4, "tool",
    ),
    Plant(
        "claude_code_call", "claude_code", 5,
        lambda body: body["messages"][2]["content"][0]["input"].update(limit=5),
        ChangeKind.MESSAGE_CALLS, 3, "assistant",
    ),
    Plant("claude_code_compacted", "claude_code", 5, _compact, ChangeKind.MESSAGES_REPLACED, 5, "user"),
    Plant("claude_code_cache_marks", "claude_code", 5, _move_cache_marks, None),
    Plant(
        "codex_date", "codex", 4,
        _in_text(_content(2, key="input"), "text", *_NEXT_DAY), _TEXT, 1, "user", changed="9",
    ),
    Plant(
        "codex_directory", "codex", 4,
        _in_text(_content(2, key="input"), "text", "session/project", "session/other"),
        _TEXT, 1, "user",
    ),
    Plant(
        "codex_instructions", "codex", 4,
        lambda body: body["input"][1]["content"].append({"type": "input_text", "text": "More."}),
        _TEXT, 0, "system",
    ),
    Plant(
        "codex_tool_parameter", "codex", 4,
        lambda body: body["tools"][0]["parameters"]["properties"].pop("tty"),
        ChangeKind.TOOL_CHANGED, tool_index=0,
    ),
    Plant(
        "codex_call", "codex", 4, _in_text(_item(4), "arguments", "cat", "head"),
        ChangeKind.MESSAGE_CALLS, 3, "assistant",
    ),
    Plant(
        "codex_result_cut", "codex", 4, lambda body: body["input"][5].update(output="[cut]"),
        _TEXT, 4, "tool", changed="[cut]",
    ),
    Plant(
        "codex_message_put_in", "codex", 4,
        lambda body: body["input"].insert(3, {"role": "user", "content": "A planted message."}),
        ChangeKind.MESSAGES_ADDED, 2, "user",
    ),
    Plant(
        "opencode_date", "opencode", 5,
        _in_text(_message(0), "content", "Sat Nov 28 2026", "Sun Nov 29 2026"), _TEXT, 0, "system",
    ),
    Plant(
        "opencode_question_edited", "opencode", 5,
        _in_text(_message(1), "content", "notes.txt", "other.txt"), _TEXT, 1, "user",
    ),
    Plant(
        "opencode_answer_edited", "opencode", 5,
        _in_text(_message(4), "content", "garden.", "garden!"), _TEXT, 4, "assistant", changed="!",
    ),
    Plant(
        "opencode_first_turn_dropped", "opencode", 5,
        lambda body: body["messages"].__delitem__(slice(1, 5)),
        ChangeKind.MESSAGES_REMOVED, 1, "user",
    ),
    Plant(
        "opencode_tools_reversed", "opencode", 5, lambda body: body["tools"].reverse(),
        ChangeKind.TOOLS_ORDER, tool_index=0,
    ),
    Plant(
        "opencode_reminder_in_system", "opencode", 5,
        lambda body: body["messages"][0].update(
            content=body["messages"][0]["content"] + "\n190412 tokens left"
        ),
        _TEXT, 0, "system", changed="\n190412 tokens left",
    ),
    Plant(
        "opencode_tool_appended", "opencode", 5,
        lambda body: body["tools"].append(_function_tool("planted")),
        ChangeKind.TOOLS_ADDED, tool_index=10,
    ),
    Plant(
        "qwen_code_folder", "qwen_code", 5,
        _in_text(_content(1), "text", "├───summary.txt", "├───summary.txt\n├───more.txt"),
        _TEXT, 1, "user",
    ),
    Plant(
        "qwen_code_tool_parameter", "qwen_code", 5,
        lambda body: _function(7)(body)["parameters"]["properties"].pop("limit"),
        ChangeKind.TOOL_CHANGED, tool_index=7,
    ),
    Plant(
        "qwen_code_call", "qwen_code", 5, _in_text(_call(4), "arguments", "notes", "other"),
        ChangeKind.MESSAGE_CALLS, 4, "assistant",
    ),
    Plant(
        "qwen_code_greeting_taken_out", "qwen_code", 5,
        lambda body: body["messages"].__delitem__(slice(2, 3)),
        ChangeKind.MESSAGES_REMOVED, 2, "user",
    ),
    Plant(
        "qwen_code_template_variable", "qwen_code", 5,
        lambda body: body.update(chat_template_kwargs={"reasoning_effort": "low"}),
        ChangeKind.TEMPLATE,
    ),
)  # fmt: skip
"""Planted changes of what requests say."""
