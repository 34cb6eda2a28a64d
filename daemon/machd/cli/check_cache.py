"""``machd check --cache-report``: recorded requests in the prefix cache of a model that is not loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from machd.capabilities.verdict import Support
from machd.cli.cache_report import CacheReporter, DecodeMedia
from machd.cli.cache_report_document import CacheReport
from machd.cli.cache_table import print_cache_report
from machd.cli.configured_inspection import inspect_configured
from machd.cli.progress import EstimatingBar, ProgressBar
from machd.cli.recorded_requests import recorded_requests
from machd.compose import media_rules
from machd.engine.backend.blas import BlasChoice, measure_blas
from machd.engine.encoding.encoder_files import find_encoder
from machd.engine.front import OpenedFront, Texts
from machd.engine.loading.inspection import ModelInspection
from machd.engine.loading.source import ModelSource, resolve_model
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.media import Media
from machd.engine_process.scheduling import prefix_limits, prefix_shape
from machd.errors import UnsupportedParameterError
from machd.generations.decodings import decode_media
from machd.link.state import ServedState
from machd.request.constraint import Constraint
from machd.request.conversation import Conversation
from machd.request.generation import Grammar
from machd.request.media import media_of
from machd.settings.model import Settings
from machd.settings.sources import process_environ
from machd.user_directories import user_cache_directory
from machd_probes.evidence_store import EvidenceStore, weights_key
from machd_probes.versions import probe_basis


def check_cache(settings: Settings, file: Path, *, blas: BlasChoice, as_json: bool) -> None:
    """Print the report of the requests in a file.

    Raises:
        MachdError: The model cannot be served.
        UsageError: It generates nothing, or has no prefix cache.
        OSError: The file cannot be read.
    """
    with ProgressBar() as progress:
        progress.stage("reading the model's files", None)
        cache_directory = user_cache_directory(process_environ())
        source = resolve_model(
            settings.model.path,
            offline=settings.model.offline,
            cache_directory=cache_directory,
            progress=progress,
        )
        if find_encoder(source) is not None:
            raise click.UsageError(
                "--cache-report is for models that generate; this is an encoder."
            )
        found = inspect_configured(source, settings)
        state = _state(found.description, source, cache_directory, blas)
        texts = Texts(
            source,
            chat_template=settings.model.chat_template,
            trust_remote_code=False,  # a check runs no code of a checkpoint's
        )
    with closing(texts):
        report = _report(settings, found, state, texts, file)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        print_cache_report(report)


def _state(
    model: ModelDescription, source: ModelSource, cache_directory: Path, blas: BlasChoice
) -> ServedState:
    """Return the model with the results of its measurements that are kept."""
    assert model.code is not None, "a model that was built has code"
    named = measure_blas(blas).name if model.backend == "cpu" else None
    basis = probe_basis(backend=model.backend, blas=named, dtype=model.dtype)
    results = EvidenceStore(cache_directory, basis).find(
        model.architecture, model.code, weights_key(source)
    )
    return ServedState.of(replace(model, blas=named), results)


def _report(
    settings: Settings, found: ModelInspection, state: ServedState, texts: Texts, file: Path
) -> CacheReport:
    model = state.model
    verdict = state.verdicts.prefix_cache
    if not settings.cache.prefix:
        raise click.UsageError("--cache-report needs cache.prefix, which is off.")
    if verdict.support is not Support.SUPPORTED:
        raise click.UsageError(f"--cache-report: no prefix cache for this model: {verdict.reason}")
    available_bytes = max(0, found.available_bytes - model.weights_bytes - found.working_bytes)
    front = texts.front(model, _NoGrammars())
    reporter = CacheReporter(
        front,
        prefix_shape(settings.cache, model),
        prefix_limits(state, settings, available_bytes),
        is_shared=settings.cache.namespace == "shared",
        decode_media=_decoder(front, settings),
        rules=settings.cache.normalise,
    )
    with EstimatingBar(total=_count_lines(file)) as progress:
        for one in recorded_requests(file):
            reporter.add(one)
            progress.advance()
    return reporter.report()


def _count_lines(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _decoder(front: OpenedFront, settings: Settings) -> DecodeMedia:
    """Return what decodes a conversation's images and videos, as a daemon with these settings would."""
    rules, processor = media_rules(settings.vision), front.media

    def decode(conversation: Conversation) -> Mapping[int, Media]:
        media = media_of(conversation.messages)
        if not media:
            return {}
        if processor is None:
            raise UnsupportedParameterError("the model takes text only", param=media[0].param)
        return {id(one): decode_media(one, processor, rules, "") for one in media}

    return decode


class _NoGrammars:
    """Grammars for answers that are never generated."""

    def is_separate(self, _: Constraint) -> bool:
        """Return False."""
        return False

    def compile(self, _: Constraint, *, is_wanted: Callable[[], bool] = lambda: True) -> Grammar:
        """Compile nothing."""
        del is_wanted
        raise AssertionError("no answer is generated")
