"""From settings to a loaded engine, in the one order that works.

The BLAS and the scratch directory must be settled before anything imports mlx, and mlx-lm must be
imported with care; everything that computes then happens on the thread that loads.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import structlog

from machd.clock import SystemClock
from machd.engine.backend.blas import BlasChoice, BlasReport, choose_blas, measure_blas
from machd.engine.backend.blas_check import check_products
from machd.engine.backend.blas_kept_checks import KeptChecks, conditions_key
from machd.engine.backend.cpu_threads import thread_variables
from machd.engine.backend.mlx_environment import set_mlx_environment
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.encoding.encoder_files import EncoderFiles
from machd.engine.loading.generation_config import read_default_sampling
from machd.engine.loading.reranker import read_reranker
from machd.engine.loading.source import ModelSource
from machd.engine.prefix_blocks.directory import check_block_directory
from machd.engine.protocol.encoder import Encoder
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.progress import LoadProgress
from machd.engine.ranks.joining import RankPlace, join, refuse_with_ranks
from machd.errors import SettingsError
from machd.heap import map_large_arrays
from machd.settings.model import Settings

WaitForMemory: TypeAlias = "Callable[[MemoryNeeds, int], None]"
"""Called with what a model needs, but for a KV budget, and what the device can hold; returns once the model may be put
into memory."""

if TYPE_CHECKING:
    from machd.capabilities.fit import MemoryNeeds
    from machd.engine.experts.residency import Residency  # imports mlx
    from machd.engine.loading.loader import LoadedModel, MemoryShare  # imports mlx
    from machd.engine.ranks.rank_group import RankGroup  # imports mlx
    from machd.engine.step.mlx_engine import MlxEngine  # imports mlx
    from machd.engine.step.ports import Proposer


def choose_checked_blas(
    choice: str, *, cache_directory: Path, environ: MutableMapping[str, str]
) -> BlasChoice:
    """Bound the threads of matrix libraries, then load one. Call it before mlx is imported.

    A library's products are checked first; one that multiplies wrongly is not loaded. Checks are kept, so that
    later starts take some milliseconds.

    Raises:
        StartupError: The library asked for cannot be loaded, or multiplies wrongly.
    """
    threads = thread_variables(environ) if sys.platform == "linux" else {}
    environ.update(threads)
    kept = KeptChecks(cache_directory)

    def check(library: str) -> str | None:
        key = conditions_key(library, environ)
        found = kept.find(key)
        if found is None:
            found = check_products(library, environ)
            kept.keep(key, found)
        return found.problem

    return choose_blas(choice, environ=environ, check=check)


def engine_loader(  # noqa: PLR0913 - one argument for each thing that differs between its callers
    settings: Settings,
    *,
    cache_directory: Path,
    environ: MutableMapping[str, str],
    progress: LoadProgress,
    blas: BlasChoice | None = None,
    place: RankPlace | None = None,
    wait_for_memory: WaitForMemory | None = None,
) -> Callable[[ModelSource], Engine]:
    """Prepare the process for mlx, then give the function that loads the model of these files.

    Chooses the private scratch directory now, and the BLAS, unchecked, unless it is given: both must be
    settled before anything imports mlx; the function imports it, on the thread that calls it. ``wait_for_memory`` is given
    for a model among others.

    Raises:
        StartupError: The BLAS asked for cannot be loaded, or the scratch directory is not private.
        SettingsError: The directory for blocks cannot be used, or ranks cannot do what is asked.
    """
    block_directory = _block_directory(settings)
    if settings.cache.disk_dir and not settings.cache.prefix:
        structlog.get_logger("machd.engine").warning(
            "blocks.not_used",
            advice="turn cache.prefix on, or leave cache.disk_dir out and delete what it holds",
        )
    if block_directory is not None:
        check_block_directory(block_directory)
    prepared = _prepared(
        settings,
        cache_directory,
        environ,
        progress,
        blas or choose_blas(settings.engine.blas),
        place,
        wait_for_memory=wait_for_memory,
    )

    def load(source: ModelSource) -> Engine:
        group, loaded = prepared(source)
        from machd.engine.sampling.draft_sampling import RowDraws  # noqa: PLC0415 - imports mlx
        from machd.engine.speculation.choice import choose_proposer  # noqa: PLC0415 - imports mlx

        vocabulary_tokens = loaded.description.vocabulary_tokens
        proposing = choose_proposer(
            settings,
            loaded,
            open_draws=functools.partial(RowDraws, vocabulary_tokens=vocabulary_tokens),
            cache_directory=cache_directory,
            progress=progress,
        )
        description = replace(loaded.description, proposer_reason=proposing.reason)
        loaded = replace(loaded, description=description)
        if group is None:
            return _engine(loaded, settings, block_directory, proposing.proposer)
        from machd.engine.ranks.leading_engine import LeadingEngine  # noqa: PLC0415 - imports mlx

        shard = _shard_engine(loaded, settings, group, proposing.proposer)
        return LeadingEngine(shard, group, SystemClock().unix_s)

    return load


def encoder_loader(  # noqa: PLR0913 - as of engine_loader
    settings: Settings,
    files: EncoderFiles,
    *,
    cache_directory: Path,
    environ: MutableMapping[str, str],
    progress: LoadProgress,
    blas: BlasChoice,
    wait_for_memory: WaitForMemory | None = None,
) -> Callable[[str], Encoder]:
    """Prepare the process for mlx, then give the function that loads the encoder of these files under a name.

    Raises:
        StartupError: The scratch directory is not private.
    """
    set_mlx_environment(environ, cache_directory)

    def load(model_id: str) -> Encoder:
        report = _import_mlx(blas, progress)
        from machd.engine.encoding.loading import load_encoder  # noqa: PLC0415 - imports mlx

        return load_encoder(
            files,
            model_id=model_id,
            dtype=settings.model.dtype,
            blas=report.name,
            blas_refused=tuple(map(str, blas.refused)),
            progress=progress,
            share=None if wait_for_memory is None else _memory_share(settings, wait_for_memory),
        )

    return load


def follower(
    settings: Settings,
    *,
    cache_directory: Path,
    environ: MutableMapping[str, str],
    progress: LoadProgress,
    place: RankPlace,
    blas: BlasChoice | None = None,
) -> Callable[[ModelSource, Callable[[], None]], None]:
    """Prepare the process for mlx, then give the function that loads a shard and follows rank 0 to its end.

    It takes the model's files, and what is to be called at each order of rank 0; see :func:`machd.engine.ranks.following.follow`.

    Raises:
        StartupError: The BLAS asked for cannot be loaded, or the scratch directory is not private.
        SettingsError: Ranks cannot do what is asked.
    """
    blas = blas or choose_blas(settings.engine.blas)
    prepared = _prepared(settings, cache_directory, environ, progress, blas, place)

    def run(source: ModelSource, on_order: Callable[[], None]) -> None:
        group, loaded = prepared(source)
        assert group is not None, "a rank that follows is not alone"
        from machd.engine.ranks.following import follow  # noqa: PLC0415 - imports mlx

        engine = _shard_engine(loaded, settings, group, None)
        try:
            follow(engine, group, on_order)
        finally:
            engine.close()

    return run


def _prepared(  # noqa: PLR0913 - as of engine_loader
    settings: Settings,
    cache_directory: Path,
    environ: MutableMapping[str, str],
    progress: LoadProgress,
    choice: BlasChoice,
    place: RankPlace | None,
    *,
    wait_for_memory: WaitForMemory | None = None,
) -> Callable[[ModelSource], tuple[RankGroup | None, LoadedModel]]:
    """Prepare the process for mlx; gives what joins the other ranks, if there are any, and loads the model."""
    if place is not None:
        refuse_with_ranks(settings)
    set_mlx_environment(environ, cache_directory)

    def load(source: ModelSource) -> tuple[RankGroup | None, LoadedModel]:
        model = settings.model
        report = _import_mlx(choice, progress)
        from machd.engine.kv.formats import kv_format_named  # noqa: PLC0415 - imports mlx
        from machd.engine.loading.loader import load_model  # noqa: PLC0415 - imports mlx
        from machd.engine.loading.placing.sharding import Sharding  # noqa: PLC0415 - imports mlx
        from machd.engine.ranks.shared_loading import SharedLoading  # noqa: PLC0415 - imports mlx

        log = structlog.get_logger("machd.engine")
        group = None if place is None else _joined(place, settings, source, progress)
        shared = None if group is None else SharedLoading(group, progress)
        load_shard = functools.partial(
            load_model,
            source,
            dtype=model.dtype,
            max_context_tokens=model.max_context_tokens,
            trust_remote_code=model.trust_remote_code,
            chat_template=model.chat_template,
            progress=shared or progress,
            blas=report.name,
            kv_format=kv_format_named(settings.cache.kv_quantization),
            residency=residency(settings),
            quantize=model.quantize,
            media_bytes=settings.vision.cache_mb * 1_000_000 // 2,
            sharding=None if group is None else Sharding(group.group, settings.distributed.mode),
            share=None if wait_for_memory is None else _memory_share(settings, wait_for_memory),
        )
        loaded = load_shard() if shared is None else shared.load(load_shard)
        refused = tuple(map(str, choice.refused))
        sampling, left_out = read_default_sampling(source, model.generation_config)
        reranker, reranker_notes = read_reranker(source, loaded.tokenizer, kind=model.kind)
        described = replace(
            loaded.description,
            blas_refused=refused,
            default_sampling=sampling,
            reranker=reranker,
            kv_format=settings.cache.kv_quantization,
        )
        loaded = replace(loaded, description=described)
        _log_experts(loaded)
        notes = (*loaded.notes, *left_out, *reranker_notes, *loaded.tokenizer.template_notes())
        for note in notes:
            log.warning("model.note", note=note)
        return group, loaded

    return load


def _import_mlx(choice: BlasChoice, progress: LoadProgress) -> BlasReport:
    """Import mlx-lm, and with it mlx, in a process that is prepared; log what multiplies matrices."""
    progress.stage("importing mlx-lm", None)
    import_mlx_lm()
    import mlx.core as mx  # noqa: PLC0415 - after the BLAS is chosen

    from machd.engine.backend.device import has_process_limit  # noqa: PLC0415 - imports mlx

    report = _logged_blas(choice)
    if has_process_limit():
        map_large_arrays()
    if report.backend == "cpu":
        # Compiled pieces are no faster there (a SwiGLU of 16 rows: 0.48 ms, plain 0.33), and
        # they would need a C++ compiler while the daemon runs.
        mx.disable_compile()
    return report


def _memory_share(settings: Settings, wait_for_memory: WaitForMemory) -> MemoryShare:
    """Return how a model gets its memory among others: weights may take all of their budget."""
    from machd.engine.backend.device import device_memory_bytes  # noqa: PLC0415 - imports mlx
    from machd.engine.loading.loader import MemoryShare  # noqa: PLC0415 - imports mlx

    memory_gb, device_bytes = settings.models.memory_gb, device_memory_bytes()
    return MemoryShare(
        limit_bytes=device_bytes if memory_gb == "auto" else round(memory_gb * 1e9),
        wait=lambda needs: wait_for_memory(needs, device_bytes),
    )


def _logged_blas(choice: BlasChoice) -> BlasReport:
    """Log what multiplies matrices, and what would make it faster."""
    from machd.engine.backend.native_kernels import missing_kernels_advice  # noqa: PLC0415 - imports mlx

    log = structlog.get_logger("machd.engine")
    report = measure_blas(choice)
    log.info(
        "blas.measured",
        backend=report.backend,
        library=report.name,
        one_row_ms=_rounded(report.one_row_ms),
        sixteen_rows_ms=_rounded(report.sixteen_rows_ms),
        reason=choice.reason,
    )
    for one in choice.refused:
        log.warning("blas.refused", library=one.library, reason=one.reason)
    if report.advice:
        log.warning("blas.slow", advice=report.advice)
    kernels_advice = missing_kernels_advice()
    if kernels_advice:
        log.warning("kernels.missing", advice=kernels_advice)
    return report


def _joined(
    place: RankPlace, settings: Settings, source: ModelSource, progress: LoadProgress
) -> RankGroup | None:
    """Join the other ranks, and compare what all have to have in common; None if there is no other."""
    from machd.engine.ranks.sameness import check_same, common_facts  # noqa: PLC0415 - imports mlx

    progress.stage(f"rank {place.rank}: waiting for the others", None)
    group = join(place)
    if group is not None:
        check_same(group, common_facts(settings, source))
        structlog.get_logger("machd.engine").info(
            "ranks.joined", rank=group.rank, ranks=group.size, backend=place.backend
        )
    return group


def _shard_engine(
    loaded: LoadedModel, settings: Settings, group: RankGroup, proposer: Proposer | None
) -> MlxEngine:
    """Make the engine of one rank, after the ranks have compared what they loaded."""
    from machd.engine.assembly import make_engine  # noqa: PLC0415 - imports mlx
    from machd.engine.ranks.deciding import decider_of  # noqa: PLC0415 - imports mlx
    from machd.engine.ranks.sameness import check_same, shard_facts  # noqa: PLC0415 - imports mlx

    check_same(group, shard_facts(loaded.description))
    return make_engine(
        loaded,
        max_rows=settings.continuous_batching.max_b,
        leaves_blocks=settings.cache.prefix,
        proposer=proposer,
        decider=decider_of(group),
    )


def _engine(
    loaded: LoadedModel,
    settings: Settings,
    block_directory: Path | None,
    proposer: Proposer | None = None,
) -> Engine:
    from machd.engine.adapters.residency import AdapterLimits  # noqa: PLC0415 - with the rest
    from machd.engine.assembly import make_engine  # noqa: PLC0415 - imports mlx
    from machd.engine.prefix_blocks.disk_tier import DiskTier  # noqa: PLC0415 - only where there is a directory
    from machd.engine.prefix_blocks.key import block_key  # noqa: PLC0415 - imports mlx

    section = settings.adapters
    pinned = frozenset(name for name, one in section.tables.items() if one.pin)
    open_engine = functools.partial(
        make_engine,
        loaded,
        max_rows=settings.continuous_batching.max_b,
        proposer=proposer,
        adapters=AdapterLimits(section.max_loaded, pinned),
    )
    if block_directory is None:
        return open_engine(leaves_blocks=settings.cache.prefix)
    budget_bytes = int(settings.cache.disk_budget_gb * 1e9)
    disk_tier = DiskTier(block_directory, block_key(loaded), budget_bytes=budget_bytes)
    try:
        return open_engine(disk_tier=disk_tier)
    except BaseException:
        disk_tier.close(within_s=0)
        raise


def _log_experts(loaded: LoadedModel) -> None:
    if loaded.experts is None:
        return
    reading = loaded.experts.reading()
    structlog.get_logger("machd.engine").info(
        "experts.on_disk",
        capacity_bytes=reading.capacity_bytes,
        in_memory=reading.entries,
        experts=sum(layer.experts for layer in loaded.experts.bank.layers),
    )


def residency(settings: Settings) -> Residency | None:
    """Return the memory for experts; None to keep the whole model in memory."""
    from machd.engine.experts.residency import Residency  # noqa: PLC0415 - imports mlx

    resident_gb = settings.experts.resident_gb
    if resident_gb is None:
        return None
    kv_budget_bytes = int(settings.continuous_batching.kv_budget_gb * 1e9)
    return Residency("auto" if resident_gb == "auto" else int(resident_gb * 1e9), kv_budget_bytes)


def _block_directory(settings: Settings) -> Path | None:
    cache = settings.cache
    if not cache.prefix or not cache.disk_dir:
        return None
    try:
        return Path(cache.disk_dir).expanduser()
    except RuntimeError as error:  # of a user without a home
        raise SettingsError([f"cache.disk_dir: {error}"]) from None


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 2)
