"""Bounded reading of a checkpoint's files: regular files only, up to the size of real ones."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from machd import regular_files
from machd.errors import ModelFormatError, ModelNotFoundError, SettingsError
from machd.settings.problems import shortened as shortened_value

NO_CHAT = "none"
"""The value of ``model.chat_template`` that serves without chat."""

NO_TEMPLATE = (
    "the model has no chat template: put a chat_template.jinja beside the weights, pass "
    "`--model-chat-template FILE`, or serve without chat with `--model-chat-template none`"
)

MAX_JSON_BYTES = 64 << 20
"""Limit of a configuration or an index; the largest models' have some megabytes."""

_MAX_TOKENIZER_BYTES = 128 << 20
"""Limit of tokenizer.json; that of the largest vocabularies has 35 MiB."""

MAX_TEMPLATE_BYTES = 1 << 20
"""The longest chat templates have some 30 kB."""

_MAX_SHOWN_CHARS = 80

_MAX_ENTRIES = 10_000
"""Limit of a model's folder and its subfolders; no real one has a hundred."""

_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_BESIDE = (
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
)
"""Files that transformers and mlx-lm open beside a vocabulary."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read bytes.

    Raises:
        ModelFormatError: A pipe, a device or a folder.
        OSError: As ``open`` raises it.
    """
    try:
        return regular_files.open_regular(path)
    except regular_files.IrregularFileError as error:
        raise _irregular(path) from error


def read_bytes(path: Path, max_bytes: int = _MAX_TOKENIZER_BYTES) -> bytes:
    """Read the content of a file.

    Raises:
        ModelFormatError: It is larger, or no regular file.
        OSError: As ``open`` raises it.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _too_large(path, max_bytes)
    return content


def read_text(path: Path) -> str:
    """Read a chat template, with the line ends of Python's text files.

    Raises:
        ModelFormatError: It is too large, not UTF-8, or no regular file.
        OSError: As ``open`` raises it.
    """
    try:
        text = read_bytes(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path.name} is not UTF-8") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_object(path: Path) -> dict[str, object] | None:
    """Read a JSON object; None where there is no such file.

    Raises:
        ModelFormatError: It is no object, too large, or no regular file.
        ModelNotFoundError: It cannot be read.
    """
    try:
        value = json.loads(read_bytes(path, MAX_JSON_BYTES), parse_constant=_infinity)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name} is not a JSON object")
    return value


def _infinity(name: str) -> float:
    """Read the infinities, which configurations spell though JSON has none, and no NaN."""
    if name == "NaN":
        raise ValueError("NaN is no number")
    return float(name)


def own_code_files(path: Path) -> Iterator[Path]:
    """Yield the Python files of a checkpoint: its model, and modules that it may import.

    Raises:
        OSError: The folder holds too many files to search.
        ModelFormatError: ``config.json`` is not an object in JSON.
    """
    named = (read_object(path / "config.json") or {}).get("model_file")
    if isinstance(named, str):
        yield path / named  # which may lie anywhere
    seen = 0
    for folder, folders, files in os.walk(path, followlinks=True):
        seen += len(folders) + len(files)
        if seen > _MAX_ENTRIES:
            raise OSError("too many files")
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def read_template(path: Path) -> str:
    """Read the chat template that the settings name.

    Raises:
        SettingsError: It cannot be read.
    """
    try:
        return read_text(path)
    except OSError as error:
        reason = f"{error.strerror}"
    except ModelFormatError as error:
        reason = error.message
    raise SettingsError(
        [f"model.chat_template: cannot read {shortened_value(str(path))}: {reason}"]
    )


def check_tokenizer_files(path: Path) -> None:
    """Check the files that transformers and mlx-lm will open without bounds of their own.

    Raises:
        ModelNotFoundError: There are no tokenizer files.
        ModelFormatError: A file is larger than any real one, or no regular file.
    """
    has_vocabulary = False
    for file, max_bytes in _tokenizer_files(path):
        try:
            facts = file.stat()
        except OSError:
            continue  # not there, or a link to nothing
        _check_regular(file, facts.st_mode)
        if facts.st_size > max_bytes:
            raise _too_large(file, max_bytes)
        has_vocabulary |= file.name in _VOCABULARIES or file.suffix == ".tiktoken"
    if not has_vocabulary:
        raise ModelNotFoundError(
            f"{path.name} holds no tokenizer files (tokenizer.json or tokenizer.model); copy them "
            "beside the weights"
        )


def shortened(text: str, max_chars: int = _MAX_SHOWN_CHARS) -> str:
    """Shorten foreign text for a message, without line ends and control characters."""
    shown = "".join(char if char.isprintable() else "?" for char in text[:max_chars])
    return shown if len(text) <= max_chars else f"{shown}…"


def _tokenizer_files(path: Path) -> Iterator[tuple[Path, int]]:
    for name in (*_VOCABULARIES, *_BESIDE):
        yield path / name, _MAX_TOKENIZER_BYTES
    for file in path.glob("*.tiktoken"):
        yield file, _MAX_TOKENIZER_BYTES
    for file in (path / "chat_template.jinja", *path.glob("*_templates/*.jinja")):
        yield file, MAX_TEMPLATE_BYTES


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _irregular(path)


def _irregular(path: Path) -> ModelFormatError:
    return ModelFormatError(f"{path.name} is not a regular file")


def _too_large(path: Path, max_bytes: int) -> ModelFormatError:
    return ModelFormatError(f"{path.name} is larger than {max_bytes >> 20} MiB")
