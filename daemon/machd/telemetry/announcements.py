"""What holds for a served model, exported as metrics and logged: capabilities, decode mode, speculation."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from msgspec import UnsetType, structs
from structlog.stdlib import BoundLogger

from machd.capabilities.evidence import Evidence
from machd.capabilities.verdict import Verdict
from machd.capabilities.verdicts import ModelVerdicts
from machd.engine.protocol.encoder import EncoderDescription
from machd.engine.protocol.step import ProposerKind
from machd.link.decode_mode import DecodeModeDecision
from machd.link.kv_memory import asked_budget_bytes, effective_budget_bytes
from machd.link.speculation_mode import SpeculationDecision
from machd.scheduler.events import DecodeMode
from machd.served.served_model import ServedModel
from machd.settings.model import Settings
from machd.telemetry.gauges import watch_ranks
from machd.telemetry.model_metrics import ModelMetrics


class Announcements:
    """Tells what holds for one served model. Lives on the event loop."""

    def __init__(
        self,
        served: ServedModel,
        settings: Callable[[], Settings],
        metrics: ModelMetrics,
        on_verdict: Callable[[str, Verdict], None],
    ) -> None:
        """Tell nothing yet.

        Args:
            served: The model.
            settings: Reads those in force for the model.
            metrics: Where it is exported.
            on_verdict: Told of a feature whose verdict has changed.
        """
        self._served = served
        self._settings = settings
        self._metrics = metrics
        self._on_verdict = on_verdict
        self._announced: dict[str, Verdict] = {}

    def announce(self) -> DecodeModeDecision | None:
        """Export and log what holds now; returns the decode mode, or None for a model that generates no text."""
        model, verdicts = self._served.model, self._served.verdicts
        self._metrics.name_model(model.model_id)
        self._metrics.set_info(
            "machd_model_info",
            architecture=model.architecture,
            kv_cache_kind=model.cache.kind.value,
            dtype=model.dtype,
            backend=model.backend,
        )
        self._export(verdicts)
        if model.encoder is not None:
            _log_encoder(structlog.get_logger("machd.daemon", model=model.model_id), model.encoder)
            return None
        decision, speculation = self._served.decode_mode, self._served.speculation
        watch_ranks(self._metrics, self._served)
        self._metrics.watch_one_of(
            "machd_speculation_mode", "mode", list(ProposerKind), lambda: speculation.active
        )
        log = structlog.get_logger("machd.scheduler", model=model.model_id)
        _log_decision(log, decision, verdicts.continuous_batching)
        _log_speculation(log, speculation)
        if decision.active is DecodeMode.BATCHED:
            asked_gb = self._settings().continuous_batching.kv_budget_gb
            _log_budget(log, asked_gb, model.device_memory_bytes)
        return decision

    def announce_changes(self, changed: frozenset[str]) -> None:
        """Export the verdicts; log those that changed, and send them to watchers."""
        verdicts = self._served.verdicts
        if not changed:
            self._export(verdicts)
            return
        before = self._announced
        log = structlog.get_logger("machd.probe", model=self._served.model.model_id)
        for feature, verdict in verdicts.by_feature().items():
            if feature in changed:
                log.info(
                    "capability.changed",
                    feature=feature,
                    verdict=verdict.support.value,
                    previous=before[feature].support.value,
                    reason=verdict.reason,
                )
                self._on_verdict(feature, verdict)
        self.announce()

    def _export(self, verdicts: ModelVerdicts) -> None:
        self._announced = verdicts.by_feature()
        self._metrics.forget("machd_capability_info")
        for feature, verdict in verdicts.by_feature().items():
            # Not an info, which has one series: a feature has one each.
            self._metrics.watch(
                "machd_capability_info",
                lambda: 1.0,
                feature=feature,
                verdict=verdict.support.value,
                source=verdict.source.value,
            )


def _log_encoder(log: BoundLogger, encoder: EncoderDescription) -> None:
    log.info(
        "encoder.described",
        task=encoder.task.value,
        pooling=encoder.pooling or None,
        dimensions=encoder.dimensions,
        max_input_tokens=encoder.max_input_tokens,
    )


def _log_decision(log: BoundLogger, decision: DecodeModeDecision, verdict: Verdict) -> None:
    say = log.info if decision.is_as_requested else log.warning
    say(
        "decode_mode.decided",
        requested=decision.requested.value,
        active=decision.active.value,
        reason=decision.reason,
        verdict=verdict.support.value,
        source=verdict.source.value,
        evidence=_figures(verdict.evidence),
    )


def _log_speculation(log: BoundLogger, decision: SpeculationDecision) -> None:
    say = log.info if decision.is_as_requested else log.warning
    say(
        "speculation.decided",
        requested=decision.requested,
        active=decision.active.value,
        max_draft_tokens=decision.max_draft_tokens,
        reason=decision.reason,
    )


def _log_budget(log: BoundLogger, asked_gb: float, device_memory_bytes: int) -> None:
    asked_bytes = asked_budget_bytes(asked_gb)
    effective_bytes = effective_budget_bytes(asked_gb, device_memory_bytes)
    say = log.info if effective_bytes == asked_bytes else log.warning
    say(
        "kv_budget.effective",
        asked_bytes=asked_bytes,
        effective_bytes=effective_bytes,
        device_memory_bytes=device_memory_bytes or None,
    )


def _figures(evidence: Evidence | UnsetType) -> dict[str, float] | None:
    if isinstance(evidence, UnsetType):
        return None
    figures = structs.asdict(evidence).items()
    return {name: value for name, value in figures if not isinstance(value, UnsetType)}
