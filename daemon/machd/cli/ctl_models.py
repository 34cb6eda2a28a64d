"""``machd ctl models``, ``load``, ``unload``, ``pin`` and ``unpin``: the models of a running daemon."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import click
from rich.text import Text

from machd.admin.models import AdminModel, AdminModelList, ModelDownload, UnloadRequest
from machd.cli.ctl_tables import duration, shown_size, words_table
from machd.cli.ctl_target import admin_client, target_options
from machd.cli.ctl_text import json_option, plain, say, show_answer, table_lines

_LOAD_TIMEOUT_S = 3600.0
"""A model may have to wait for its turn; who waits can leave."""

_STYLES = {"ready": "bold green", "failed": "bold red"}


@click.command()
@target_options
@json_option
def models(*, as_json: bool) -> None:
    """List the models: what each does, and the memory it takes."""
    found = admin_client().ask("GET", "/admin/models", AdminModelList)
    show_answer(found, _print_models, as_json=as_json)


@click.command(short_help="Load a model, and wait until it is ready.")
@click.argument("name")
@target_options
@json_option
def load(name: str, *, as_json: bool) -> None:
    """Load the model NAME and wait until it is ready; one that failed is tried at once."""
    answer = _steer(name, "load", timeout_s=_LOAD_TIMEOUT_S)
    show_answer(answer, lambda one: say(f"{one.name} is {one.state}"), as_json=as_json)


@click.command(short_help="Unload a model once it is idle.")
@click.argument("name")
@click.option("--now", "is_now", is_flag=True, help="Suspend its answers instead of waiting.")
@target_options
@json_option
def unload(name: str, *, is_now: bool, as_json: bool) -> None:
    """Unload the model NAME once no request holds it.

    With --now its answers are suspended; they go on once it is loaded again, by another request or
    machd ctl load.
    """
    answer = _steer(name, "unload", UnloadRequest(now=is_now))
    show_answer(answer, _say_unloading, as_json=as_json)


@click.command(short_help="Have a model give way to no other.")
@click.argument("name")
@target_options
@json_option
def pin(name: str, *, as_json: bool) -> None:
    """Have the model NAME give way to no other, until the next reload of the settings."""
    answer = _steer(name, "pin")
    show_answer(
        answer, lambda one: say(f"{one.name} is pinned until the next reload"), as_json=as_json
    )


@click.command(short_help="Have a model give way to others again.")
@click.argument("name")
@target_options
@json_option
def unpin(name: str, *, as_json: bool) -> None:
    """Have the model NAME give way to others, until the next reload of the settings."""
    answer = _steer(name, "unpin")
    show_answer(answer, lambda one: say(f"{one.name} is no longer pinned"), as_json=as_json)


MODEL_COMMANDS = (models, load, unload, pin, unpin)


def _steer(
    name: str, verb: str, body: object = None, *, timeout_s: float | None = None
) -> AdminModel:
    path = f"/admin/models/{quote(name, safe='')}/{verb}"
    return admin_client().ask("POST", path, AdminModel, body, timeout_s=timeout_s)


def _say_unloading(model: AdminModel) -> None:
    is_waited_for = model.state == "ready"
    say(f"{model.name} is {'unloaded once it is idle' if is_waited_for else model.state}")


def _print_models(found: AdminModelList) -> None:
    """Write a line for each model, below it how far its load is or why it failed, and lines for a download and the memory."""
    table = words_table("MODEL", "STATE", "IDLE", "LEASES", "NEEDS", "MEASURED", "SIZE")
    for one in found.models:
        table.add_row(
            plain(one.name),
            _state(one),
            plain("-" if one.idle_s is None else duration(one.idle_s)),
            plain(str(one.leases)),
            plain("-" if one.needed is None else shown_size(one.needed.total_bytes)),
            plain("-" if one.measured_bytes is None else shown_size(one.measured_bytes)),
            plain("-" if one.size_bytes is None else shown_size(one.size_bytes)),
        )
    head, *rows = table_lines(table)
    click.echo(head, color=True)
    for one, row in zip(found.models, rows, strict=True):
        click.echo(row, color=True)
        for line in _details(one):
            say(f"  {line}")
    if found.download is not None:
        say(_downloaded(found.download))
    say(_memory(found))


def _downloaded(download: ModelDownload) -> str:
    """Say how far a download is; its model stands in no line of the table, and may never be served."""
    done = shown_size(download.completed_bytes)
    whole = f" of {shown_size(download.total_bytes)}" if download.total_bytes else ""
    return f"downloading {download.model}: {done}{whole}"


def _state(model: AdminModel) -> Text:
    state = plain(model.state, _STYLES.get(model.state, ""))
    return state + plain(", pinned") if model.pinned else state


def _details(model: AdminModel) -> Iterator[str]:
    if model.aliases:
        yield f"also {', '.join(model.aliases)}"
    if model.progress is not None:
        yield f"{model.stage or 'its process starts'}, {100 * model.progress:.0f} %"
    if model.failure is not None:
        yield f"failed: {model.failure}"


def _memory(found: AdminModelList) -> str:
    reserved = shown_size(found.reserved_bytes)
    if found.budget_bytes is None:
        return f"{reserved} reserved"
    return f"{reserved} of {shown_size(found.budget_bytes)} reserved"
