"""``modules.json``, sentence-transformers' list of what makes vectors or scores of texts."""

from __future__ import annotations

import json
from pathlib import Path

from machd.engine.backend.model_files import MAX_JSON_BYTES, read_bytes, shortened
from machd.errors import ModelFormatError, ModelNotFoundError

MODULE_LIST = "modules.json"

LOGIT_SCORE = "LogitScore"
"""Class of the module that scores by the probabilities of two tokens: the model generates text."""

_PACKAGE = "sentence_transformers."
_MAX_MODULES = 100


def listed_modules(directory: Path) -> list[tuple[str, str]] | None:
    """Read class and folder of each module; None where there is no list.

    Raises:
        ModelFormatError: The list is broken, or names code of the checkpoint's own.
        ModelNotFoundError: It cannot be read.
    """
    try:
        listed = json.loads(read_bytes(directory / MODULE_LIST, MAX_JSON_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {MODULE_LIST}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{MODULE_LIST} is not valid JSON") from error
    if not isinstance(listed, list) or not 0 < len(listed) <= _MAX_MODULES:
        raise ModelFormatError(f"{MODULE_LIST} is no list of modules")
    return [_entry(one) for one in listed]


def _entry(entry: object) -> tuple[str, str]:
    """Check class and folder of a module."""
    kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else ("", None)
    if not isinstance(kind, str) or not isinstance(path, str):
        raise ModelFormatError(f"{MODULE_LIST} has a module without type or path")
    if Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:
        raise ModelFormatError(f"{MODULE_LIST} names a folder outside the checkpoint")
    if not kind.startswith(_PACKAGE):
        raise ModelFormatError(
            f"{MODULE_LIST} names {shortened(kind)}, code of the checkpoint's own, which machd does not run"
        )
    return kind.rpartition(".")[2], path
