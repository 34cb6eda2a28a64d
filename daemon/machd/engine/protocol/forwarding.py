"""An engine in front of another one, for those that change a verb of it and leave the rest."""

from __future__ import annotations

from machd.engine.protocol.blocks import SavedBlock
from machd.engine.protocol.engine import Engine, GrammarCompiler, MemoryReading, ModelDescription
from machd.engine.protocol.step import StepPlan, StepResult
from machd.engine.protocol.tokenizer import Tokenizer


class ForwardingEngine:
    """Does what the other engine does."""

    def __init__(self, engine: Engine) -> None:
        """Stand in front of ``engine``."""
        self._engine = engine

    @property
    def model(self) -> ModelDescription:
        """What is loaded."""
        return self._engine.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        """The engine's own."""
        return self._engine.grammars

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        return self._engine.run(plan)

    def memory(self) -> MemoryReading:
        """Bytes right now."""
        return self._engine.memory()

    def saved_blocks(self) -> tuple[SavedBlock, ...]:
        """The blocks of the disk tier."""
        return self._engine.saved_blocks()

    def reset(self, *, max_rows: int | None = None) -> None:
        """Forget every slot."""
        self._engine.reset(max_rows=max_rows)

    def close(self) -> None:
        """Give back weights and caches."""
        self._engine.close()
