"""Recorded sessions of coding clients, and the compact form in which ``tests/client_sessions/`` keeps them.

The first line of a file names the client, and lists what its requests have in common. Each further line is a request.
Texts of the client's own are their publisher's: each is kept as its length, and reading it makes as many characters of common
words. What equals another text becomes the same words, and lines that change between requests, or hold a date, are kept.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.clients.common_words import WORDS

SESSIONS = Path(__file__).resolve().parents[2] / "client_sessions"
NAMES = ("claude_code", "codex", "opencode", "qwen_code")

LONGEST_KEPT_CHARS = 80
"""Longest text of a client's own that is kept as it is."""

_LEAST_SHARED_CHARS = 120
_LEAST_COMMON = 0.8
"""Least share of lines that two versions of a text have in common."""

_WORDS_PER_LINE = 12
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{16,64}")
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b|\b[A-Z][a-z]{2} \d\d 20\d\d\b|/tmp/session")
_SHARED, _TEXT = "$shared", "$text"


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request of a session."""

    path: str
    body: dict[str, Any]


def read_session(name: str) -> list[RecordedRequest]:
    """Return the requests of a client's session; they are the caller's own."""
    return copy.deepcopy(_session(name))


@cache
def _session(name: str) -> list[RecordedRequest]:
    first, *lines = (SESSIONS / f"{name}.jsonl").read_text("utf-8").splitlines()
    shared = json.loads(first)["shared"]

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(one) for one in value]
        if not isinstance(value, dict):
            return value
        if _SHARED in value:
            return whole(shared[value[_SHARED]])
        if _TEXT in value:
            return "\n".join(
                one if isinstance(one, str) else filler(f"{name} {one[0]}", one[1])
                for one in value[_TEXT]
            )
        return {key: whole(one) for key, one in value.items()}

    return [RecordedRequest(one["path"], whole(one["body"])) for one in map(json.loads, lines)]


def write_session(target: Path, client: str, requests: Iterable[RecordedRequest]) -> None:
    """Write a session in its compact form; ``client`` is its name and version."""
    numbered = _numbered_ids([{"path": one.path, "body": one.body} for one in requests])
    replaced = _without_texts(numbered)
    counts = Counter(
        text for one in replaced for text in map(json.dumps, _subtrees(one)) if _is_long(text)
    )
    shared: dict[str, int] = {}
    table: list[Any] = []

    def compact(value: Any) -> Any:
        text = json.dumps(value)
        if text in shared:
            return {_SHARED: shared[text]}
        made = value
        if isinstance(value, list):
            made = [compact(one) for one in value]
        elif isinstance(value, dict) and _TEXT not in value:
            made = {key: compact(one) for key, one in value.items()}
        if counts[text] < 2:  # what is there once is shared with nothing
            return made
        shared[text] = len(table)
        table.append(made)
        return {_SHARED: shared[text]}

    lines = [compact(one) for one in replaced]
    first = {"client": client, "shared": table}
    target.write_text(
        "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in (first, *lines)), "utf-8"
    )


def filler(seed: str, characters: int) -> str:
    """Return so many characters of common words, in lines; another seed gives others."""
    draw, words = random.Random(seed), list[str]()
    length = 0
    while length < characters:
        words.append(draw.choice(WORDS))
        words.append(" " if len(words) % (2 * _WORDS_PER_LINE) else "\n")
        length += len(words[-2]) + 1
    return "".join(words)[: characters - 1] + "."


def _numbered_ids(requests: list[Any]) -> list[Any]:
    """Replace ids by numbers of the same length."""
    numbers: dict[str, int] = {}

    def numbered(found: re.Match[str]) -> str:
        one = found.group()
        number = numbers.setdefault(one, len(numbers))
        if "-" in one:
            return f"00000000-0000-4000-8000-{number:012}"
        return str(number).zfill(len(one))

    return [_mapped(one, (), lambda _, text: _ID.sub(numbered, text)) for one in requests]


def _without_texts(requests: list[Any]) -> list[Any]:
    """Replace the long texts that clients send by their lengths, line by line where a line is to be kept."""
    versions: dict[tuple[object, ...], list[list[str]]] = {}
    for place, text in (one for request in requests for one in _texts(request, ())):
        if _is_replaced(place, text):
            versions.setdefault(place, []).append(text.split("\n"))
    seeds: dict[str, int] = {}

    def filled(text: str) -> list[int] | str:
        return [seeds.setdefault(text, len(seeds)), len(text)] if text else text

    def replaced(place: tuple[object, ...], text: str) -> object:
        if not _is_replaced(place, text):
            return text
        lines = text.split("\n")
        kept = _kept_lines(lines, versions[place])
        if not kept:
            return {_TEXT: [filled(text)]}
        return {_TEXT: [one if one in kept else filled(one) for one in lines]}

    return [_mapped(request, (), replaced) for request in requests]


def _kept_lines(lines: list[str], versions: list[list[str]]) -> set[str]:
    """Return the short lines with dates, and those that another version of the text has not."""
    changing = {
        line
        for version in versions
        if _is_version(version, lines)
        for line in set(lines) - set(version)
    }
    dated = {line for line in lines if _DATE.search(line)}
    return {line for line in changing | dated if len(line) <= LONGEST_KEPT_CHARS}


def _is_replaced(place: tuple[object, ...], text: str) -> bool:
    """Return whether a text is to become words; arguments of calls are the script's, and JSON."""
    return len(text) > LONGEST_KEPT_CHARS and " " in text and place[-1] != "arguments"


def _is_version(one: list[str], other: list[str]) -> bool:
    """Return whether two texts are the same one at two times, and no others that stand in the same place."""
    common = len(set(one) & set(other))
    return common >= _LEAST_COMMON * max(len(set(one)), len(set(other)))


def _texts(value: Any, place: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _texts(one, (*place, index))
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _texts(one, (*place, key))


def _mapped(
    value: Any, place: tuple[object, ...], change: Callable[[tuple[object, ...], str], object]
) -> Any:
    if isinstance(value, str):
        return change(place, value)
    if isinstance(value, list):
        return [_mapped(one, (*place, index), change) for index, one in enumerate(value)]
    if isinstance(value, dict):
        return {key: _mapped(one, (*place, key), change) for key, one in value.items()}
    return value


def _subtrees(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for one in value.values() if isinstance(value, dict) else value:
            yield from _subtrees(one)


def _is_long(text: str) -> bool:
    return len(text) >= _LEAST_SHARED_CHARS
