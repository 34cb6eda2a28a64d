"""What changes between two settings, and whether a running daemon can take it over."""

from __future__ import annotations

from dataclasses import dataclass

from machd.settings.keys import setting_keys
from machd.settings.model import Settings

__all__ = ["SettingsDiff", "diff_settings"]


@dataclass(frozen=True, slots=True)
class SettingsDiff:
    """The keys that differ, dotted, in the order of the settings table.

    Attributes:
        live: A running daemon takes these over.
        restart: These need a new process.
    """

    live: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.live or self.restart)

    @property
    def is_live(self) -> bool:
        """Whether nothing that differs needs a restart."""
        return not self.restart


def diff_settings(before: Settings, after: Settings) -> SettingsDiff:
    """Compare two settings of the same class, key by key."""
    assert type(before) is type(after), "settings of two classes have no common table"
    changed = [
        key for key in setting_keys(type(before)) if key.value_in(before) != key.value_in(after)
    ]
    return SettingsDiff(
        live=tuple(key.dotted for key in changed if key.is_live),
        restart=tuple(key.dotted for key in changed if not key.is_live),
    )
