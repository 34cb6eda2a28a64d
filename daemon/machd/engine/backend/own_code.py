"""Python code of a checkpoint: the search for its names in the files, and the refusal of its import.

transformers imports the classes that a file's ``auto_map`` names. mlx-vlm passes ``trust_remote_code=True`` for them where
nobody passes anything, and in places whatever was passed. So the files are searched before a library sees them, and the one
function through which transformers imports such code is closed while a library reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from machd.engine.backend.model_files import MAX_JSON_BYTES, own_code_files, read_bytes
from machd.errors import ModelCodeError, ModelFormatError

_KEY = "auto_map"
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json"})
"""Large, and read by no code that looks for classes."""

_LOCAL_CLASS = re.compile(r"\w+\.\w+")
"""A class in a file of the checkpoint's folder. transformers also takes ``org/name--module.Class`` and paths."""

_MAX_FILES = 1_000
"""Files that are searched; no real checkpoint has a hundred."""

_MAX_PARSED_BYTES = 8 << 20
"""Of all files that spell the key. JSON may take fifty times its size as objects; real files that name classes are small."""

_SPELLED_KEY = re.compile(
    b"".join(b"(?:%c|(?i:\\\\u00%02x))" % (one, one) for one in _KEY.encode())
)
"""The key with any of its letters escaped, as JSON may spell it."""

_TOO_LARGE = "classes in more than 8 MiB of JSON"


class OwnCode(Enum):
    """What becomes of Python code that a checkpoint brings."""

    REFUSED = auto()
    """A model that needs it is refused; the error names the setting that trusts it."""

    TRUSTED = auto()
    """It runs where the model needs it."""

    NEVER_RUN = auto()
    """Files that name it are read all the same, whatever the settings trust."""

    @classmethod
    def of(cls, *, is_trusted: bool) -> OwnCode:
        """Return what becomes of it where a model is served, by the setting ``model.trust_remote_code``."""
        return cls.TRUSTED if is_trusted else cls.REFUSED


def auto_map_files(path: Path) -> dict[str, list[str]]:
    """Find the files of a checkpoint that name classes for transformers to import, each with its classes.

    Every JSON file counts: transformers reads one for each kind of class, follows names in them to others, and looks into
    nested configurations. A file that is not JSON, or larger than any real one, names nothing. Files that spell the key are
    parsed as long as they are small; one beyond that counts as one that names what nobody knows.
    """
    found: dict[str, list[str]] = {}
    left_bytes = _MAX_PARSED_BYTES
    for file in _json_files(path):
        try:
            content = read_bytes(file, MAX_JSON_BYTES)
            if _SPELLED_KEY.search(content) is None:
                continue
            left_bytes -= len(content)
            classes = list(_classes(json.loads(content))) if left_bytes >= 0 else [_TOO_LARGE]
        except (OSError, ValueError, RecursionError, ModelFormatError):
            continue
        if classes:
            found[str(file.relative_to(path))] = classes
    return found


def is_runnable(path: Path, classes: Iterable[str]) -> bool:
    """Tell whether code that ``auto_map`` names can be there: Python files beside it, or a name that leads elsewhere."""
    if not all(_LOCAL_CLASS.fullmatch(one) for one in classes):
        return True
    try:
        return any(True for _ in own_code_files(path))
    except OSError:
        return True  # too many files to search


@contextmanager
def closed_to_own_code(*, is_trusted: bool = False) -> Iterator[None]:
    """Let transformers import no code of a checkpoint in this block, whatever a library asks it for."""
    if is_trusted:
        yield
        return
    from transformers import dynamic_module_utils as modules  # noqa: PLC0415 - slow to import

    doors = {
        name: getattr(modules, name) for name in ("get_cached_module_file", "get_class_in_module")
    }
    try:
        for name in doors:
            setattr(modules, name, _refuse)
        yield
    finally:
        for name, door in doors.items():
            setattr(modules, name, door)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ModelCodeError("a library wants to run Python code of the checkpoint's own")


def _json_files(path: Path) -> Iterator[Path]:
    """List JSON files where transformers looks: beside the weights, and one folder down for the parts of a processor."""
    found = (file for pattern in ("*.json", "*/*.json") for file in path.glob(pattern))
    return (file for file in islice(found, _MAX_FILES) if file.name not in _VOCABULARIES)


def _classes(value: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    """Yield the texts below every ``auto_map`` in a JSON value."""
    waiting = [(value, False)]
    while waiting:
        one, is_named = waiting.pop()
        if isinstance(one, dict):
            waiting += [(inner, is_named or key == _KEY) for key, inner in one.items()]
        elif isinstance(one, list):
            waiting += [(inner, is_named) for inner in one]
        elif is_named and isinstance(one, str):
            yield one
