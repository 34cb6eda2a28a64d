"""The section ``models``: which models are served, under which names, and what each has of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from machd.settings.section import Mark, SettingsSection
from machd.settings.texts import MAX_MODEL_NAME_CHARS, ModelName, Text

DEFAULT_NAME = "default"
"""A name that always means the model of ``model.path``."""

TABLE_SECTIONS = ("model", "continuous_batching", "speculation", "cache", "experts")
"""Sections whose keys a model's table may set for that model alone."""

OLLAMA_TAG = ":latest"
"""What Ollama's clients put behind a name without a tag."""

_DAY_S = 86_400.0
_YEAR_S = 31_536_000.0

# The bounds stand with the number, because the word has none.
_MemoryGb: TypeAlias = Annotated[float, Field(ge=0.001, le=1_000_000.0)] | Literal["auto"]


def name_essence(name: str) -> str:
    """Return a name without its case, its organisation and Ollama's tag: what names are compared by."""
    return name.rpartition("/")[2].casefold().removesuffix(OLLAMA_TAG)


def _with_tuples(
    overrides: Mapping[str, Mapping[str, object]],
) -> Mapping[str, Mapping[str, object]]:
    """Return overrides as their sections have them: JSON has lists in place of tuples."""
    return {
        section: {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        for section, values in overrides.items()
    }


class ModelTable(SettingsSection):
    """A model that is served under a name of its own, with what differs for it.

    Attributes:
        overrides: Values by key by section, of :data:`TABLE_SECTIONS`, each checked as that section's;
            ``path`` of the section ``model`` is not among them.
    """

    path: Text | None = Field(
        default=None,
        examples=["/srv/models/Qwen3-Coder"],
        description="The model, as model.path names one. Without it the name itself is that of a model "
        "below models.directory, or a hub id.",
    )
    aliases: tuple[ModelName, ...] = Field(
        default=(),
        examples=[["gpt-4o"]],
        description="Other names for the model, compared as models.aliases are.",
    )
    pin: bool = Field(
        default=False,
        description="Never unload or suspend the model to make room for another, or because it is idle.",
    )
    ttl_s: float | None = Field(
        default=None,
        ge=0.001,
        le=_YEAR_S,
        examples=[600.0],
        description="Seconds without a request after which the model is unloaded. Without it "
        "models.ttl_s counts.",
    )
    overrides: Annotated[
        Mapping[str, Mapping[str, object]], AfterValidator(_with_tuples), Mark.TABLES
    ] = Field(default_factory=dict)


class ModelsSettings(SettingsSection):
    """Which models are served, under which names, and how they share the memory."""

    aliases: tuple[Annotated[Text, Field(max_length=MAX_MODEL_NAME_CHARS)], ...] = Field(
        default=(),
        examples=[["gpt-4o-mini"]],
        description="Other names for the model of model.path. Case, an organisation before a slash and "
        "a :latest at the end never matter, and the name default always works.",
    )
    accept_any: bool | None = Field(
        default=None,
        examples=[True],
        description="Whether every unknown name means the model of model.path, and a request may leave it "
        "out. Unless set: only where the daemon listens on loopback or a Unix socket.",
    )
    directory: Annotated[Text | None, Mark.RESTART] = Field(
        default=None,
        examples=["/srv/models"],
        description="Directory whose models are served under their names: checkpoints and .gguf files in "
        "it or one level deeper (ORG/NAME), or in a cache of the hub.",
    )
    hub_cache: Annotated[bool, Mark.RESTART] = Field(
        default=False,
        description="Serve every model that is complete in the hub's cache on this machine, under its hub id "
        "(ORG/NAME); one of several GGUF files of a repository is ORG/NAME/FILE.",
    )
    memory_gb: _MemoryGb = Field(
        default="auto",
        description="Memory that weights and KV caches of all loaded models may take together, in units "
        "of 1,000,000,000 bytes; auto is what the device can hold.",
    )
    max_turn_s: float = Field(
        default=60.0,
        ge=0.001,
        le=_DAY_S,
        description="Seconds that a busy model may keep others waiting for its memory; then its requests "
        "are suspended, and go on later.",
    )
    autoload: bool = Field(
        default=True,
        description="Load a model when a request asks for it. Otherwise a request for one that is not "
        "loaded gets 503 model_not_loaded.",
    )
    ttl_s: float | None = Field(
        default=None,
        ge=0.001,
        le=_YEAR_S,
        examples=[600.0],
        description="Seconds without a request after which a model is unloaded, unless it is pinned. "
        "Without it models are unloaded only where another needs the room.",
    )
    tables: Annotated[Mapping[str, ModelTable], Mark.TABLES] = Field(default_factory=dict)
