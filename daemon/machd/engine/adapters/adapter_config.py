"""``adapter_config.json`` of mlx-lm and of PEFT, with typed readers that refuse what is none of a key's values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from machd.engine.backend.model_files import shortened
from machd.errors import AdapterError

CONFIG_FILE = "adapter_config.json"

MAX_CONFIG_BYTES = 4 << 20
"""Limit of the file; one with a rank for each of 10,000 layers has 1 MB."""

_MAX_INTEGER = 1 << 31


class AdapterConfig:
    """The object in the file.

    Every reader raises AdapterError, which names the key, for a value of another type.
    """

    def __init__(self, content: bytes) -> None:
        """Parse the file.

        Raises:
            AdapterError: It is not an object in JSON, or has a key twice.
        """
        try:
            values = json.loads(content, object_pairs_hook=_once, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise AdapterError(
                f"{CONFIG_FILE} is not valid JSON: {shortened(str(error))}"
            ) from error
        if not isinstance(values, dict):
            raise AdapterError(f"{CONFIG_FILE} is not a JSON object")
        self.values: Mapping[str, object] = values

    def text(self, key: str) -> str | None:
        """Read a text; None where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise _wrong(key, "a text")
        return value

    def flag(self, key: str) -> bool:
        """Read a truth value, false where it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise _wrong(key, "true or false")
        return value is True

    def integer(self, key: str) -> int:
        """Read a whole number of at least 1."""
        return positive_integer(self.values.get(key), key)

    def factor(self, key: str) -> float:
        """Read a finite number other than 0."""
        return factor(self.values.get(key), key)

    def object(self, key: str) -> AdapterConfig:
        """Read an object, empty where it is absent; the errors of its keys name them alone."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise _wrong(key, "an object")
        inner = AdapterConfig(b"{}")
        inner.values = value or {}
        return inner


def positive_integer(value: object, key: str) -> int:
    """Check a whole number of at least 1.

    Raises:
        AdapterError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MAX_INTEGER:
        raise _wrong(key, "a whole number of at least 1")
    return value


def factor(value: object, key: str) -> float:
    """Check a finite number other than 0.

    Raises:
        AdapterError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(key, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number == 0:
        raise _wrong(key, "a finite number other than 0")
    return number


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is there twice")
    return values


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _wrong(key: str, expected: str) -> AdapterError:
    return AdapterError(f"{CONFIG_FILE}: {shortened(key)} is not {expected}")
