"""``python -m machd.cli.ceiling_process``: the model without a server, as ``machd bench`` needs it.

Not a command for people. It takes the settings that the server is given, so that it loads the same
model in the same way; ``machd.bench.ceiling`` says what goes over its standard streams.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import click
import msgspec

from machd import __version__
from machd.bench.ceiling import (
    CeilingAnswer,
    CeilingFailure,
    CeilingQuery,
    CeilingReady,
    CeilingReply,
    ModelQuery,
    StaticAnswer,
    StaticQuery,
)
from machd.bench.model_facts import ModelFacts
from machd.capabilities.versions import Versions
from machd.cli.options import SettingsCommand, model_argument, settings_options
from machd.engine.backend.blas import choose_blas, measure_blas
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.scratch import private_scratch_directory, use_scratch_directory
from machd.engine.loading.embedded import user_cache_directory
from machd.engine.loading.source import resolve_model
from machd.engine.protocol.engine import ModelDescription
from machd.errors import MachdError
from machd.settings.model import Settings
from machd.settings.sources import LoadedSettings, process_environ

if TYPE_CHECKING:
    from machd.engine.ceiling import BareLoop
    from machd.engine.protocol.tokenizer import Tokenizer
    from machd.engine.static_batch import StaticBatch


@dataclass(frozen=True, slots=True)
class _Model:
    """One model in memory, and the two ways to run it."""

    tokenizer: Tokenizer
    bare_loop: BareLoop
    static_batch: StaticBatch

    def answer(self, query: ModelQuery) -> CeilingReply:
        return self._bare(query) if isinstance(query, CeilingQuery) else self._static(query)

    def _bare(self, query: CeilingQuery) -> CeilingReply:
        from machd.engine.ceiling import equal_lengths  # noqa: PLC0415 - imports mlx

        rows = [self.tokenizer.encode(one, add_special_tokens=True) for one in query.prompts]
        reading = self.bare_loop.measure(equal_lengths(rows), steps=query.steps)
        return CeilingAnswer(
            reading.batch_width, reading.prompt_tokens, reading.prefill_s, list(reading.step_s)
        )

    def _static(self, query: StaticQuery) -> CeilingReply:
        reading = self.static_batch.run(query.prompts, max_tokens=query.max_tokens)
        return StaticAnswer(list(reading.prompt_tokens), list(reading.completion_tokens))


@click.command(cls=SettingsCommand)
@model_argument
@settings_options
def ceiling_process(loaded: LoadedSettings) -> None:
    """Load the model, say so, and answer queries until standard input ends."""
    replies = sys.stdout
    # Libraries print what they like; the replies are the only thing that may come out here.
    with contextlib.redirect_stdout(sys.stderr):
        model, ready = _load(loaded.settings)
        _say(replies, ready)
        _answer(model, sys.stdin, replies)


def main() -> None:
    """Run the process; an operating error is a reply of its own."""
    try:
        ceiling_process(standalone_mode=False)
    except MachdError as error:
        _say(sys.stdout, CeilingFailure(error.message, error.exit_code))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _load(settings: Settings) -> tuple[_Model, CeilingReady]:
    cache_directory = user_cache_directory(process_environ())
    choice = choose_blas(settings.engine.blas)
    use_scratch_directory(
        private_scratch_directory(cache_directory / "machd"),
        os.environ.__setitem__,  # noqa: TID251 - mlx reads TMPDIR by itself
    )
    import_mlx_lm()
    from machd.engine.backend.device import available_memory_bytes  # noqa: PLC0415 - imports mlx
    from machd.engine.ceiling import BareLoop  # noqa: PLC0415 - imports mlx
    from machd.engine.loading.loader import load_model  # noqa: PLC0415 - imports mlx
    from machd.engine.static_batch import StaticBatch  # noqa: PLC0415 - imports mlx

    model = settings.model
    loaded = load_model(
        resolve_model(model.path, offline=model.offline, cache_directory=cache_directory),
        dtype=model.dtype,
        max_context_tokens=model.max_context_tokens,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.chat_template,
        blas=measure_blas(choice).name,
    )
    ways = _Model(
        loaded.tokenizer,
        BareLoop(loaded.model),
        StaticBatch(loaded.model, loaded.tokenizer),
    )
    description = loaded.description
    return ways, CeilingReady(
        _facts(description), description.weights_bytes, available_memory_bytes()
    )


def _facts(model: ModelDescription) -> ModelFacts:
    mlx, mlx_lm = map(importlib.metadata.version, ("mlx", "mlx-lm"))
    return ModelFacts(
        id=model.model_id,
        weights_bytes=model.weights_bytes,
        dtype=model.dtype,
        quantization=model.quantization,
        backend=model.backend,
        blas=model.blas,
        versions=Versions(
            machd=__version__, mlx=mlx, mlx_lm=mlx_lm, backend=model.backend, dtype=model.dtype
        ),
    )


def _answer(model: _Model, queries: Iterable[str], replies: TextIO) -> None:
    decoder: msgspec.json.Decoder[ModelQuery] = msgspec.json.Decoder(ModelQuery)
    for line in queries:
        _say(replies, model.answer(decoder.decode(line)))


def _say(replies: TextIO, reply: CeilingReply) -> None:
    replies.write(msgspec.json.encode(reply).decode() + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
