"""Calls as a list of Python: ``[name(key="value"), …]``."""

from __future__ import annotations

import ast

from machd.reading.tagged_calls import OpenValueError


def well_formed_python(text: str) -> str:
    """Check that a text is one list of calls with constant arguments; return it with escaped line ends in strings.

    mlx-lm's parser finds such a list in any text, and accepts invalid Python and computed values in part: several calls
    become one. A word without quotes is a string, as for mlx-lm.

    Raises:
        OpenValueError: The text ends inside a string.
        ValueError: The text is no such list.
    """
    escaped = _with_escaped_line_ends(text.strip())
    try:
        parsed = ast.parse(escaped, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it is no Python") from error
    calls = parsed.elts if isinstance(parsed, ast.List) else []
    if not calls or not all(isinstance(one, ast.Call) and not one.args for one in calls):
        raise ValueError("it is no list of calls")
    words = _Words()
    for call in calls:
        assert isinstance(call, ast.Call)
        for keyword in call.keywords:
            keyword.value = words.visit(keyword.value)
            if keyword.arg is None:
                raise ValueError("it has arguments without a name")
            ast.literal_eval(keyword.value)  # a ValueError for an expression that is no literal
    return ast.unparse(parsed) if words.has_quoted else escaped


class _Words(ast.NodeTransformer):
    """Turns JSON's three words into constants, and all other names into strings."""

    def __init__(self) -> None:
        self.has_quoted = False

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _JSON_WORDS:
            self.has_quoted = True
        return ast.copy_location(ast.Constant(_JSON_WORDS.get(node.id, node.id)), node)


_JSON_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


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
