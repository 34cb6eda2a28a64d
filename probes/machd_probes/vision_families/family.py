"""Sizes and files of a vision-language family's generated checkpoint, read from ``families/NAME.toml``.

A family is data: its configuration, the tokens that it adds to the embedded model's tokenizer, the
spelling of media in its chat template, its processor's files, and how its weights are drawn.
``families/NAME+SCALE.toml`` holds the same of another size.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

_DIRECTORY = "families"
_UNSUPPORTED = "unsupported.toml"

CHATML: Mapping[str, str] = {
    role: f"<|im_start|>{role}\n{{}}<|im_end|>\n" for role in ("system", "user", "assistant")
}
"""Turns of the embedded model's own chat template."""


@dataclass(frozen=True)
class WeightRecipe:
    """Scales of a family's random weights; the fields are those of ``TinyConfiguration``."""

    gain: float = 1.5
    embedding_scale: float = 1.0
    dtype: str = "float32"
    scales: Mapping[str, float] = field(default_factory=dict)
    centres: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """The files of a generated checkpoint of one family, before token ids are filled in.

    Attributes:
        config: ``config.json``; the value ``"token:TEXT"`` stands for that token's id, and
            ``"vocabulary"`` for the number of tokens.
        image: An image in a rendered prompt; ``{n}`` in it counts the prompt's images from one.
        video: A video in a rendered prompt; empty where the family reads none.
        added_tokens: Special tokens that the embedded model's tokenizer lacks.
        turns: A turn of each role, with ``{}`` for its content.
        begin: Text before the first turn.
        tokenizer_config: Entries of ``tokenizer_config.json``.
        files: Further JSON files, by name.
    """

    config: Mapping[str, object]
    image: str
    video: str = ""
    added_tokens: tuple[str, ...] = ()
    turns: Mapping[str, str] = field(default_factory=lambda: CHATML)
    begin: str = ""
    tokenizer_config: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    weights: WeightRecipe = field(default_factory=WeightRecipe)


@dataclass(frozen=True)
class UnsupportedFamily:
    """A family of mlx-vlm without a generated checkpoint."""

    reason: str


def read_family(name: str, scale: str = "tiny") -> Family:
    """Read a family's description.

    Raises:
        FileNotFoundError: The family has none of this scale.
    """
    stem = name if scale == "tiny" else f"{name}+{scale}"
    path = files(__package__) / _DIRECTORY / f"{stem}.toml"
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    return Family(
        **{
            **values,
            "added_tokens": tuple(values.get("added_tokens", ())),
            "weights": WeightRecipe(**values.get("weights", {})),
        }
    )


def _read_families() -> dict[str, Family | UnsupportedFamily]:
    directory = files(__package__) / _DIRECTORY
    reasons = tomllib.loads((directory / _UNSUPPORTED).read_text(encoding="utf-8"))
    names = [entry.name.removesuffix(".toml") for entry in directory.iterdir()]
    families: dict[str, Family | UnsupportedFamily] = {
        name: read_family(name) for name in names if name != "unsupported" and "+" not in name
    }
    families |= {name: UnsupportedFamily(reason) for name, reason in reasons.items()}
    return dict(sorted(families.items()))


FAMILIES: Mapping[str, Family | UnsupportedFamily] = _read_families()
"""Every vision-language family of mlx-vlm 0.7.10 that was looked at."""
