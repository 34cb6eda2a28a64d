"""The settings in force, and the one way to change them while the daemon runs.

A reload (SIGHUP, the admin API) reads every source again; a change over the admin API overrides values of
the sources. Both have the same steps: parse, validate, compare, prepare, apply; a failure changes nothing.
After a reload the daemon has the settings of a restart, so a reload drops the overrides.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

import structlog

from machd.clock import Clock
from machd.errors import (
    FaultError,
    MachdError,
    RestartRequiredError,
    SettingsChangedError,
    SettingsError,
)
from machd.settings.explain import settings_toml
from machd.settings.keys import SettingKey, changed_keys, changed_names, toml_key
from machd.settings.model import Settings
from machd.settings.problems import printable
from machd.settings.sources import (
    LoadedSettings,
    SettingsSources,
    current_names,
    name_problems,
    overlaid,
)

Prepare = Callable[[Settings], Callable[[], None]]
"""Prepares the parts for new settings, or refuses them with a MachdError; it changes nothing that requests
can see. It returns a function that applies the settings at once, on the event loop."""


class ChangeKind(StrEnum):
    """The origin of a change of settings."""

    START = "start"
    RELOAD = "reload"
    PATCH = "patch"


@dataclass(frozen=True, slots=True)
class LastChange:
    """The outcome of the last attempt to change the settings.

    Attributes:
        at_unix_s: Time of its end.
        changed: Dotted keys whose values have changed.
        problems: Reasons why nothing changed, a line each; empty after a success.
    """

    kind: ChangeKind
    at_unix_s: float
    changed: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def is_successful(self) -> bool:
        """Return whether the settings that were asked for are in force."""
        return not self.problems


class Configuration:
    """The one owner of the settings. Lives on the event loop.

    Attributes:
        is_live: Whether the daemon can take on another value of a key.
    """

    def __init__(
        self,
        sources: SettingsSources,
        loaded: LoadedSettings,
        prepare: Prepare,
        clock: Clock,
        *,
        is_live: Callable[[SettingKey], bool] = attrgetter("is_live"),
    ) -> None:
        """Begin with settings that are in force.

        Args:
            sources: Where a reload reads settings.
            loaded: What was read from there.
            prepare: Gets the daemon's parts ready for other settings.
            clock: Reads time.
            is_live: Whether the daemon can take on another value of a key.
        """
        self._sources = sources
        self._read = self._loaded = loaded
        self._prepare = prepare
        self.is_live = is_live
        self._clock = clock
        self._overrides: dict[str, Any] = {}
        self._revision = 1
        self._last_change = LastChange(ChangeKind.START, clock.unix_s())
        self._last_reload = self._last_change
        self._last_success_unix_s = self._last_change.at_unix_s
        self._watchers: list[Callable[[LastChange], None]] = []
        self._turn = asyncio.Lock()
        self._log = structlog.get_logger("machd.configuration")
        self._say_renamed(loaded)

    @property
    def loaded(self) -> LoadedSettings:
        """The settings in force, and where each value came from."""
        return self._loaded

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._loaded.settings

    @property
    def etag(self) -> str:
        """The ETag of the settings, in quotes as in HTTP; every change makes a new one."""
        digest = hashlib.sha256(settings_toml(self._loaded).encode()).hexdigest()
        return f'"{self._revision}-{digest[:16]}"'

    @property
    def overrides(self) -> tuple[str, ...]:
        """The keys that an operator has changed since the last reload, dotted."""
        return tuple(_dotted(self._overrides))

    @property
    def last_change(self) -> LastChange:
        """Return the outcome of the last reload or change."""
        return self._last_change

    @property
    def last_reload(self) -> LastChange:
        """Return the outcome of the last reload, or of the start; changes over the admin API do not count."""
        return self._last_reload

    @property
    def last_success_unix_s(self) -> float:
        """Time of the last successful reload, or of the start."""
        return self._last_success_unix_s

    def watch(self, watcher: Callable[[LastChange], None]) -> None:
        """Call back for every later change, refused ones included."""
        self._watchers.append(watcher)

    async def reload(self) -> LastChange:
        """Read every source again and apply the settings.

        Raises:
            SettingsError: A setting is wrong; each problem has a line.
            RestartRequiredError: A changed setting needs a restart.
            MachdError: The daemon's parts refuse them.
        """
        async with self._turn:
            return await self._change(ChangeKind.RELOAD, {}, self._sources.load)

    async def patch(
        self, changes: Mapping[str, Mapping[str, object]], *, if_match: str | None = None
    ) -> LastChange:
        """Lay values above what was read last; None takes one away again, or all of a table.

        Args:
            changes: Values by key by section, as JSON has them; a model's table is a value of ``models``, an adapter's of
                ``adapters``.
            if_match: The :attr:`etag` that the change was made for; None for whatever it is now.

        Raises:
            SettingsChangedError: Another change came first.
            SettingsError, RestartRequiredError, MachdError: As for :meth:`reload`.
        """
        async with self._turn:
            if if_match is not None and not self._matches(if_match):
                raise SettingsChangedError(
                    "the settings have changed since they were read; read them again"
                )
            named = current_names(changes)
            overrides = _merged(self._overrides, named)
            return await self._change(
                ChangeKind.PATCH, overrides, lambda: self._overlaid(named, overrides)
            )

    def _matches(self, if_match: str) -> bool:
        """Return whether an If-Match header allows the change: any, or one of a list (RFC 9110, section 13.1.1)."""
        return if_match.strip() == "*" or self.etag in map(str.strip, if_match.split(","))

    def _overlaid(
        self,
        changes: Mapping[str, Mapping[str, object]],
        overrides: Mapping[str, object],
    ) -> LoadedSettings:
        """Return the values that were read, with the overrides above them; also a removed key has to exist."""
        problems = name_problems(changes, self.settings)
        try:
            loaded = overlaid(self._read, overrides)
        except SettingsError as error:
            raise SettingsError(list(dict.fromkeys([*problems, *error.problems]))) from None
        if problems:
            raise SettingsError(problems)
        return loaded

    async def renew(self) -> None:
        """Have the parts take on the settings in force again: what they find on this machine has changed.

        Raises:
            SettingsError: What is there now cannot be taken on.
        """
        async with self._turn:
            take_on = await asyncio.to_thread(self._prepare, self.settings)
            self._take_on(take_on)

    async def _change(
        self,
        kind: ChangeKind,
        overrides: dict[str, Any],
        load: Callable[[], LoadedSettings],
    ) -> LastChange:
        try:
            loaded = await asyncio.to_thread(load)
            self._check_live(loaded.settings)
            take_on = await asyncio.to_thread(self._prepare, loaded.settings)
            self._take_on(take_on)
        except MachdError as error:
            self._refuse(kind, error)
            raise
        except Exception as error:
            # A bug of machd's; the caller still has to get an answer.
            self._log.exception("settings.change_failed")
            fault = FaultError("the settings could not be changed; the log says why")
            self._refuse(kind, fault)
            raise fault from error
        changed = changed_names(self.settings, loaded.settings)
        self._loaded, self._overrides = loaded, overrides
        if kind is ChangeKind.RELOAD:
            self._read = loaded
            self._say_renamed(loaded)
        self._revision += 1
        self._note(LastChange(kind, self._clock.unix_s(), changed=changed))
        return self._last_change

    def _check_live(self, settings: Settings) -> None:
        changed = changed_keys(self.settings, settings)
        if needs_restart := tuple(key.dotted for key in changed if not self.is_live(key)):
            raise RestartRequiredError(needs_restart)

    def _refuse(self, kind: ChangeKind, error: MachdError) -> None:
        problems = error.problems if isinstance(error, SettingsError) else [error.message]
        shown = tuple(printable(problem) for problem in problems)
        self._note(LastChange(kind, self._clock.unix_s(), problems=shown))

    def _take_on(self, take_on: Callable[[], None]) -> None:
        """Apply new settings, or restore the old ones.

        Raises:
            FaultError: Applying failed, which is a bug.
        """
        try:
            take_on()
        except Exception as error:
            self._prepare(self.settings)()
            self._log.exception("settings.not_taken_on")
            raise FaultError("the settings could not be taken on; the old ones are back") from error

    def _say_renamed(self, loaded: LoadedSettings) -> None:
        for given, now in loaded.renamed.items():
            self._log.warning("settings.renamed", given=given, now=now)

    def _note(self, change: LastChange) -> None:
        self._last_change = change
        if change.kind is ChangeKind.RELOAD:
            self._last_reload = change
            if change.is_successful:
                self._last_success_unix_s = change.at_unix_s
        if change.is_successful:
            # A reload that changes no key may still have read other API keys.
            if change.changed or change.kind is ChangeKind.RELOAD:
                self._log.info("settings.changed", kind=change.kind.value, changed=change.changed)
        else:
            self._log.error("settings.refused", kind=change.kind.value, problems=change.problems)
        for watcher in self._watchers:
            watcher(change)


def _merged(overrides: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides with the changes in them; None takes out a value, or a table with all that is in it."""
    merged = dict(overrides)
    for name, change in changes.items():
        kept = change
        if isinstance(change, Mapping):
            below = merged.get(name)
            kept = _merged(below if isinstance(below, Mapping) else {}, change)
            # An empty table is one that was given so, not what is left of another.
            kept = kept if kept or not change else None
        if kept is None:
            merged.pop(name, None)
        else:
            merged[name] = kept
    return merged


def _dotted(overrides: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in overrides.items():
        dotted = f"{above}{toml_key(name)}"
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{dotted}.")
        else:
            yield dotted
