"""A LoRA adapter as a request names it: weights of low rank that are added to those of its base model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of a completion. Two are the same if their content and scale are, whatever their names.

    Attributes:
        digest: Hash of its files' content.
        scale: What it counts for; 1.0 as it was trained.
        name: The name that requests use.
        path: Its directory, or a GGUF file; it has been checked that an operator named it.
    """

    digest: bytes
    scale: float = 1.0
    name: str = field(default="", compare=False)
    path: str = field(default="", compare=False)


def adapter_namespace(adapters: tuple[Adapter, ...]) -> str:
    """Return what keys of caches have in front where adapters computed what they hold; empty for the base model."""
    return "".join(f"{one.digest.hex()}*{one.scale!r}+" for one in adapters)


@dataclass(frozen=True, slots=True)
class NumberedAdapter:
    """An adapter that a request lists beside its model, as llama.cpp's field ``lora`` does.

    Attributes:
        number: Its id, as ``GET /lora-adapters`` tells it.
        scale: What it counts for in this request.
    """

    number: int
    scale: float
