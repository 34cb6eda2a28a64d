"""What differs between two settings, and which of it a running daemon can take on."""

from __future__ import annotations

from machd.settings.keys import SettingKey, setting_keys
from machd.settings.model import Settings


def changed_keys(old: Settings, new: Settings) -> tuple[SettingKey, ...]:
    """The keys whose values differ, in the order of the table."""
    return tuple(key for key in setting_keys(type(new)) if key.value_in(old) != key.value_in(new))


def restart_keys(old: Settings, new: Settings) -> tuple[str, ...]:
    """The changed keys, dotted, that only a restart takes on."""
    return tuple(key.dotted for key in changed_keys(old, new) if not key.is_live)
