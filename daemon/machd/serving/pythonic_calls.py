"""Calls as a list of Python: ``[name(key="value"), …]``."""

from __future__ import annotations

import ast

from machd.serving.tagged_calls import OpenValueError


def well_formed_python(text: str) -> str:
    """Return a text that is one list of calls with named arguments, line ends in strings escaped.

    mlx-lm's parser finds such a list in any text, and takes what it can of one that is no Python.

    Raises:
        OpenValueError: The text ends inside a string.
        ValueError: It is something else.
    """
    escaped = _with_escaped_line_ends(text.strip())
    try:
        parsed = ast.parse(escaped, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it is no Python") from error
    calls = parsed.elts if isinstance(parsed, ast.List) else []
    if not calls or not all(isinstance(one, ast.Call) and not one.args for one in calls):
        raise ValueError("it is no list of calls")
    return escaped


def _with_escaped_line_ends(text: str) -> str:
    written: list[str] = []
    quote = ""
    is_escaped = False
    for character in text:
        if not quote:
            quote = character if character in "'\"" else ""
        elif is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character == quote:
            quote = ""
        elif character in "\n\r":
            character = "\\n" if character == "\n" else "\\r"  # noqa: PLW2901 - as it is written
        written.append(character)
    if quote:
        raise OpenValueError
    return "".join(written)
