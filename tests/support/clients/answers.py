"""Answers of chat models as tests read them: put together, cut into deltas, in every spelling."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.chat_format import ChatFormat
from machd.reading.chat_output import ChatOutput
from machd.reading.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


def tool(name: str, **properties: str) -> dict[str, object]:
    """A tool as templates see it; ``properties`` are types by name."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
    }
    return {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": schema},
    }


TOOLS = (tool("f", a="integer"), tool("get_weather", city="string", days="integer"))
FAKE = FakeTokenizer().chat_format
BARE = ChatFormat(shows_tools=True, reasoning_markers=("<think>", "</think>"))


@dataclass
class Read:
    """An answer, put together from its pieces."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, bool]] = field(default_factory=list)
    order: str = ""


def put_together(pieces: Iterable[OutputPiece]) -> Read:
    """Join an answer's pieces; fails if they are not in an order that dialects can write."""
    read = Read()
    ids: list[str] = []
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                read.content += text
                read.order += "" if read.order.endswith("c") else "c"
            case Reasoning(text):
                assert text
                read.reasoning += text
                read.order += "" if read.order.endswith("r") else "r"
            case ToolCallStart(index, call_id, name):
                assert index == len(read.calls)
                assert re.fullmatch(r"call_[0-9a-f]{24}", call_id)
                ids.append(call_id)
                read.calls.append((name, "", False))
                read.order += "t"
            case ToolCallArguments(index, text):
                assert index == len(read.calls) - 1
                name, so_far, is_whole = read.calls[-1]
                assert text
                assert not is_whole
                read.calls[-1] = (name, so_far + text, False)
            case ToolCallEnd(index):
                assert index == len(read.calls) - 1
                name, arguments, _ = read.calls[-1]
                assert isinstance(json.loads(arguments), dict)
                read.calls[-1] = (name, arguments, True)
    assert len(set(ids)) == len(ids)
    return read


def read_answer(
    output: ChatOutput, parts: Iterable[str], *, is_cut: bool = False, streams: bool = True
) -> Read:
    """Read an answer that comes in parts."""
    parser = output.parser(streams=streams)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return put_together([*pieces, *parser.finish(is_cut=is_cut)])


def chat_output(chat_format: ChatFormat = FAKE, **options: object) -> ChatOutput:
    """Tell how answers to a request with ``TOOLS`` are read."""
    return ChatOutput(chat_format, **{"tools": TOOLS, **options})  # type: ignore[arg-type]


def cut_text(text: str, cuts: Sequence[int]) -> list[str]:
    """Cut a text at positions, each taken modulo its length."""
    edges = sorted({0, len(text), *(one % (len(text) + 1) for one in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def mlx_format(name: str) -> ChatFormat:
    """Give the chat format around one of mlx-lm's parsers."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return ChatFormat(
        tool_format=name,
        tool_markers=(module.tool_call_start, module.tool_call_end),
        shows_tools=True,
        reasoning_markers=("<think>", "</think>"),
        parse=module.parse_tool_call,
    )


KIMI = (
    "<|tool_call_begin|>functions.get_weather:{0}<|tool_call_argument_begin|>"
    '{{"city": "Paris", "days": 3}}<|tool_call_end|>'
)
XTML_CALL = (
    '<|open|>call tool="get_weather" index="{0}"<|sep|><|open|>argument key="city" type="string"'
    '<|sep|>Paris<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)


SPELLINGS = [
    (
        "json_tools",
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
            "</tool_call>"
        ),
        1,
    ),
    (
        "qwen3_coder",
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
        ),
        1,
    ),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}', 1),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}' * 2, 2),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        1,
    ),
    (
        "pythonic",
        (
            '<|tool_call_start|>[get_weather(city="Paris", days=3), '
            "get_weather(city='Paris', days=3)]<|tool_call_end|>"
        ),
        2,
    ),
    (
        "glm47",
        (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
        ),
        1,
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|>"
        + KIMI.format(0)
        + KIMI.format(1)
        + "<|tool_calls_section_end|>",
        2,
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        1,
    ),
    (
        "minimax_m2",
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
            '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
        1,
    ),
    (
        "minicpm5",
        (
            '<function name="get_weather"><param name="city">Paris</param>'
            '<param name="days">3</param></function>'
        ),
        1,
    ),
    (
        "function_gemma",
        (
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}"
            "<end_function_call>"
        ),
        1,
    ),
    (
        "longcat",
        (
            "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
            "<longcat_arg_value>Paris</longcat_arg_value>\n<longcat_arg_key>days"
            "</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value></longcat_tool_call>"
        ),
        1,
    ),
    (
        "muse_spark",
        (
            '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">'
            'Paris</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
            "</atem:invoke>\n</atem:function_calls>"
        ),
        1,
    ),
    (
        "kimi_k3",
        "<|open|>tools<|sep|>"
        + XTML_CALL.format(1)
        + XTML_CALL.format(2)
        + "<|close|>tools<|sep|>",
        2,
    ),
]
"""Names of mlx-lm's parsers, an answer that each reads, and how many calls it holds: of get_weather, for
three days of Paris."""
