"""``machd ctl``: what an operator asks of a running daemon, and tells it to do."""

from __future__ import annotations

import os
import re
import sys
from datetime import UTC, datetime
from typing import get_args
from urllib.parse import quote

import click
import msgspec
from msgspec import Struct

from machd.admin.config import AdminConfig, ConfigChange, LogLevelRequest
from machd.admin.event_feed import AdminEvent
from machd.admin.requests import AbortedRequests
from machd.admin.status import AdminState, AdminStatus, ModeStatus
from machd.cli.ctl_cache import cache
from machd.cli.ctl_client import AdminClient
from machd.cli.ctl_config import config
from machd.cli.ctl_models import MODEL_COMMANDS
from machd.cli.ctl_tables import event_line, print_status
from machd.cli.ctl_target import admin_client, target_options
from machd.cli.ctl_text import counted, json_option, say, say_changed, show_answer, shown_json
from machd.cli.ctl_wait import wait_until
from machd.cli.ctl_watching import WATCHING_COMMANDS
from machd.errors import ConflictError, FaultError, UnavailableError
from machd.settings.model import LogLevel

_ALIASES = {"continuous": "batched"}
"""Other words for a mode."""

_SEQUENCE_NUMBER = re.compile(r"/[0-9]+\Z")


class _Kind(Struct, frozen=True):
    """An event's type and nothing else of it."""

    type: str


@click.group()
@target_options
def ctl() -> None:
    """Look after a running daemon over its admin API."""


@ctl.command()
@target_options
@json_option
def status(*, as_json: bool) -> None:
    """Show the daemon's state, load and settings changes."""
    show_answer(
        admin_client().ask("GET", "/admin/status", AdminStatus), print_status, as_json=as_json
    )


@ctl.command(short_help="Print a link to the operators' page.")
@target_options
def page() -> None:
    """Print a link to the operators' page, with the admin token in it: whoever has the link operates the daemon."""
    client = admin_client()
    client.ask("GET", "/admin/status", AdminStatus)
    say(client.page_url)


@ctl.command(short_help="End the open requests of an id.")
@click.argument("request_id", metavar="ID")
@target_options
@json_option
def abort(request_id: str, *, as_json: bool) -> None:
    """End the open requests that go by ID: an answer's id, or an X-Request-Id."""
    # Events and the log name sequences: the request's id, a slash, a number.
    whole_id = _SEQUENCE_NUMBER.sub("", request_id)
    path = f"/admin/requests/{quote(whole_id, safe='')}"
    aborted = admin_client().ask("DELETE", path, AbortedRequests)
    show_answer(aborted, lambda one: say(f"ended {', '.join(one.aborted)}"), as_json=as_json)


@ctl.command(short_help="Take nothing new, and finish what there is.")
@click.option("--wait", "is_wait", is_flag=True, help="Return when no request is open any more.")
@target_options
@json_option
def drain(*, is_wait: bool, as_json: bool) -> None:
    """Have the daemon take nothing new and finish what it has; it goes on living."""
    client = admin_client()
    state = client.ask("POST", "/admin/drain", AdminState)
    if is_wait:
        status = wait_until(client, _is_drained, _still_open)
        state = msgspec.convert(status, AdminState, from_attributes=True)
    show_answer(state, lambda one: say(f"draining, {_open(one)}"), as_json=as_json)


@ctl.command()
@target_options
@json_option
def resume(*, as_json: bool) -> None:
    """Have the daemon take new work again after a drain."""
    state = admin_client().ask("POST", "/admin/resume", AdminState)
    show_answer(state, lambda one: say(one.state), as_json=as_json)


@ctl.command()
@target_options
@json_option
def reload(*, as_json: bool) -> None:
    """Have the daemon read its settings again."""
    change = admin_client().ask("POST", "/admin/reload", ConfigChange)
    show_answer(change, say_changed, as_json=as_json)


@ctl.command(short_help="Show or change how requests are decoded.")
@click.argument(
    "wanted",
    metavar="[single|batched]",
    required=False,
    callback=lambda _ctx, _param, word: _ALIASES.get(word, word),
    type=click.Choice(["single", "batched", *_ALIASES]),
)
@click.option("--wait", "is_wait", is_flag=True, help="Return when the mode is in force.")
@target_options
@json_option
def mode(wanted: str | None, *, is_wait: bool, as_json: bool) -> None:
    """Have the daemon decode one request at a time, or in batches; or show which it does."""
    client = admin_client()
    if wanted is None:
        if is_wait:
            raise click.UsageError("Name the mode to wait for.")
        show_answer(_mode_now(client), _say_mode, as_json=as_json)
        return
    answer = client.ask("POST", "/admin/mode", ModeStatus, {"mode": wanted})
    if is_wait:
        status = wait_until(
            client,
            _has_mode,
            lambda one: (
                f"switching to {wanted}: {counted(one.running, 'sequence')} to be suspended"
            ),
        )
        assert status.decode_mode is not None, "just waited for"
        answer = status.decode_mode
    if not answer.is_switching and answer.active != wanted:
        raise ConflictError(
            f"the mode is {answer.active} and not {wanted}: {_why_not(answer, wanted)}"
        )
    show_answer(answer, _say_mode, as_json=as_json)


@ctl.command(short_help="Show or change the level of the log.")
@click.argument("level", required=False, type=click.Choice(get_args(LogLevel)))
@target_options
@json_option
def log_level(level: str | None, *, as_json: bool) -> None:
    """Have the daemon log from LEVEL on, until the next reload; or show from where on it does."""
    client = admin_client()
    if level is None:
        shown = client.ask("GET", "/admin/config", AdminConfig).settings["logging"]["level"]
        now = msgspec.convert({"level": shown}, LogLevelRequest)
        show_answer(now, lambda one: say(one.level), as_json=as_json)
        return
    change = client.ask("PUT", "/admin/log-level", ConfigChange, {"level": level})
    show_answer(change, say_changed, as_json=as_json)


@ctl.command(short_help="Show what happens, as it happens.")
@click.option("--steps", "with_steps", is_flag=True, help="Show every step of the engine as well.")
@target_options
@json_option
def events(*, with_steps: bool, as_json: bool) -> None:
    """Show what happens, as it happens, until Ctrl-C or the daemon's end."""
    try:
        for data in admin_client().events():
            if not with_steps and msgspec.json.decode(data, type=_Kind).type == "step":
                continue
            say(shown_json(data.decode(errors="replace")) if as_json else _event_line(data))
    except BrokenPipeError:
        # Whoever read has had enough; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


for _command in (cache, config, *WATCHING_COMMANDS, *MODEL_COMMANDS):
    ctl.add_command(_command)


def _event_line(data: bytes) -> str:
    event: AdminEvent = msgspec.json.decode(data, type=AdminEvent)
    time_of_day = datetime.fromtimestamp(event.at, UTC).astimezone().strftime("%H:%M:%S.%f")
    return event_line(event, time_of_day[:-3])


def _say_mode(mode: ModeStatus) -> None:
    line = f"decode mode {mode.active}"
    say(f"{line}, {mode.requested} when what runs is done" if mode.is_switching else line)


def _mode_now(client: AdminClient) -> ModeStatus:
    """Return how sequences are decoded; UnavailableError before the model is loaded."""
    mode = client.ask("GET", "/admin/status", AdminStatus).decode_mode
    if mode is None:
        raise UnavailableError("the model is loading, and the mode is not decided yet")
    return mode


def _open(state: AdminState) -> str:
    return f"{counted(state.open_requests, 'request')} open"


def _still_open(status: AdminStatus) -> str:
    return f"draining: {_open(status)}"


def _is_drained(status: AdminStatus) -> bool:
    if status.state == "ready":
        raise ConflictError("somebody else has resumed the daemon")
    _check_alive(status)
    return status.open_requests == 0


def _has_mode(status: AdminStatus) -> bool:
    """Return whether the switch is over, whatever its outcome."""
    _check_alive(status)
    return status.decode_mode is not None and not status.decode_mode.is_switching


def _why_not(mode: ModeStatus, wanted: str) -> str:
    if mode.requested != wanted:
        return "somebody else has changed it"
    return f"the switch has failed, and the daemon's log says why ({mode.reason})"


def _check_alive(status: AdminStatus) -> None:
    """A daemon whose engine has failed does nothing any more that could be waited for."""
    if status.state == "failed":
        raise FaultError(f"the daemon has failed: {status.reason or 'its log says why'}")
