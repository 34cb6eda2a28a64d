"""How long a model stays loaded without requests, as Ollama's and LM Studio's clients say it."""

from __future__ import annotations

import re
from math import inf, isfinite

import msgspec
from msgspec import UNSET, Raw, UnsetType

from machd.errors import InvalidRequestError

_UNITS_S = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"[+-]?(?:{_PART})+", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?", re.ASCII)
_MAX_BYTES = 64


def read_keep_alive(given: Raw | UnsetType) -> float | None:
    """Return Ollama's ``keep_alive`` in seconds: a number of seconds, or a duration of Go such as ``1h30m``.

    Whatever is negative is infinite, as ``Duration.UnmarshalJSON`` in Ollama's ``api/types.go`` has it. A number in quotes,
    which Ollama refuses and its clients send all the same, is one of seconds.

    Returns:
        None where it is left out or null.

    Raises:
        InvalidRequestError: It is neither.
    """
    value = _decoded(given, param="keep_alive")
    if isinstance(value, str):
        value = _duration_s(value.strip())
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError.at(
            "keep_alive", 'expected seconds, or a duration such as "5m"; negative is for ever'
        )
    return inf if value < 0 else float(value)


def read_ttl(given: Raw | UnsetType) -> float | None:
    """Return LM Studio's ``ttl``, a number of seconds; None where it is left out or null.

    Raises:
        InvalidRequestError: It is no number above 0.
    """
    value = _decoded(given, param="ttl")
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isinstance(value, int | float) or value <= 0:
        raise InvalidRequestError.at("ttl", "expected a number of seconds above 0")
    return float(value)


def _decoded(given: Raw | UnsetType, *, param: str) -> object:
    if given is UNSET:
        return None
    raw = bytes(given)
    try:
        value = msgspec.json.decode(raw) if len(raw) <= _MAX_BYTES else ...
    except msgspec.DecodeError:
        value = ...
    if isinstance(value, int | float) and not isfinite(value):
        value = ...
    if value is ...:
        raise InvalidRequestError.at(param, "expected a number of seconds")
    return value


def _duration_s(text: str) -> float | str:
    """Return a duration in seconds; the text itself if it is none."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _DURATION.fullmatch(text):
        return text
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(_PART, text))
    return -seconds if text.startswith("-") else seconds
