"""Adapters in lists of models: each with its model, if its files can be used."""

from __future__ import annotations

from dataclasses import dataclass

from machd.dialects.listed_models import ListedModel, listed_model
from machd.http.context import ServerContext
from machd.served.adapter_places import AdapterToServe
from machd.served.adapter_set import ListedAdapter


@dataclass(frozen=True, slots=True)
class ShownAdapter:
    """One adapter, as lists tell it.

    Attributes:
        name: As answers have it, and as requests may name it.
        base: The model that it belongs to.
    """

    name: str
    listed: ListedAdapter
    base: ListedModel

    @property
    def created_unix_s(self) -> int:
        """When the last of its files was written."""
        return int(self.listed.files.modified_unix_s)

    @property
    def size_bytes(self) -> int:
        """Of its files."""
        return self.listed.files.facts.size_bytes


async def listed_adapters(context: ServerContext) -> list[ShownAdapter]:
    """Return every adapter whose files can be used, by name.

    Raises:
        UnavailableError: As of :func:`machd.dialects.listed_models.listed_models`.
    """
    return [_shown(context, one) for one in await context.adapters.listed()]


async def described_adapter(context: ServerContext, adapter: AdapterToServe) -> ShownAdapter:
    """Return one adapter, as :func:`listed_adapters`.

    Raises:
        AdapterError: Its files cannot be used.
    """
    return _shown(context, await context.adapters.described(adapter))


def _shown(context: ServerContext, listed: ListedAdapter) -> ShownAdapter:
    model = context.models[listed.adapter.model_name]
    return ShownAdapter(context.name_of(listed.adapter), listed, listed_model(context, model))
