"""Looks up or measures what the loaded model can do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlx.nn.layers.base import Module

from machd.capabilities.evidence import MeasuredOn, Outcome, ProbeResult
from machd.clock import Clock, SystemClock
from machd.engine.backend.model_files import read_object
from machd.engine.loading.formats.gguf.header import read_gguf_header
from machd.engine.loading.formats.gguf.reading import gguf_config
from machd.engine.loading.source import ModelSource, SourceKind, resolve_model
from machd.engine.protocol.engine import Engine, ModelDescription
from machd.engine.step.mlx_engine import MlxEngine
from machd.errors import MachdError
from machd_probes.bounded import Deadline
from machd_probes.catalogue import BATCHING_CHECKS, FEATURE_CHECKS, STAND_IN_CHECKS
from machd_probes.evidence_store import EvidenceStore, weights_key
from machd_probes.prober import loaded_subject, run_check
from machd_probes.runner import WORKER_COMMAND
from machd_probes.stand_in_process import StandInProcess
from machd_probes.versions import probe_basis
from machd_probes.worker_messages import BLAS_VARIABLE, StandInOrder

_START_S = 6.0
"""For a stand-in, while the daemon starts: the process takes two, a check less than one."""

_WEIGHTS_S = 30.0
"""A model of some hundred million parameters takes a third of it on two cores."""

_COMPILING_WEIGHTS_S = 180.0
"""The same on a GPU, where mlx compiles each kernel that it meets for the first time in up to 3 s."""


class ModelProbe:
    """Evidence on one loaded model. Lives on the engine thread, while the engine has no rows."""

    def __init__(
        self,
        cache_directory: Path,
        *,
        model_path: str | None = None,
        blas: str | None = None,
        environ: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        worker_command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        """Look at nothing yet.

        Args:
            cache_directory: The user's cache directory.
            model_path: ``model.path``; None for the embedded default.
            blas: ``engine.blas`` for the process that measures a stand-in, which has to compute with
                the library of this process; what the environment says unless given.
            environ: Of the process that measures a stand-in; this one's unless given.
            clock: Reads time; the machine's unless given.
            worker_command: Starts that process.
        """
        self._cache_directory = cache_directory
        self._model_path = model_path
        self._environ = dict(os.environ if environ is None else environ)  # noqa: TID251 - for a child
        if blas is not None:
            self._environ[BLAS_VARIABLE] = blas
        self._clock = clock or SystemClock()
        self._worker_command = worker_command
        self._store: EvidenceStore | None = None
        self._module: Module | None = None
        self._stand_in: StandInProcess | None = None
        self._started_unix_s = 0.0
        self._is_over = False

    def recall(self, engine: Engine) -> tuple[ProbeResult, ...] | None:
        """Return the stored evidence on the model; None for an engine without model code."""
        model = engine.model
        if isinstance(engine, MlxEngine):
            self._module = engine.module  # later it may be behind another engine
        if model.code is None:
            return None
        return self._stored(model).find(model.architecture, model.code, self._weights_key())

    def measure(self, engine: Engine) -> tuple[ProbeResult, ...] | None:
        """Return the stored evidence, after measuring a small model of the same code if batching needs it.

        If no small model can be built, the loaded one is measured.
        """
        known = self.recall(engine)
        if known is None or self._is_batching_known(known):
            return known
        self._start(engine.model, known)
        if self._stand_in is None or not self._stand_in.has_measured(
            BATCHING_CHECKS[-1], within_s=_START_S
        ):
            return self.measure_weights(engine)
        return self._known_by_now(engine)

    @property
    def is_measuring(self) -> bool:
        """Return whether a worker process is measuring."""
        return self._stand_in is not None and self._stand_in.is_running

    def measure_next(self, engine: Engine) -> tuple[ProbeResult, ...] | None:
        """Return the evidence known by now; None when the worker has finished. Does not block."""
        known = self.recall(engine)
        if known is None or self._is_over:
            return None
        if self._stand_in is None:
            self._start(engine.model, known)
        if self._stand_in is None:
            self._is_over = True
            return None
        # Asked before what it found is looked up, so that its last result is not missed.
        self._is_over = not self.is_measuring
        return self._known_by_now(engine)

    def measure_weights(
        self, engine: Engine, *, anew: bool = False
    ) -> tuple[ProbeResult, ...] | None:
        """Run every check on the loaded model, or return what an earlier run found.

        Bounded in time; checks that do not finish have no data.

        Args:
            engine: What serves.
            anew: Whether what was measured before does not count.
        """
        known = self.recall(engine)
        if known is None:
            return None
        if not anew and any(one.measured_on is MeasuredOn.WEIGHTS for one in known):
            return known
        subject = loaded_subject(engine, self._module)
        is_cpu = engine.model.backend == "cpu"
        max_s = _WEIGHTS_S if is_cpu else _COMPILING_WEIGHTS_S
        subject.watch = Deadline(self._clock, max_s=max_s)
        results = tuple(
            run_check(subject, name, self._clock, measured_on=MeasuredOn.WEIGHTS)
            for name in FEATURE_CHECKS
            if name in BATCHING_CHECKS or self._module is not None
        )
        self._stored(engine.model).keep_weights(self._weights_key(), results)
        return self.recall(engine)

    def close(self) -> None:
        """Stop the worker."""
        if self._stand_in is not None:
            self._stand_in.close()

    def _known_by_now(self, engine: Engine) -> tuple[ProbeResult, ...] | None:
        """Return the stored evidence, and what is being measured before a batch may be computed.

        While batching waits for the worker, the worker has the share of the processor that any process
        has; a busy daemon would let it starve. After that it yields to requests.
        """
        known = self.recall(engine)
        if known is None or self._stand_in is None:
            return known
        if self._is_batching_known(known):
            self._stand_in.yield_to_requests()
            return known
        if not self._stand_in.is_running:
            return known
        since = f"running since {datetime.fromtimestamp(self._started_unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
        measuring = _open(known, BATCHING_CHECKS)
        return (*known, *(ProbeResult(one, Outcome.MEASURING, since) for one in measuring))

    def _is_batching_known(self, known: tuple[ProbeResult, ...]) -> bool:
        return not _open(known, BATCHING_CHECKS)

    def _start(self, model: ModelDescription, known: tuple[ProbeResult, ...]) -> None:
        """Start a worker for the checks without a result of this machine, if there are any."""
        here = (one for one in known if one.measured_on is not MeasuredOn.SHIPPED_OTHER_BLAS)
        checks = _open(here, STAND_IN_CHECKS)
        config = self._config() or {}
        if not checks:
            return
        assert model.code is not None, "a model in memory has code"
        own = config.get("model_file")
        source = self._source()
        order = StandInOrder(
            architecture=model.architecture,
            config=config,
            model_file=str(source.path / own) if source is not None and own else None,
            dtype=model.dtype,
            code=model.code,
            checks=checks,
        )
        architecture, code, store = model.architecture, model.code, self._stored(model)
        self._started_unix_s = self._clock.unix_s()
        with contextlib.suppress(OSError):
            self._stand_in = StandInProcess(
                order,
                self._environ,
                lambda result: store.keep_stand_in(architecture, code, [result]),
                command=self._worker_command,
            )

    def _stored(self, model: ModelDescription) -> EvidenceStore:
        if self._store is None:
            basis = probe_basis(backend=model.backend, blas=model.blas, dtype=model.dtype)
            self._store = EvidenceStore(self._cache_directory, basis)
        return self._store

    def _source(self) -> ModelSource | None:
        try:
            # It has just been loaded from there: nothing is left to fetch.
            return resolve_model(
                self._model_path, offline=True, cache_directory=self._cache_directory
            )
        except (MachdError, OSError):
            return None

    def _weights_key(self) -> str:
        source = self._source()
        return "" if source is None else weights_key(source)

    def _config(self) -> dict[str, Any] | None:
        source = self._source()
        try:
            if source is None:
                return None
            if source.kind is SourceKind.GGUF:
                return gguf_config(read_gguf_header(source.path))
            return read_object(source.path / "config.json")
        except MachdError:
            return None


def _open(known: Iterable[ProbeResult], checks: Sequence[str]) -> tuple[str, ...]:
    """Return those of the checks that have no result, in their order.

    A check without data on the weights (no time, window too wide) may succeed on a small model.
    """
    done = {
        one.probe
        for one in known
        if one.outcome is not Outcome.NO_DATA or one.measured_on is not MeasuredOn.WEIGHTS
    }
    return tuple(name for name in checks if name not in done)
