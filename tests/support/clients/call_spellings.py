"""How each family's chat template writes calls, in every format that mlx-lm has a parser for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Call = tuple[str, Mapping[str, object]]
"""A function's name, and its arguments: ``city`` is a string, ``days`` an integer."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """One format.

    Attributes:
        write: Calls of one section to the text between its markers.
        start: The opening marker.
        end: The closing one, or nothing.
        forbidden: Texts that no value can hold, since the format escapes nothing.
        is_single: A section holds one call.
        ends_itself: Calls are whole without the closing marker.
        value_end: Closes a value, where a call without it is still read.
    """

    write: Callable[[Sequence[Call]], str]
    start: str
    end: str
    forbidden: tuple[str, ...] = ()
    is_single: bool = False
    ends_itself: bool = True
    value_end: str = ""

    def section(self, calls: Sequence[Call]) -> str:
        """Write calls with the markers around them."""
        groups = [[call] for call in calls] if self.is_single else [list(calls)]
        return "\n".join(f"{self.start}{self.write(group)}{self.end}" for group in groups)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _json(calls: Sequence[Call]) -> str:
    return (
        "\n".join(
            "\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            for name, arguments in calls
        )
        + "\n"
    )


def _qwen(calls: Sequence[Call]) -> str:
    return "".join(
        f"\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        + "</function>\n"
        for name, arguments in calls
    )


def _minimax(calls: Sequence[Call]) -> str:
    return "".join(
        f'\n<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{_text(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        + "</invoke>\n"
        for name, arguments in calls
    )


def _muse(calls: Sequence[Call]) -> str:
    written = _minimax(calls)
    for tag in ("invoke", "parameter"):
        written = written.replace(f"<{tag} ", f"<atem:{tag} ").replace(
            f"</{tag}>", f"</atem:{tag}>"
        )
    return written


def _minicpm(calls: Sequence[Call]) -> str:
    ((name, arguments),) = calls

    def value(one: object) -> str:
        text = _text(one)
        return f"<![CDATA[{text}]]>" if any(mark in text for mark in "<&\n") else text

    return f'"{name}">' + "".join(
        f'<param name="{key}">{value(one)}</param>' for key, one in arguments.items()
    )


def _glm(prefix: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        ((name, arguments),) = calls
        return f"{name}\n" + "".join(
            f"<{prefix}arg_key>{key}</{prefix}arg_key>\n"
            f"<{prefix}arg_value>{_text(value)}</{prefix}arg_value>\n"
            for key, value in arguments.items()
        )

    return write


def _xtml(calls: Sequence[Call]) -> str:
    def argument(key: str, value: object) -> str:
        kind = "string" if isinstance(value, str) else "number"
        return (
            f'<|open|>argument key="{key}" type="{kind}"<|sep|>{_text(value)}'
            "<|close|>argument<|sep|>"
        )

    return "".join(
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        + "".join(argument(*one) for one in arguments.items())
        + "<|close|>call<|sep|>"
        for index, (name, arguments) in enumerate(calls, 1)
    )


def _kimi(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )


def _mistral(call_id: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        return "[TOOL_CALLS]".join(
            f"{name}{call_id}[ARGS]{json.dumps(arguments)}" for name, arguments in calls
        )

    return write


def _old_mistral(calls: Sequence[Call]) -> str:
    return " " + json.dumps(
        [{"name": name, "arguments": given, "id": "abcdefghi"} for name, given in calls]
    )


def _gemma(quote: str) -> Callable[[Sequence[Call]], str]:
    def value(one: object) -> str:
        return f"{quote}{one}{quote}" if isinstance(one, str) else json.dumps(one)

    def write(calls: Sequence[Call]) -> str:
        return "".join(
            f"call:{name}{{"
            + ",".join(f"{key}:{value(one)}" for key, one in arguments.items())
            + "}"
            for name, arguments in calls
        )

    return write


def _python(calls: Sequence[Call]) -> str:
    return (
        "["
        + ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            for name, arguments in calls
        )
        + "]"
    )


SPELLED: Mapping[str, Spelling] = {
    "json_tools": Spelling(_json, "<tool_call>", "</tool_call>"),
    "qwen3_coder": Spelling(
        _qwen,
        "<tool_call>",
        "</tool_call>",
        ("</parameter>", "<parameter=", "</function>"),
        value_end="\n</parameter>",
    ),
    "minimax_m2": Spelling(
        _minimax,
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        ("</parameter>", "<parameter", "</invoke>"),
        value_end="</parameter>",
    ),
    "muse_spark": Spelling(
        _muse,
        "<atem:function_calls>",
        "</atem:function_calls>",
        ("</atem:parameter>", "<atem:parameter", "</atem:invoke>"),
        value_end="</atem:parameter>",
    ),
    "minicpm5": Spelling(
        _minicpm, "<function name=", "</function>", ("]]>",), is_single=True, ends_itself=False
    ),
    "glm47": Spelling(
        _glm(""),
        "<tool_call>",
        "</tool_call>",
        ("</arg_value>", "<arg_key>"),
        is_single=True,
        ends_itself=False,
        value_end="</arg_value>",
    ),
    "longcat": Spelling(
        _glm("longcat_"),
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        ("</longcat_arg_value>", "<longcat_arg_key>"),
        is_single=True,
        ends_itself=False,
        value_end="</longcat_arg_value>",
    ),
    "kimi_k3": Spelling(
        _xtml,
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        ("<|close|>argument<|sep|>", "<|open|>argument", "<|close|>call<|sep|>"),
        value_end="<|close|>argument<|sep|>",
    ),
    "kimi_k2": Spelling(_kimi, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "mistral": Spelling(_mistral(""), "[TOOL_CALLS]", ""),
    "mistral with ids": Spelling(_mistral("[CALL_ID]Ab1cdEfgh"), "[TOOL_CALLS]", ""),
    "mistral as JSON": Spelling(_old_mistral, "[TOOL_CALLS]", ""),
    "gemma4": Spelling(_gemma('<|"|>'), "<|tool_call>", "<tool_call|>", ('<|"|>',)),
    "function_gemma": Spelling(
        _gemma("<escape>"), "<start_function_call>", "<end_function_call>", ("<escape>",)
    ),
    "pythonic": Spelling(_python, "<|tool_call_start|>", "<|tool_call_end|>"),
}
"""By mlx-lm's name of the format, and what tells spellings of one format apart."""
