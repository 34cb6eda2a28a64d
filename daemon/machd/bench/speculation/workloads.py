"""What is asked: texts to quote, texts to correct, and prose with nothing to copy from.

The prompts are files beside this module, each one message of a user. They are texts of everyday
kinds, chosen because the embedded model, small as it is, does what they ask of it for as long as an
answer is by default; nothing about them is made for a way of guessing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files


class Copying(StrEnum):
    """How much of an answer stands in its prompt already."""

    QUOTE = "quote"
    """All of it: repeat this text."""
    EDIT = "edit"
    """Most of it: correct the spelling of this text."""
    PROSE = "prose"
    """Nothing: tell, or explain."""


GOALS = {Copying.QUOTE: 2.5, Copying.EDIT: 1.6, Copying.PROSE: 0.98}
"""The least tokens/s with guesses, over those without."""

_NAMES = {
    Copying.QUOTE: ("letter", "story", "code"),
    Copying.EDIT: ("notice", "bridge", "meeting"),
    Copying.PROSE: ("fisherman", "bread", "train"),
}


@dataclass(frozen=True, slots=True)
class SpeculationPrompt:
    """A message that is answered by both daemons.

    Attributes:
        name: Which one of its workload.
    """

    copying: Copying
    name: str

    @property
    def text(self) -> str:
        """The message."""
        folder = files(__package__ or "") / "prompts"
        file = folder / f"{self.copying.value}-{self.name}.txt"
        return file.read_text(encoding="utf-8").rstrip("\n")


PROMPTS = tuple(
    SpeculationPrompt(copying, name) for copying, names in _NAMES.items() for name in names
)
"""In the order in which they are asked."""
