"""The settings over the admin API: what is in force, what an operator changes, what came of it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

_Name = Annotated[str, Meta(max_length=64)]
_Text = Annotated[str, Meta(max_length=4096)]
_Value: TypeAlias = (
    bool
    | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    | Annotated[float, Meta(ge=-1e18, le=1e18)]
    | _Text
    | Annotated[list[_Text], Meta(max_length=256)]
    | None
)

ConfigPatch = Annotated[
    dict[_Name, Annotated[dict[_Name, _Value], Meta(max_length=64)]], Meta(max_length=64)
]
"""Values by key by section, as a settings file has them; null takes an earlier change back."""

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class SettingOrigin(Struct, frozen=True, kw_only=True):
    """Where a value came from.

    Attributes:
        kind: ``default``, ``file``, ``environment``, ``flag`` or ``admin``.
        detail: The file, the variable or the flag; empty for a default.
    """

    kind: str
    detail: str


class AdminConfig(Struct, frozen=True, kw_only=True):
    """The settings in force.

    Attributes:
        config_file: The settings file; null where there is none.
        settings: Values by key by section; secrets are masked.
        origins: By dotted key.
        live_keys: Dotted keys that can be changed while the daemon runs; the others need a restart.
    """

    config_file: str | None
    settings: dict[str, dict[str, object]]
    origins: dict[str, SettingOrigin]
    live_keys: list[str]


class ConfigChange(Struct, frozen=True, kw_only=True):
    """What a reload or a change came to.

    Attributes:
        etag: Names the settings in force now; the ETag header has the same.
        changed: Dotted keys that have other values than before.
    """

    etag: str
    changed: list[str]


class LogLevelRequest(Struct, frozen=True, kw_only=True):
    """What is to be logged from now on."""

    level: LogLevel
