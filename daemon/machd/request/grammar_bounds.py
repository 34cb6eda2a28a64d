"""Bound on the references of a client's grammar back to itself.

A parser follows all readings of a text at once. How many there are, and with them the time for one
token, grows with the cube of a grammar's recursive references: 3 kB of ``s: s x s | s y s | ...``
took seconds. Grammars that people write have some dozens of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from machd.errors import GrammarError

MAX_RECURSIVE_REFERENCES = 128
"""Among rules that lead back to each other, or to something that repeats."""

LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)*/')
"""A text or a pattern of Lark's."""

_COMMENT = re.compile(r"//[^\n]*")
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_REPEATS = re.compile(r"[*+~{]")


def check_recursion(lark: str, *, param: str) -> None:
    """Hold a grammar against the bound.

    Raises:
        GrammarError: It is beyond it.
    """
    rules = _rules(_COMMENT.sub("", LITERAL.sub('""', lark)))
    references = {
        name: [one for one in _NAME.findall(body) if one in rules] for name, body in rules.items()
    }
    group_of = _groups(references)
    counts: dict[int, int] = {}
    for name, named in references.items():
        group = group_of[name]
        repeats = _REPEATS.search(rules[name]) is not None
        recursive = len(named) if repeats else sum(group_of[one] == group for one in named)
        counts[group] = counts.get(group, 0) + recursive
    if max(counts.values(), default=0) > MAX_RECURSIVE_REFERENCES:
        raise GrammarError.at(
            param,
            f"rules that lead back to each other refer to each other more than "
            f"{MAX_RECURSIVE_REFERENCES} times",
        )


def _rules(text: str) -> dict[str, str]:
    """Name to body; several definitions of one name together."""
    starts = list(_RULE.finditer(text))
    bodies: dict[str, str] = {}
    for start, end in zip(starts, [*(one.start() for one in starts[1:]), len(text)], strict=True):
        bodies[start[1]] = bodies.get(start[1], "") + text[start.end() : end]
    return bodies


def _groups(references: Mapping[str, list[str]]) -> dict[str, int]:
    """Rules that lead to each other have one number (strongly connected components, Kosaraju)."""
    back: dict[str, list[str]] = {name: [] for name in references}
    for name, named in references.items():
        for one in named:
            back[one].append(name)
    order: list[str] = []
    seen: set[str] = set()
    for name in references:
        _visit(name, references, seen, order)
    group_of: dict[str, int] = {}
    seen.clear()
    for number, name in enumerate(reversed(order)):
        members: list[str] = []
        _visit(name, back, seen, members)
        group_of |= dict.fromkeys(members, number)
    return group_of


def _visit(start: str, edges: Mapping[str, list[str]], seen: set[str], left: list[str]) -> None:
    """Note what can be reached and was not seen, each rule after those that it leads to."""
    if start in seen:
        return
    seen.add(start)
    stack = [(start, iter(edges[start]))]
    while stack:
        name, ahead = stack[-1]
        following = next((one for one in ahead if one not in seen), None)
        if following is None:
            left.append(name)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(edges[following])))
