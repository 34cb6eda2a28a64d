"""Tools, calls and results in words, for templates that know of none."""

from __future__ import annotations

import json

from machd.engine.fake.tokenizer import FakeTokenizer
from machd.reading.chat_output import ChatOutput
from machd.reading.output import Content, ToolCallStart
from machd.reading.tool_prompt import write_tools
from machd.request.media import MEDIA_KEY, MediaKind, MediaSource

TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "f", "description": "caf\u00e9", "parameters": {"type": "object"}},
}
USER: dict[str, object] = {"role": "user", "content": "hi"}


def _call(name: str, arguments: object) -> dict[str, object]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_stand_in_the_system_message() -> None:
    """Behind what the client wrote there, or in a message of their own."""
    alone = write_tools([USER], [TOOL])
    assert [one["role"] for one in alone] == ["system", "user"]
    assert json.dumps(TOOL["function"], ensure_ascii=False) in str(alone[0]["content"])
    system: dict[str, object] = {"role": "system", "content": "Be kind."}
    both = write_tools([system, USER], [TOOL])
    assert len(both) == 2
    assert str(both[0]["content"]).startswith("Be kind.\n\n")
    assert system["content"] == "Be kind."


def test_without_tools_a_plain_conversation_stays_as_it_is() -> None:
    """Nothing is added for clients that use no tools."""
    messages: list[dict[str, object]] = [USER, {"role": "assistant", "content": "ho"}, USER]
    assert write_tools(messages, []) == messages


def test_earlier_calls_and_results_are_shown_as_the_model_is_asked_to_write_them() -> None:
    """Calls as text that the parser reads back; results of parallel calls in one message."""
    calls = [_call("f", {"a": 1}), _call("f", '{"a": 2}')]
    messages: list[dict[str, object]] = [
        USER,
        {"role": "assistant", "content": "Wait.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": "done"},
    ]
    written = write_tools(messages, [])
    assert [one["role"] for one in written] == ["user", "assistant", "user", "assistant"]
    assert not any("tool_calls" in one for one in written)
    results = str(written[2]["content"])
    assert results.count("<tool_response>") == 2
    assert results.index("one") < results.index("two")
    parser = ChatOutput(FakeTokenizer().chat_format, (TOOL,)).parser()
    pieces = [*parser.push(str(written[1]["content"])), *parser.finish(is_cut=False)]
    assert pieces[0] == Content("Wait.")
    assert [one.name for one in pieces if isinstance(one, ToolCallStart)] == ["f", "f"]


def test_images_of_results_stay_between_the_markers_of_their_results() -> None:
    """Results of parallel calls share a message, and each image keeps its place in it."""
    image = {"type": "image", MEDIA_KEY: MediaSource(MediaKind.IMAGE, "p", content=b"x")}
    messages: list[dict[str, object]] = [
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}, image]},
        {"role": "tool", "tool_call_id": "3", "content": "three"},
    ]
    (written,) = write_tools(messages, [])
    assert written["content"] == [
        {
            "type": "text",
            "text": "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo",
        },
        image,
        {"type": "text", "text": "\n</tool_response>\n<tool_response>\nthree\n</tool_response>"},
    ]
