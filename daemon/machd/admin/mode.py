"""Operators' commands: drain, resume, switch the decode mode, measure."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import structlog
from litestar import Request
from litestar.di import NamedDependency

from machd.admin import status
from machd.admin.config import body_timeout_s
from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.dialects.bodies import read_body
from machd.errors import ConflictError, ModelNotLoadedError, ModeUnavailableError
from machd.scheduler.events import DecodeMode
from machd.served.capabilities import model_capabilities
from machd.settings.keys import dotted_table
from machd.settings.model import Settings
from machd.settings.models import DEFAULT_NAME


@endpoint("POST /admin/drain", status.AdminState, also=(409,))
async def drain(admin: NamedDependency[AdminContext]) -> status.AdminState:
    """Take nothing new and finish what there is; the process stays."""
    admin.lifecycle.hold()
    structlog.get_logger("machd.admin").info(
        "daemon.held", open_requests=len(admin.open_generations)
    )
    return status.admin_state(admin)


@endpoint("POST /admin/resume", status.AdminState, also=(409,))
async def resume(admin: NamedDependency[AdminContext]) -> status.AdminState:
    """Take new work again after a drain."""
    admin.lifecycle.resume()
    structlog.get_logger("machd.admin").info("daemon.resumed")
    return status.admin_state(admin)


@endpoint("POST /admin/mode", status.ModeStatus, takes=status.ModeRequest, also=(409,))
async def set_mode(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> status.ModeStatus:
    """Decode one at a time or in batches, once what runs is finished.

    Changes ``continuous_batching.enabled`` until the next reload.

    The switch itself happens when what runs is finished; requests that wait go on waiting. Of several models, it is the
    table of the default one that is changed, or of the one that the query names.
    """
    body = await read_body(request, status.ModeRequest, timeout_s=body_timeout_s(admin))
    enabled = body.mode != "single"
    wanted = _with_batching(admin.settings, enabled=enabled)
    decision = admin.served.decode_mode_under(wanted)
    if enabled and decision.active is not DecodeMode.BATCHED:
        raise ModeUnavailableError(f"this model cannot be batched: {decision.reason}")
    await admin.configuration.patch(_patch(admin, {"continuous_batching": {"enabled": enabled}}))
    return _mode(admin)


@endpoint("POST /admin/probe", status.ProbeReport, also=(409,))
async def probe(admin: NamedDependency[AdminContext]) -> status.ProbeReport:
    """Measure the model, for which running requests are suspended; answers when that is done.

    No request is admitted until then; one that waits is refused no later than without it. A daemon that
    leaves meanwhile breaks it off, and says so. A client that does not want to wait so long may leave: the
    measurement takes place all the same, and ``/v1/capabilities`` shows it.
    """
    admin.served.known  # noqa: B018 - raises while there is no model
    if not (admin.models.is_one or admin.model.is_ready):
        raise ModelNotLoadedError(
            f"the model {admin.model.name!r} is not loaded; load it before it is measured"
        )
    with contextlib.closing(admin.model.hold()):  # it stays loaded until that is done
        await asyncio.shield(asyncio.wrap_future(admin.probe(admin.model)))
    return status.ProbeReport(
        capabilities=model_capabilities(admin.served.known, admin.versions),
        decode_mode=_mode(admin),
    )


def _with_batching(settings: Settings, *, enabled: bool) -> Settings:
    section = settings.continuous_batching.model_copy(update={"enabled": enabled})
    return settings.model_copy(update={"continuous_batching": section})


def _patch(admin: AdminContext, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes as those of the request's model: of its table, or of the sections where it has none.

    Raises:
        ConflictError: It was found in a directory and has no table.
    """
    name = admin.model.name
    if name in admin.configuration.settings.models.tables:
        return {"models": {name: changes}}
    if name != DEFAULT_NAME and not admin.models.is_one:
        raise ConflictError(
            f"the model {name!r} has no settings of its own; give it a table [{dotted_table(name)}]"
        )
    return changes


def _mode(admin: AdminContext) -> status.ModeStatus:
    mode = status.mode_status(admin)
    assert mode is not None, "the model is loaded"
    return mode
