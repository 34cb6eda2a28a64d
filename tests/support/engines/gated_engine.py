"""The standard tiny model with something to be done before each of its steps."""

from __future__ import annotations

from collections.abc import Callable

from machd.engine.assembly import engine_parts
from machd.engine.protocol.step import StepPlan, StepResult
from machd.engine.step.mlx_engine import MlxEngine
from support.engines.tiny_models import TinyKind, tiny_model


class GatedEngine(MlxEngine):
    """Made on the thread that calls this; steps of its warm-up pass freely."""

    def __init__(
        self, before_step: Callable[[StepPlan], None] | None = None, *, looks_ahead: bool = False
    ) -> None:
        """Call ``before_step``, a gate for instance, with each plan that computes something."""
        self._before_step: Callable[[StepPlan], None] | None = None
        super().__init__(engine_parts(tiny_model(TinyKind.STANDARD), looks_ahead=looks_ahead))
        self._before_step = before_step

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step, after what has to be done before it."""
        if self._before_step is not None and (plan.prefill or plan.decode):
            self._before_step(plan)
        return super().run(plan)
