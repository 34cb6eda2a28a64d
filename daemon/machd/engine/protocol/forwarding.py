"""An engine in front of another one; a subclass changes one verb."""

from __future__ import annotations

from machd.engine.protocol.adapters import AdapterRoom
from machd.engine.protocol.blocks import SavedBlock
from machd.engine.protocol.engine import Engine, GrammarCompiler, ModelDescription
from machd.engine.protocol.media import MediaProcessor
from machd.engine.protocol.memory import MemoryReading
from machd.engine.protocol.step import StepPlan, StepResult
from machd.engine.protocol.tokenizer import Tokenizer


class ForwardingEngine:
    """An engine that hands every call to another one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def model(self) -> ModelDescription:
        """The loaded model."""
        return self._engine.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        """The engine's grammar compiler."""
        return self._engine.grammars

    @property
    def media(self) -> MediaProcessor | None:
        """The decoder and processor of images and videos."""
        return self._engine.media

    @property
    def adapters(self) -> AdapterRoom:
        """The engine's adapters."""
        return self._engine.adapters

    @property
    def inputs(self) -> None:
        """None: the model generates."""
        return

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        return self._engine.run(plan)

    def memory(self) -> MemoryReading:
        """Read the memory in use."""
        return self._engine.memory()

    def saved_blocks(self) -> tuple[SavedBlock, ...]:
        """List the blocks of the disk tier."""
        return self._engine.saved_blocks()

    def reset(self, *, max_rows: int | None = None) -> None:
        """Drop every slot."""
        self._engine.reset(max_rows=max_rows)

    def close(self) -> None:
        """Free weights and caches."""
        self._engine.close()
