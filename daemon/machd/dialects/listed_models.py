"""What lists of models say: of each model what is known, whether it is loaded, was loaded once, or never was."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from machd.dialects.inspection import features
from machd.engine.protocol.engine import ModelDescription
from machd.http.context import ServerContext
from machd.served.named_model import NamedModel


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One model, as lists tell it.

    Attributes:
        name: As answers have it.
        aliases: Other names for it.
        is_one: There is no other.
        description: As its engine has it; None while it was never loaded.
        capabilities: Names of its features in ``GET /v1/capabilities``; None while it was never loaded.
        created_unix_s: When its weights were written; 0 where that is not known.
        size_bytes: Of its weights in memory, or else of its files; None where neither is known.
    """

    model: NamedModel
    name: str
    aliases: tuple[str, ...]
    is_one: bool
    description: ModelDescription | None
    capabilities: list[str] | None
    created_unix_s: int
    size_bytes: int | None


def listed_models(context: ServerContext) -> list[ListedModel]:
    """Return every model, the default one first.

    Raises:
        UnavailableError: There is one model, and it is still being loaded.
    """
    return [listed_model(context, one) for one in context.models]


def models_by_name(context: ServerContext) -> dict[str, NamedModel]:
    """Return every model by its name, the default one first, then by its aliases."""
    named = {one.shown_name: one for one in context.models}
    aliases = {alias: one for one in context.models for alias in _aliases(context, one)}
    return named | {alias: one for alias, one in aliases.items() if alias not in named}


def listed_model(context: ServerContext, model: NamedModel) -> ListedModel:
    """Return one model, as :func:`listed_models`."""
    is_one = context.models.is_one
    front = model.served.front if is_one else model.served.link.front
    description, capabilities = None, None
    if front is not None:
        description = front.model
        named = msgspec.structs.asdict(features(front.tokenizer, description))
        capabilities = [name for name, value in named.items() if value is True]
    files = model.files
    return ListedModel(
        model,
        name=model.shown_name,
        aliases=_aliases(context, model),
        is_one=is_one,
        description=description,
        capabilities=capabilities,
        created_unix_s=_created_unix_s(model, description),
        size_bytes=(
            description.weights_bytes
            if description is not None
            else None
            if files is None
            else files.size_bytes
        ),
    )


def parameter_size(parameters: int) -> str:
    """A number of parameters as Ollama writes it, such as ``134.52M`` or ``8.0B``."""
    if parameters >= 10**9:
        return f"{parameters / 10**9:.1f}B"
    if parameters >= 10**6:
        return f"{parameters / 10**6:.2f}M"
    return str(parameters)


def _created_unix_s(model: NamedModel, description: ModelDescription | None) -> int:
    if description is not None:
        return description.created_unix_s
    return 0 if model.files is None else int(model.files.modified_unix_s)


def _aliases(context: ServerContext, model: NamedModel) -> tuple[str, ...]:
    names = context.names
    if model is context.models.default:
        aliases = names.aliases
    else:
        aliases = tuple(alias for alias, name in names.others.items() if name == model.name)
    return tuple(one for one in aliases if one not in (model.shown_name, model.name))
