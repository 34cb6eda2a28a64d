"""Names of the files of a GGUF model: one file, or parts named ``NAME-00001-of-00003.gguf`` and so on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

_SUFFIX = ".gguf"
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GgufName:
    """The name of a GGUF file, read.

    Attributes:
        model: Its name without what tells the part, and without its suffix.
        number: Of the part, from 1.
        count: Of the parts; 1 for a file that is whole.
    """

    model: str
    number: int = 1
    count: int = 1

    def part(self, number: int) -> str:
        """Return the name of a part of the same model."""
        return f"{self.model}-{number:05}-of-{self.count:05}{_SUFFIX}"


def is_gguf(name: str) -> bool:
    """Tell whether a file's name is that of a GGUF file."""
    return name.lower().endswith(_SUFFIX)


def gguf_name(file: PurePath) -> GgufName:
    """Read a GGUF file's name; one whose numbers contradict each other is that of a whole file."""
    match = _PART.fullmatch(file.stem)
    if match is not None and 1 <= int(match["number"]) <= int(match["count"]):
        return GgufName(match["name"], int(match["number"]), int(match["count"]))
    return GgufName(file.stem)


def gguf_files(path: Path) -> tuple[Path, ...]:
    """List the files of the model that a GGUF file belongs to: itself, or every part that lies beside it."""
    name = gguf_name(path)
    if name.count == 1:
        return (path,)
    parts = (path.with_name(name.part(number)) for number in range(1, name.count + 1))
    return tuple(part for part in parts if part == path or part.is_file())
