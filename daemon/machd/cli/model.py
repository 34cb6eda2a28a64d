"""``machd model``: the models on this machine."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from typing import Literal

import click

from machd.cli.model_list import list_models, remove
from machd.cli.model_pull import pull
from machd.cli.progress import ProgressBar
from machd.errors import StartupError
from machd.installed import how_to_install
from machd.settings.sources import process_environ
from machd.user_directories import user_cache_directory


@click.group()
def model() -> None:
    """Fetch models, and list and remove those on this machine."""


@model.command(short_help="Write a model of random weights, to try and measure with.")
@click.argument("kind", type=click.Choice(["dense", "moe", "vision"]))
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--gb",
    default=None,
    type=click.FloatRange(0.6, 1000),
    help="Size of the experts, or of a dense model's layers, in units of 10^9 bytes; 1.5 unless given.",
)
@click.option(
    "--family",
    default=None,
    metavar="NAME",
    help="Family of a vision model, as mlx-vlm names it; qwen2_vl unless given.",
)
@click.option(
    "--scale",
    default=None,
    metavar="NAME",
    help="Size of a vision model: tiny, or mid where the family has one; tiny unless given.",
)
def generate(
    kind: Literal["dense", "moe", "vision"],
    directory: Path,
    gb: float | None,
    family: str | None,
    scale: str | None,
) -> None:
    """Write a model of random weights into DIRECTORY, to try and measure machd with.

    moe is a mixture-of-experts model whose routing is as skewed as that of trained models, so that
    `machd serve DIRECTORY --streaming` and `machd bench DIRECTORY --experts 0.25,0.5,1` show what experts
    on disk cost.

    vision is a model that takes images, and in some families videos. Its answers mean nothing, and depend
    on every image: `machd serve DIRECTORY` answers requests with images. It needs the extra vision.
    """
    if kind == "vision" and gb is not None:
        raise click.UsageError("--gb goes with dense and moe; a vision model takes --scale")
    if kind != "vision" and (family, scale) != (None, None):
        raise click.UsageError("--family and --scale go with vision")
    if directory.exists() and any(directory.iterdir()):
        raise click.UsageError(f"{directory} is not empty; name a new directory")
    with ProgressBar() as bar:
        if kind == "vision":
            said = _generate_vision(directory, family or "qwen2_vl", scale or "tiny", bar)
        else:
            said = _generate_text(kind, directory, gb or 1.5, bar)
    click.echo(f"{directory} has {said}")


def _generate_text(
    kind: Literal["dense", "moe"], directory: Path, gb: float, bar: ProgressBar
) -> str:
    from machd_bench.generated_checkpoint import (  # noqa: PLC0415 - imports mlx
        DenseShape,
        MoeShape,
        sized,
        stored_bytes,
        write_generated_checkpoint,
    )

    shape = sized(MoeShape(), gb) if kind == "moe" else sized(DenseShape(), gb)
    bar.stage("writing the model", stored_bytes(shape))
    cache_directory = user_cache_directory(process_environ())
    write_generated_checkpoint(directory, shape, cache_directory, bar.advance)
    return f"a {kind} model of {shape.layers} layers"


def _generate_vision(directory: Path, family: str, scale: str, bar: ProgressBar) -> str:
    """Write a vision model, and describe it.

    Raises:
        UsageError: The family cannot be generated, or not in this size.
        StartupError: The extra vision is not installed.
    """
    if importlib.util.find_spec("mlx_vlm") is None:
        raise StartupError(
            f"a vision model is written with mlx-vlm, which is missing: {how_to_install('vision')}"
        )
    from machd_probes.vision_families import (  # noqa: PLC0415 - imports mlx
        FAMILIES,
        UnsupportedFamily,
        write_family,
    )

    entry = FAMILIES.get(family)
    if entry is None:
        near = difflib.get_close_matches(family, FAMILIES, n=3, cutoff=0.0)
        raise click.UsageError(
            f"machd generates no family {family!r}; the nearest are {', '.join(near)}"
        )
    if isinstance(entry, UnsupportedFamily):
        raise click.UsageError(f"{family} cannot be generated: {entry.reason}")
    bar.stage("writing the model", None)
    cache_directory = user_cache_directory(process_environ())
    try:
        write_family(family, directory, cache_directory, scale=scale)
    except FileNotFoundError as error:
        raise click.UsageError(f"{family} has no scale {scale!r}; leave --scale out") from error
    return f"a {scale} vision model of the family {family}"


model.add_command(pull)
model.add_command(list_models)
model.add_command(remove)
