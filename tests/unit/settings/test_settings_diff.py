"""Which changes a running daemon takes over."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from machd.settings.diff import SettingsDiff, diff_settings
from machd.settings.keys import SettingKey
from machd.settings.model import Settings
from machd.settings.sources import load_settings
from unit.settings.setting_values import KEYS, as_variables, dotted_values

LIVE_SECTIONS = {"streaming", "limits"}
LIVE_KEYS = {"logging.level"}
RESTART_KEYS = {"limits.max_body_bytes"}


def loaded_from(values: dict[str, object]) -> Settings:
    """The settings that hold these values, and defaults for the rest."""
    return load_settings(
        config_path=Path("/dev/null"), environ=as_variables(values), flags={}
    ).settings


@pytest.mark.parametrize("key", KEYS, ids=[key.dotted for key in KEYS])
def test_a_key_is_live_only_if_it_is_known_to_be(key: SettingKey) -> None:
    """Limits, streaming and the log level are live; everything else needs a restart."""
    expected = key.section in LIVE_SECTIONS or key.dotted in LIVE_KEYS

    assert key.is_live == (expected and key.dotted not in RESTART_KEYS)


@given(before=dotted_values(), after=dotted_values())
@settings(deadline=None, max_examples=40)
def test_the_diff_is_the_keys_that_differ(
    before: dict[str, object], after: dict[str, object]
) -> None:
    """Every key that differs is listed once, on its side; the way round does not matter."""
    first, second = loaded_from(before), loaded_from(after)

    diff = diff_settings(first, second)

    differing = {key for key in KEYS if key.value_in(first) != key.value_in(second)}
    assert set(diff.live) == {key.dotted for key in differing if key.is_live}
    assert set(diff.restart) == {key.dotted for key in differing if not key.is_live}
    assert diff.is_empty == (first == second)
    assert diff_settings(second, first) == diff


def test_a_diff_says_whether_it_can_be_taken_over() -> None:
    """One key that needs a restart makes the whole change need it."""
    now = Settings()
    live = loaded_from({"limits.max_n": 3})
    mixed = loaded_from({"limits.max_n": 3, "server.port": 1})

    assert diff_settings(now, now) == SettingsDiff()
    assert diff_settings(now, live).is_live
    assert diff_settings(now, mixed) == SettingsDiff(("limits.max_n",), ("server.port",))
    assert not diff_settings(now, mixed).is_live
