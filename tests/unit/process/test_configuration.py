"""The owner of the settings: one change at a time, all of it or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.clocks.manual_clock import ManualClock

from machd.errors import (
    FaultError,
    ListenError,
    RestartRequiredError,
    SettingsChangedError,
    SettingsError,
)
from machd.process.configuration import ChangeKind, Configuration, LastChange
from machd.settings.model import Settings
from machd.settings.sources import SettingsSources


class _Daemon:
    """Parts that take settings on, note it, and fail when told to."""

    def __init__(self, path: Path, text: str = "") -> None:
        self.path = path
        self.write(text)
        self.clock = ManualClock()
        sources = SettingsSources(path, {}, {"limits.max_queue": 50})
        self.configuration = Configuration(sources, sources.load(), self.prepare, self.clock)
        self.changes: list[LastChange] = []
        self.configuration.watch(self.changes.append)
        self.refusal: Exception | None = None
        self.fault_on: int | None = None
        self.prepared: list[int] = []
        self.in_force = [self.configuration.settings.limits.max_n]

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def prepare(self, settings: Settings) -> Callable[[], None]:
        max_n = settings.limits.max_n
        self.prepared.append(max_n)
        if self.refusal is not None:
            raise self.refusal

        def take_on() -> None:
            self.in_force.append(max_n)
            if self.fault_on == max_n:
                raise RuntimeError("boom")

        return take_on


@pytest.fixture
def daemon(tmp_path: Path) -> _Daemon:
    """One with an empty settings file."""
    return _Daemon(tmp_path / "machd.toml")


async def test_a_reload_takes_on_what_the_file_says(daemon: _Daemon) -> None:
    """The parts get it, the change is told, and the settings have another name."""
    etag = daemon.configuration.etag
    daemon.write("[limits]\nmax_n = 3\n")
    daemon.clock.advance(5)
    change = await daemon.configuration.reload()
    assert (change.kind, change.changed, change.problems) == (
        ChangeKind.RELOAD,
        ("limits.max_n",),
        (),
    )
    assert daemon.in_force == [8, 3]
    assert daemon.configuration.settings.limits.max_n == 3
    assert daemon.configuration.etag != etag
    assert daemon.configuration.last_change is change
    assert daemon.configuration.last_success_unix_s == change.at_unix_s
    assert daemon.changes == [change]


async def test_a_patch_by_an_earlier_name_is_of_the_same_key(daemon: _Daemon) -> None:
    """A change under the name that a key had before can be taken back under either."""
    await daemon.configuration.patch({"limits": {"stall_timeout_s": 5}})
    assert daemon.configuration.settings.limits.client_stall_timeout_s == 5
    assert daemon.configuration.overrides == ("limits.client_stall_timeout_s",)
    await daemon.configuration.patch({"limits": {"client_stall_timeout_s": None}})
    assert daemon.configuration.settings.limits.client_stall_timeout_s == 30


async def test_an_earlier_name_in_the_file_is_logged(daemon: _Daemon) -> None:
    """A reload says which name has taken the place of the one in the file."""
    daemon.write("[limits]\nstall_timeout_s = 5\n")
    with capture_logs() as logs:
        await daemon.configuration.reload()
    renamed = [one for one in logs if one["event"] == "settings.renamed"]
    assert [(one["given"], one["now"], one["log_level"]) for one in renamed] == [
        ("limits.stall_timeout_s", "limits.client_stall_timeout_s", "warning")
    ]


async def test_a_patch_stands_above_flags_and_a_reload_forgets_it(daemon: _Daemon) -> None:
    """What an operator changes wins until the sources are read for good."""
    await daemon.configuration.patch({"limits": {"max_queue": 5, "max_n": 2}})
    await daemon.configuration.patch({"limits": {"max_n": 3}})
    limits = daemon.configuration.settings.limits
    assert (limits.max_queue, limits.max_n) == (5, 3)
    await daemon.configuration.patch({"limits": {"max_queue": None}})
    assert daemon.configuration.settings.limits.max_queue == 50
    change = await daemon.configuration.reload()
    assert change.changed == ("limits.max_n",)


async def test_a_patch_reads_no_source_again(daemon: _Daemon) -> None:
    """An edit that is not reloaded yet, good or broken, is neither taken on nor in the way."""
    daemon.write("[limits]\nmax_n = 3\nmax_queue_tokens = 7\n")
    await daemon.configuration.patch({"limits": {"max_queue": 5}})
    limits = daemon.configuration.settings.limits
    assert (limits.max_queue, limits.max_n, limits.max_queue_tokens) == (5, 8, 1_000_000)
    daemon.write("[limits")
    await daemon.configuration.patch({"limits": {"max_queue": None}})
    assert daemon.configuration.settings.limits.max_queue == 50


@pytest.mark.parametrize(
    "changes", [{"limits": {"max_qeue": None}}, {"limit": {"max_queue": None}}, {"limit": {}}]
)
async def test_what_is_taken_away_has_to_exist(
    daemon: _Daemon, changes: dict[str, dict[str, object]]
) -> None:
    """A misspelt key does not leave its value in force in silence."""
    with pytest.raises(SettingsError, match="no such"):
        await daemon.configuration.patch(changes)


async def test_a_patch_lays_values_above_a_models_table(daemon: _Daemon) -> None:
    """Key by key; null takes one away, or all that was laid above the table, and the file's stays."""
    daemon.write('[models.coder]\npath = "/m/Coder"\nttl_s = 5\ncache.prefix = false\n')
    change = await daemon.configuration.reload()
    assert change.changed == ("models.coder",)
    etag = daemon.configuration.etag

    cache = {"max_entries": 8, "prefix": True}
    change = await daemon.configuration.patch({"models": {"coder": {"pin": True, "cache": cache}}})

    assert change.changed == (
        "models.coder.pin",
        "models.coder.cache.prefix",
        "models.coder.cache.max_entries",
    )
    assert daemon.configuration.etag != etag
    assert sorted(daemon.configuration.overrides) == sorted(change.changed)
    await daemon.configuration.patch({"models": {"coder": {"cache": {"prefix": None}}}})
    table = daemon.configuration.settings.models.tables["coder"]
    assert table.overrides == {"cache": {"prefix": False, "max_entries": 8}}
    await daemon.configuration.patch({"models": {"coder": {"cache": None}}})
    assert daemon.configuration.overrides == ("models.coder.pin",)
    change = await daemon.configuration.patch({"models": {"coder": None}})
    assert change.changed == ("models.coder.pin",)
    assert daemon.configuration.settings.models.tables["coder"].ttl_s == 5
    assert not daemon.configuration.overrides


async def test_a_patch_adds_a_models_table_and_takes_it_away(daemon: _Daemon) -> None:
    """One with a path, and one that is empty because its name says which model it is."""
    added = {"a.b": {"path": "/m/b"}, "org/c": {"model": {"offline": False}}}
    change = await daemon.configuration.patch({"models": added})
    assert change.changed == ('models."a.b"', 'models."org/c"')
    assert daemon.configuration.overrides == (
        'models."a.b".path',
        'models."org/c".model.offline',
    )
    change = await daemon.configuration.patch({"models": {"a.b": None}})
    assert change.changed == ('models."a.b"',)
    await daemon.configuration.patch({"model": {}, "models": {"org/c": None}})
    assert daemon.configuration.settings.models.tables == {}


async def test_an_empty_table_is_added_as_it_is(tmp_path: Path) -> None:
    """Below the directory of models a name is enough."""
    daemon = _Daemon(tmp_path / "machd.toml", '[models]\ndirectory = "/m"\n')
    change = await daemon.configuration.patch({"models": {"coder": {}}})
    assert change.changed == daemon.configuration.overrides == ("models.coder",)
    change = await daemon.configuration.patch({"models": {"coder": None}})
    assert change.changed == ("models.coder",)
    assert not daemon.configuration.overrides


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"models": {"codr": None}}, "models.codr: no such setting; did you mean models.coder?"),
        ({"models": {"codr": {"pin": None}}}, "models.codr: no such setting"),
        ({"models": {"codr": {"cache": {"prefix": None}}}}, "models.codr: no such setting"),
        ({"models": {"directoryy": None}}, "models.directoryy: no such setting"),
        ({"models": {"coder": {"pth": None}}}, "models.coder.pth: no such setting"),
        ({"models": {"coder": {"cache": {"prefx": None}}}}, "models.coder.cache.prefx: no such"),
        ({"models": {"coder": {"cache": {"prefix": {}}}}}, "models.coder.cache.prefix: {} is not"),
        ({"models": {"directory": {"a": 1}}}, "models.directory: {"),
        ({"limits": {"max_n": {"a": 1}}}, "limits.max_n: {"),
        ({"models": {"coder": {"path": "/m/b"}, "b": {}}}, "models.b: has no path"),
    ],
)
async def test_a_wrong_change_of_a_table_changes_nothing(
    tmp_path: Path, changes: dict[str, dict[str, object]], problem: str
) -> None:
    """It is answered as a wrong value of a section is."""
    daemon = _Daemon(tmp_path / "machd.toml", '[models.coder]\npath = "/m/Coder"\n')
    with pytest.raises(SettingsError) as refused:
        await daemon.configuration.patch(changes)
    assert refused.value.problems[0].startswith(problem)
    assert daemon.configuration.settings.models.tables["coder"].path == "/m/Coder"
    assert not daemon.configuration.overrides


async def test_a_bug_while_preparing_is_told_and_noted(daemon: _Daemon) -> None:
    """The caller gets an error, and the old settings stay."""
    daemon.refusal = ValueError("embedded null byte")
    with pytest.raises(FaultError), capture_logs():
        await daemon.configuration.reload()
    assert not daemon.configuration.last_reload.is_successful
    daemon.refusal = None
    await daemon.configuration.reload()
    assert daemon.configuration.last_reload.is_successful


async def test_a_list_of_etags_matches_by_one(daemon: _Daemon) -> None:
    """RFC 9110, section 13.1.1."""
    both = f'"nope", {daemon.configuration.etag}'
    await daemon.configuration.patch({"limits": {"max_n": 3}}, if_match=both)
    assert daemon.configuration.settings.limits.max_n == 3


async def test_a_refused_patch_is_no_failed_reload(daemon: _Daemon) -> None:
    """A typing error over the admin API raises no alert about the settings file."""
    with pytest.raises(SettingsError):
        await daemon.configuration.patch({"limits": {"max_n": 0}})
    assert not daemon.configuration.last_change.is_successful
    assert daemon.configuration.last_reload.is_successful


@pytest.mark.parametrize(
    ("text", "count"), [("[limits]\nmax_n = 0\nmax_m = 1\n", 2), ("[limits", 1), ("x = 1\n", 1)]
)
async def test_wrong_settings_change_nothing(daemon: _Daemon, text: str, count: int) -> None:
    """Every problem is told, nothing is even prepared, and the next good change goes through."""
    etag, success_s = daemon.configuration.etag, daemon.configuration.last_success_unix_s
    daemon.write(text)
    daemon.clock.advance(5)
    with pytest.raises(SettingsError) as refusal:
        await daemon.configuration.reload()
    assert len(refusal.value.problems) == count
    assert daemon.configuration.last_change.problems == tuple(refusal.value.problems)
    assert not daemon.configuration.last_change.is_successful
    assert (daemon.configuration.etag, daemon.configuration.last_success_unix_s) == (
        etag,
        success_s,
    )
    assert daemon.prepared == []
    daemon.write("[limits]\nmax_n = 2\n")
    await daemon.configuration.reload()
    assert daemon.in_force == [8, 2]
    assert [one.is_successful for one in daemon.changes] == [False, True]


async def test_what_needs_a_restart_is_named_and_not_prepared(daemon: _Daemon) -> None:
    """The rest of the change is not made either."""
    with pytest.raises(RestartRequiredError) as refusal:
        await daemon.configuration.patch({"server": {"port": 1}, "limits": {"max_n": 2}})
    assert refusal.value.keys == ("server.port",)
    assert daemon.prepared == []
    await daemon.configuration.patch({"limits": {"max_queue": 1}})
    assert daemon.configuration.settings.limits.max_n == 8, "a refused change leaves nothing behind"


async def test_what_the_parts_refuse_changes_nothing(daemon: _Daemon) -> None:
    """Such as keys that are gone while other machines can reach the daemon."""
    daemon.refusal = ListenError("set auth.api_keys_file first")
    with pytest.raises(ListenError):
        await daemon.configuration.patch({"limits": {"max_n": 2}})
    assert daemon.configuration.settings.limits.max_n == 8
    assert daemon.in_force == [8]
    assert daemon.configuration.last_change.problems == ("set auth.api_keys_file first",)


async def test_what_cannot_be_taken_on_is_put_back(daemon: _Daemon) -> None:
    """A bug halfway leaves the old settings in force, and a fault is told."""
    await daemon.configuration.patch({"limits": {"max_n": 4}})
    daemon.fault_on = 5
    with pytest.raises(FaultError):
        await daemon.configuration.patch({"limits": {"max_n": 5}})
    assert daemon.in_force == [8, 4, 5, 4]
    assert daemon.configuration.settings.limits.max_n == 4
    assert not daemon.configuration.last_change.is_successful
    daemon.fault_on = None
    await daemon.configuration.patch({"limits": {"max_queue": 2}})
    assert daemon.configuration.settings.limits.max_n == 4


async def test_of_two_writers_the_second_is_told(daemon: _Daemon) -> None:
    """Both have read the same settings; only one of their changes is made."""
    etag = daemon.configuration.etag
    answers = await asyncio.gather(
        *(
            daemon.configuration.patch({"limits": {"max_n": max_n}}, if_match=etag)
            for max_n in (2, 3)
        ),
        return_exceptions=True,
    )
    assert [type(one) for one in answers] == [LastChange, SettingsChangedError]
    assert daemon.configuration.settings.limits.max_n == 2
    await daemon.configuration.patch({"limits": {"max_n": 6}}, if_match="*")
    await daemon.configuration.patch({"limits": {"max_n": 7}}, if_match=daemon.configuration.etag)
    assert daemon.configuration.settings.limits.max_n == 7


async def test_an_etag_never_comes_back(daemon: _Daemon) -> None:
    """Settings that return to earlier values get a new ETag."""
    etags = [daemon.configuration.etag]
    for max_n in (2, None, 2):
        await daemon.configuration.patch({"limits": {"max_n": max_n}})
        etags.append(daemon.configuration.etag)
    assert len(set(etags)) == 4
