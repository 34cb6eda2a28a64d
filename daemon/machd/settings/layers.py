"""What each source says: values for known keys, and a line for whatever names nothing known.

Nothing is checked here but names. The file, the environment and the flags each give a stream of
:class:`Given` values and of problems, which are plain lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from machd.errors import SettingsError
from machd.settings.file import CONFIG_VARIABLE, SettingsFile, read_settings_file
from machd.settings.keys import ENVIRONMENT_PREFIX, SettingKey
from machd.settings.problems import nearest, shortened

Keys = Mapping[str, SettingKey]
"""The settings table by dotted key."""


class OriginKind(StrEnum):
    """The sources, weakest first."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value came from.

    Attributes:
        detail: The file's path, the variable's name, the flag, or ``the admin API``; empty for a
            default.
    """

    kind: OriginKind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """A value that one source gives for one key, not yet checked."""

    key: SettingKey
    value: object
    origin: Origin


def given_by_file(file: SettingsFile | None, keys: Keys) -> Iterator[Given | str]:
    """What the file's sections say; an unreadable file is its problems."""
    if file is None:
        return
    try:
        tables = read_settings_file(file)
    except SettingsError as error:
        yield from error.problems
        return
    yield from _given_by_tables(tables, Origin(OriginKind.FILE, str(file.path)), keys)


def given_by_operator(tables: Mapping[str, object], keys: Keys) -> Iterator[Given | str]:
    """What an operator has changed while the daemon runs, in tables like a file's."""
    yield from _given_by_tables(tables, Origin(OriginKind.ADMIN, "the admin API"), keys)


def _given_by_tables(
    tables: Mapping[str, object], origin: Origin, keys: Keys
) -> Iterator[Given | str]:
    sections = {key.section for key in keys.values()}
    for section, table in tables.items():
        if section not in sections:
            near = _nearest_section(section, keys)
            shown = shortened(section)
            yield f"{shown}: no such section; did you mean {near}? ({origin.detail})"
        elif not isinstance(table, dict):
            yield f"{section}: is a section; write [{section}] ({origin.detail})"
        else:
            for name, value in table.items():
                yield _given(f"{section}.{name}", value, origin, keys)


def given_by_environment(environ: Mapping[str, str], keys: Keys) -> Iterator[Given | str]:
    """What the ``LME_*`` variables say; two spellings of one key have to agree."""
    key_of = {name: key for key in keys.values() for name in key.environment_names}
    ours = {name for name in environ if name.startswith(ENVIRONMENT_PREFIX)} - {CONFIG_VARIABLE}
    for name in sorted(ours - key_of.keys()):
        near = nearest(name, (*key_of, CONFIG_VARIABLE))
        yield f"{shortened(name)}: no such variable; did you mean {near}?"
    for key in keys.values():
        names = [name for name in key.environment_names if name in ours]
        if len({environ[name] for name in names}) > 1:
            yield f"{key.dotted}: given twice, and not the same; keep one ({', '.join(names)})"
        for name in names:
            yield Given(key, environ[name], Origin(OriginKind.ENVIRONMENT, name))


def given_by_flags(flags: Mapping[str, object], keys: Keys) -> Iterator[Given | str]:
    """What the flags say, by dotted key."""
    for dotted, value in flags.items():
        flag = keys[dotted].flag_names[0] if dotted in keys else "flag"
        yield _given(dotted, value, Origin(OriginKind.FLAG, flag), keys)


def _given(dotted: str, value: object, origin: Origin, keys: Keys) -> Given | str:
    """The value, or the problem that there is no such key."""
    if dotted in keys:
        return Given(keys[dotted], value, origin)
    near = _nearest_key(dotted, keys)
    return f"{shortened(dotted)}: no such setting; did you mean {near}? ({origin.detail})"


def _nearest_key(dotted: str, keys: Keys) -> str:
    """The same name in another section, or else the most alike."""
    name = dotted.rpartition(".")[2]
    namesakes = [key.dotted for key in keys.values() if key.name == name]
    return nearest(dotted, namesakes or keys)


def _nearest_section(section: str, keys: Keys) -> str:
    """A key written outside its section, or else the section most alike."""
    namesakes = [key.dotted for key in keys.values() if key.name == section]
    return nearest(section, namesakes or [f"[{key.section}]" for key in keys.values()])
