"""``python -m machd.cli.ceiling_process``: the bare loop, as ``machd bench`` runs it.

Not a command for people. It takes the settings that the server is given, so that it loads the same
model in the same way; ``machd.bench.ceiling`` says what goes over its standard streams.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

import click
import msgspec

from machd.bench.ceiling import (
    CeilingAnswer,
    CeilingFailure,
    CeilingQuery,
    CeilingReady,
    CeilingReply,
)
from machd.cli.options import SettingsCommand, model_argument, settings_options
from machd.engine.blas import choose_blas, measure_blas
from machd.engine.embedded import user_cache_directory
from machd.engine.scratch import private_scratch_directory, use_scratch_directory
from machd.engine.source import resolve_model
from machd.errors import MachdError
from machd.settings.model import Settings
from machd.settings.sources import LoadedSettings, process_environ

if TYPE_CHECKING:
    from machd.engine.ceiling import BareLoop

__all__ = ["ceiling_process"]


@click.command(cls=SettingsCommand)
@model_argument
@settings_options
def ceiling_process(loaded: LoadedSettings) -> None:
    """Load the model, say so, and answer queries until standard input ends."""
    replies = sys.stdout
    # Libraries print what they like; the replies are the only thing that may come out here.
    with contextlib.redirect_stdout(sys.stderr):
        loop, ready = _load(loaded.settings)
        _say(replies, ready)
        _answer(loop, sys.stdin, replies)


def main() -> None:
    """Run the process; an operating error is a reply of its own."""
    try:
        ceiling_process(standalone_mode=False)
    except MachdError as error:
        _say(sys.stdout, CeilingFailure(error.message, error.exit_code))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _load(settings: Settings) -> tuple[BareLoop, CeilingReady]:
    cache_directory = user_cache_directory(process_environ())
    choice = choose_blas(settings.engine.blas)
    use_scratch_directory(
        private_scratch_directory(cache_directory / "machd"),
        os.environ.__setitem__,  # noqa: TID251 - mlx reads TMPDIR by itself
    )
    from machd.engine.ceiling import BareLoop  # noqa: PLC0415 - imports mlx
    from machd.engine.device import available_memory_bytes  # noqa: PLC0415 - imports mlx
    from machd.engine.loader import load_model  # noqa: PLC0415 - imports mlx

    model = settings.model
    loaded = load_model(
        resolve_model(model.path, offline=model.offline, cache_directory=cache_directory),
        dtype=model.dtype,
        max_context_tokens=model.max_context_tokens,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.chat_template,
        blas=measure_blas(choice).name,
    )
    description = loaded.description
    loop = BareLoop(loaded.model, vocabulary_tokens=description.vocabulary_tokens)
    return loop, CeilingReady(description.weights_bytes, available_memory_bytes())


def _answer(loop: BareLoop, queries: Iterable[str], replies: TextIO) -> None:
    decoder = msgspec.json.Decoder(CeilingQuery)
    for line in queries:
        query = decoder.decode(line)
        reading = loop.measure(
            batch_width=query.batch_width, prompt_tokens=query.prompt_tokens, steps=query.steps
        )
        _say(
            replies,
            CeilingAnswer(
                reading.batch_width,
                reading.prompt_tokens,
                reading.prefill_s,
                list(reading.step_s),
            ),
        )


def _say(replies: TextIO, reply: CeilingReply) -> None:
    replies.write(msgspec.json.encode(reply).decode() + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
