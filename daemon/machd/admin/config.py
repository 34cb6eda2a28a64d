"""The settings over the admin API: what is in force, what an operator changes, what came of it."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, cast

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from msgspec import Meta, Struct

from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.dialects.bodies import read_body
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError
from machd.http.bodies import read_json
from machd.process.configuration import Configuration, LastChange
from machd.settings.explain import settings_json
from machd.settings.keys import TABLE_KINDS, setting_keys
from machd.settings.model import LogLevel
from machd.settings.model_tables import MAX_TABLES
from machd.settings.sources import Origin
from machd.settings.texts import MAX_MODEL_NAME_CHARS

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

_ModelName = Annotated[str, Meta(max_length=MAX_MODEL_NAME_CHARS)]
_Section = Annotated[dict[_Name, _Value], Meta(max_length=64)]
_ModelTable = Annotated[dict[_Name, _Value | _Section], Meta(max_length=64)]

ConfigPatch = Annotated[
    dict[_Name, Annotated[dict[_ModelName, _Value | _ModelTable], Meta(max_length=MAX_TABLES)]],
    Meta(max_length=64),
]
"""Values by key by section, as a settings file has them, with the tables of models and adapters in theirs; null takes
an earlier change back."""


class AdminConfig(Struct, frozen=True, kw_only=True):
    """The settings in force.

    Attributes:
        config_file: The settings file; null where there is none.
        settings: Values by key by section, with the tables of models and adapters in theirs; secrets are masked.
        origins: By dotted key.
        live_keys: Dotted keys that can be changed while the daemon runs; the others need a restart.
            All that is in tables can be changed.
        descriptions: What each key means, by dotted key; without those of tables.
    """

    config_file: str | None
    settings: dict[str, dict[str, object]]
    origins: dict[str, Origin]
    live_keys: list[str]
    descriptions: dict[str, str]


class ConfigChange(Struct, frozen=True, kw_only=True):
    """Result of a reload or a change.

    Attributes:
        etag: Names the settings in force now; the ETag header has the same.
        changed: Dotted keys that have other values than before.
    """

    etag: str
    changed: list[str]


class LogLevelRequest(Struct, frozen=True, kw_only=True):
    """The log level from now on."""

    level: LogLevel


_Sections = dict[str, dict[str, object]]


@endpoint("GET /admin/config", AdminConfig)
async def get_config(admin: NamedDependency[AdminContext]) -> Response[bytes]:
    """The settings in force with their origins; secrets masked; the ETag names them."""
    configuration = admin.configuration
    shown = settings_json(configuration.loaded, origins=True)
    keys = list(setting_keys())
    live_keys = [key.dotted for key in keys if admin.configuration.is_live(key)]
    descriptions = {key.dotted: key.description for key in keys}
    told = {**shown, "live_keys": live_keys, "descriptions": descriptions}
    config = msgspec.convert(told, AdminConfig)
    return Response(
        msgspec.json.encode(config),
        media_type="application/json",
        headers={"ETag": configuration.etag},
    )


@endpoint("PATCH /admin/config", ConfigChange, takes=ConfigPatch, also=(409, 412))
async def patch_config(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> Response[bytes]:
    """Change settings until the next reload; with If-Match, only those that were read.

    Values lie above every source; null takes one away again, or all of a model's or an adapter's table.
    """
    body = await read_json(request, timeout_s=body_timeout_s(admin))
    changes = decode_body(body, cast("type[_Sections]", ConfigPatch))
    _refuse_tables(changes)
    change = await admin.configuration.patch(changes, if_match=request.headers.get("if-match"))
    return _changed(admin.configuration, change)


@endpoint("POST /admin/reload", ConfigChange, also=(400, 409))
async def reload(admin: NamedDependency[AdminContext]) -> Response[bytes]:
    """Read every source of settings again, as SIGHUP does."""
    return _changed(admin.configuration, await admin.configuration.reload())


@endpoint("PUT /admin/log-level", ConfigChange, takes=LogLevelRequest, also=(409,))
async def set_log_level(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> Response[bytes]:
    """Log more or less until the next reload."""
    body = await read_body(request, LogLevelRequest, timeout_s=body_timeout_s(admin))
    change = await admin.configuration.patch({"logging": {"level": body.level}})
    return _changed(admin.configuration, change)


def body_timeout_s(admin: AdminContext) -> float:
    """Seconds that a body may take to arrive."""
    return admin.configuration.settings.limits.client_stall_timeout_s


def _refuse_tables(changes: _Sections) -> None:
    """Refuse a table among the values of a section that has none.

    Raises:
        InvalidRequestError: There is one; the message names it.
    """
    for section, values in changes.items():
        for name, value in values.items():
            if isinstance(value, dict) and section not in TABLE_KINDS:
                key = f"{section}.{name}"
                raise InvalidRequestError(
                    f"{key}: is a value, and no table as those of {' and '.join(TABLE_KINDS)}",
                    param=key,
                )


def _changed(configuration: Configuration, change: LastChange) -> Response[bytes]:
    etag = configuration.etag
    return Response(
        msgspec.json.encode(ConfigChange(etag=etag, changed=list(change.changed))),
        media_type="application/json",
        headers={"ETag": etag},
    )
