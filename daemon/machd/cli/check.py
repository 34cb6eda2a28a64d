"""``machd check``: will this model run here, and how; or, what can which architecture do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from machd.capabilities.evidence import Results
from machd.capabilities.facts import CacheFacts
from machd.capabilities.verdict import Support
from machd.cli.check_document import ModelCheck, QualityReport
from machd.cli.options import SettingsCommand, models_argument, settings_options
from machd.cli.progress import ProgressBar
from machd.engine.backend.blas import BlasChoice, measure_blas
from machd.engine.backend.mlx_environment import set_mlx_environment
from machd.engine.encoding.encoder_files import EncoderFiles, find_encoder
from machd.engine.loading.source import ModelSource, resolve_model
from machd.engine.protocol.engine import Engine
from machd.settings.model import Settings
from machd.settings.sources import LoadedSettings, OriginKind, process_environ
from machd.user_directories import user_cache_directory

if TYPE_CHECKING:
    from machd.cli.check_encoder import EncoderCheck  # imports mlx

_HOLDS = 0
_HOLDS_NOT = 1


@click.command(cls=SettingsCommand)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--require",
    type=click.Choice(["batched"]),
    help="Exit with 1 unless continuous batching is supported.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Load the weights, run the checks on them, and keep the results.",
)
@click.option(
    "--all-archs", is_flag=True, help="Measure every architecture of mlx-lm, and encoders."
)
@click.option(
    "--arch", "archs", multiple=True, metavar="NAME", help="Measure this one; may be repeated."
)
@click.option(
    "--vision",
    is_flag=True,
    help="With --all-archs or --arch: measure mlx-vlm's families with images instead.",
)
@click.option(
    "--fits",
    is_flag=True,
    is_eager=True,
    help="Add up the memory of several models; exit with 1 unless they fit together.",
)
@click.option(
    "--cache-report",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Replay recorded requests in the prefix cache, and say what would save most tokens.",
)
@click.option("--no-cache", is_flag=True, help="Measure architectures anew, and keep nothing.")
@models_argument
@settings_options
@click.pass_context
def check(
    ctx: click.Context,
    loaded: LoadedSettings,
    *,
    models: tuple[str, ...],
    fits: bool,
    as_json: bool,
    require: str | None,
    measure: bool,
    all_archs: bool,
    archs: tuple[str, ...],
    vision: bool,
    cache_report: Path | None,
    no_cache: bool,
) -> None:
    """Check whether MODEL will run here, and how.

    Reads the configuration, the headers of the weights and the tokenizer, and loads nothing, unless
    --measure says so: then every check runs on the weights, and serve finds what they say. MODEL is what serve takes; without it the embedded default is checked. With
    the options of serve it answers for a daemon that is started with them.

    With --fits it says whether several models can be loaded at once: each MODEL is one of those that the settings name,
    or what serve takes; without any, all that the settings name are meant.

    With --cache-report it reads requests that were sent, a JSON object with path and body on each line, and looks their prompts up
    in the prefix cache one after the other, as a daemon with these settings would; no token is computed.

    With --all-archs or --arch it measures tiny models of mlx-lm's architectures and of encoders' families instead, and exits
    with 1 if a text has another vector in a batch than alone, or than the files say. With --vision too, it
    compares tiny models of mlx-vlm's families with mlx-vlm's own generation, and exits with 1 if one that is served
    with images answers otherwise.
    """
    is_model_given = loaded.origins["model.path"].kind is OriginKind.FLAG
    _refuse_conflicts(
        {
            "MODEL": is_model_given,
            "--fits": fits,
            "--measure": measure,
            "--cache-report": cache_report is not None,
            "--all-archs": all_archs,
            "--arch": bool(archs),
        },
        with_archs={"--no-cache": no_cache, "--vision": vision},
    )
    if all_archs or archs:
        exit_code = _architecture_check(has_images=vision)(
            archs or None,
            as_json=as_json,
            use_cache=not no_cache,
            require_batched=require is not None,
            blas=_chosen_blas(loaded.settings).for_other_processes,
        )
        ctx.exit(exit_code)
    if cache_report is not None:
        blas = _prepared_blas(loaded.settings)
        from machd.cli.check_cache import check_cache  # noqa: PLC0415 - imports mlx

        check_cache(loaded.settings, cache_report, blas=blas, as_json=as_json)
        return
    if fits:
        from machd.cli.check_fits import check_fits  # noqa: PLC0415 - a help text does not need it

        holds = check_fits(
            models,
            loaded.settings,
            check=lambda settings: _checked(replace(loaded, settings=settings), measure=False),
            as_json=as_json,
        )
        ctx.exit(_HOLDS if holds else _HOLDS_NOT)
    found = _checked(loaded, measure=measure)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    elif isinstance(found, ModelCheck):
        from machd.cli.check_table import print_check  # noqa: PLC0415 - a table is not always wanted

        print_check(found)
    else:
        from machd.cli.check_encoder import print_encoder_check  # noqa: PLC0415 - imports mlx

        print_encoder_check(found)
    ctx.exit(_HOLDS if require is None or _is_batched(found) else _HOLDS_NOT)


def _architecture_check(*, has_images: bool) -> Callable[..., int]:
    if has_images:
        from machd_probes.vision_matrix.command import check_families  # noqa: PLC0415 - only here

        return check_families
    from machd_probes.command import check_architectures  # noqa: PLC0415 - only here

    return check_architectures


def _refuse_conflicts(given: dict[str, bool], *, with_archs: dict[str, bool]) -> None:
    """Raise UsageError where options about one model and about architectures are mixed."""
    ways = [name for name in ("--fits", "--measure", "--cache-report") if given[name]]
    if len(ways) > 1:
        raise click.UsageError(f"{ways[0]} and {ways[1]} do not go together.")
    of_model = [name for name in ("MODEL", *ways) if given[name]]
    of_archs = [name for name in ("--all-archs", "--arch") if given[name]]
    if of_archs and (of_model or len(of_archs) > 1):
        first, second = (*of_model, *of_archs)[:2]
        raise click.UsageError(f"{first} and {second} do not go together.")
    for option in (name for name, is_given in with_archs.items() if is_given and not of_archs):
        raise click.UsageError(f"{option} goes with --all-archs or --arch.")


def _chosen_blas(settings: Settings) -> BlasChoice:
    """Load the library that serve would choose; call it before anything imports mlx."""
    from machd.engine.open import choose_checked_blas  # noqa: PLC0415 - a help text does not need it

    return choose_checked_blas(
        settings.engine.blas,
        cache_directory=user_cache_directory(process_environ()),
        environ=os.environ,  # noqa: TID251 - libraries read theirs by themselves
    )


def _prepared_blas(settings: Settings) -> BlasChoice:
    """Prepare the process for mlx as serve does; call it before anything imports mlx."""
    blas = _chosen_blas(settings)
    cache_directory = user_cache_directory(process_environ())
    set_mlx_environment(os.environ, cache_directory)  # noqa: TID251 - mlx reads its own by itself
    return blas


def _checked(loaded: LoadedSettings, *, measure: bool) -> ModelCheck | EncoderCheck:
    settings = loaded.settings

    cache_directory = user_cache_directory(process_environ())
    blas = _prepared_blas(settings)
    with ProgressBar() as progress:
        progress.stage("reading the model's files", None)
        source = resolve_model(
            settings.model.path,
            offline=settings.model.offline,
            cache_directory=cache_directory,
            progress=progress,
        )
        encoder = find_encoder(source)
        if encoder is not None:
            if measure:
                raise click.UsageError("--measure is for models that generate; this is an encoder.")
            return _checked_encoder(encoder, source, settings.model.dtype, blas)
        from machd.cli.check_report import model_check  # noqa: PLC0415 - imports mlx
        from machd.cli.configured_inspection import (  # noqa: PLC0415 - imports mlx
            inspect_configured,
        )
        from machd.engine.loading.reranker_inspection import (  # noqa: PLC0415 - imports mlx
            inspect_reranker,
            names_reranker,
        )
        from machd_probes.evidence_store import (  # noqa: PLC0415 - parses the matrix
            EvidenceStore,
            weights_key,
        )
        from machd_probes.versions import probe_basis  # noqa: PLC0415

        is_reranker = names_reranker(source, kind=settings.model.kind)
        found = inspect_configured(source, settings, has_tokenizers=measure or is_reranker)
        reranker = None
        if is_reranker:
            reranker = inspect_reranker(
                source, kind=settings.model.kind, chat_template=settings.model.chat_template
            )
        model = replace(
            found.description,
            blas=measure_blas(blas).name if found.description.backend == "cpu" else None,
            blas_refused=tuple(map(str, blas.refused)),
            kv_format=settings.cache.kv_quantization,
        )
        assert model.code is not None, "a model that was built has code"
        basis = probe_basis(backend=model.backend, blas=model.blas, dtype=model.dtype)
        results: Results = EvidenceStore(cache_directory, basis).find(
            model.architecture, model.code, weights_key(source)
        )
        quality: QualityReport | None = None
        if measure:
            measured = _measured(loaded, source, progress, blas)
            # What was measured is judged with the caches that it was measured on.
            model, results = replace(model, cache=measured.cache), measured.results
            if measured.perplexity is not None:
                quality = _quality(loaded, source, measured.perplexity, progress, blas)
    return model_check(
        replace(found, description=model),
        results,
        kv_budget_gb=settings.continuous_batching.kv_budget_gb,
        quality=quality,
        reranker=reranker,
    )


def _checked_encoder(
    files: EncoderFiles, source: ModelSource, dtype: str, blas: BlasChoice
) -> EncoderCheck:
    from machd.cli.check_encoder import encoder_check  # noqa: PLC0415 - imports mlx
    from machd.engine.encoding.inspection import inspect_encoder  # noqa: PLC0415 - imports mlx

    found = inspect_encoder(files, model_id=source.model_id, dtype=dtype)
    name = measure_blas(blas).name if found.description.backend == "cpu" else None
    return encoder_check(replace(found, description=replace(found.description, blas=name)))


@dataclass(frozen=True, slots=True)
class _Measured:
    """Facts that need the loaded model.

    Attributes:
        results: Results of every check on its weights.
        perplexity: Perplexity of the bench's fixed text; None without ``model.quantize``.
    """

    cache: CacheFacts
    results: Results
    perplexity: float | None


def _measured(
    loaded: LoadedSettings, source: ModelSource, progress: ProgressBar, blas: BlasChoice
) -> _Measured:
    """Load the model as serve does, and run every check on it; the results are kept for a daemon."""
    # Imported here, because without --measure they would be a tenth of the time.
    from machd_probes.model_probe import ModelProbe  # noqa: PLC0415

    with _loaded_engine(loaded.settings, source, progress, blas) as engine:
        progress.stage("measuring", None)
        cache_directory = user_cache_directory(process_environ())
        probe = ModelProbe(
            cache_directory,
            model_path=loaded.settings.model.path,
            blas=blas.for_other_processes,
        )
        results = probe.measure_weights(engine, anew=True)
        assert results is not None, "a model in memory has code"
        is_quantised = loaded.settings.model.quantize is not None
        return _Measured(engine.model.cache, results, _perplexity(engine) if is_quantised else None)


def _quality(
    loaded: LoadedSettings,
    source: ModelSource,
    perplexity: float,
    progress: ProgressBar,
    blas: BlasChoice,
) -> QualityReport:
    """Compare a quantised model's perplexity with that of the model without ``model.quantize``."""
    plain = loaded.settings.model.model_copy(update={"quantize": None})
    settings = loaded.settings.model_copy(update={"model": plain})
    with _loaded_engine(settings, source, progress, blas) as engine:
        progress.stage("measuring", None)
        unquantised = _perplexity(engine)
    return QualityReport(perplexity=perplexity, unquantised_perplexity=unquantised)


def _perplexity(engine: Engine) -> float:
    from machd.engine.loading.perplexity import perplexity  # noqa: PLC0415 - imports mlx
    from machd.engine.step.mlx_engine import MlxEngine  # noqa: PLC0415 - imports mlx
    from machd_bench.perplexity_text import perplexity_text  # noqa: PLC0415

    assert isinstance(engine, MlxEngine), "a model that was loaded"
    return perplexity(engine.module, engine.tokenizer, perplexity_text())


@contextmanager
def _loaded_engine(
    settings: Settings, source: ModelSource, progress: ProgressBar, blas: BlasChoice
) -> Iterator[Engine]:
    """Load a model as serve does, without a disk tier, which is a daemon's alone."""
    from machd.engine.open import engine_loader  # noqa: PLC0415
    from machd.telemetry.logs import configure_logs  # noqa: PLC0415

    # Standard output is the answer's; what loading has to say is not part of it.
    configure_logs(level="warning", log_format=settings.logging.format)
    cache = settings.cache.model_copy(update={"disk_dir": None})
    load = engine_loader(
        settings.model_copy(update={"cache": cache}),
        cache_directory=user_cache_directory(process_environ()),
        environ=os.environ,  # noqa: TID251 - libraries read theirs by themselves
        progress=progress,
        blas=blas,
    )
    engine = load(source)
    try:
        yield engine
    finally:
        engine.close()


def _is_batched(found: ModelCheck | EncoderCheck) -> bool:
    verdict = found.continuous_batching if isinstance(found, ModelCheck) else None
    return verdict is not None and verdict.support is Support.SUPPORTED
