"""Which models a daemon serves, as its settings say."""

from __future__ import annotations

from dataclasses import dataclass

from machd.served.named_model import Residence
from machd.served.served_models import DEFAULT_NAME
from machd.settings.model import Settings


@dataclass(frozen=True, slots=True)
class Lodger:
    """A model that is to be served.

    Attributes:
        settings: Its own.
        is_one: There is no other.
    """

    name: str
    settings: Settings
    residence: Residence
    is_one: bool = False


def lodgers(settings: Settings) -> tuple[Lodger, ...]:
    """Return the models that settings name, the default one first."""
    return (Lodger(DEFAULT_NAME, settings, Residence(is_pinned=True), is_one=True),)
