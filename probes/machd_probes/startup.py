"""Gives the daemon the functions that measure its model. Imports neither mlx nor mlx-lm."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from machd.capabilities.evidence import Results
from machd.engine.protocol.engine import Engine
from machd.engine_process.startup_guard import Measure, Measures

if TYPE_CHECKING:
    from machd_probes.model_probe import ModelProbe


def startup_measures(
    cache_directory: Path,
    *,
    model_path: str | None = None,
    blas: str | None = None,
    on_measure: Callable[[], object] = lambda: None,
) -> Measures:
    """Give what finds out about the loaded model; it imports mlx when it is first called.

    Args:
        cache_directory: The user's cache directory.
        model_path: ``model.path``; None for the embedded default.
        blas: As of :class:`machd_probes.model_probe.ModelProbe`.
        on_measure: Called before the start's measurement begins.
    """

    @cache
    def probe() -> ModelProbe:
        # After the engine was loaded: mlx is to be imported when its BLAS is chosen.
        from machd_probes.model_probe import ModelProbe  # noqa: PLC0415

        return ModelProbe(cache_directory, model_path=model_path, blas=blas)

    def announced(measure: Measure) -> Measure:
        def announce(engine: Engine) -> Results:
            on_measure()
            return measure(engine)

        return announce

    return Measures(
        recall=lambda engine: probe().recall(engine),
        measure=announced(lambda engine: probe().measure(engine)),
        measure_weights=announced(lambda engine: probe().measure_weights(engine)),
        measure_anew=lambda engine: probe().measure_weights(engine, anew=True),
        measure_next=lambda engine: probe().measure_next(engine),
    )
