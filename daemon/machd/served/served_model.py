"""The model that an engine process serves, for handlers, metrics and operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from machd.capabilities.bitwise import BitwiseVerdict
from machd.capabilities.verdicts import ModelVerdicts
from machd.engine.protocol.encoder import EncoderDescription, EncoderInput, InputTokenizer
from machd.engine.protocol.engine import GrammarCompiler, ModelDescription, ModelFront
from machd.engine.protocol.media import MediaProcessor, PlainArray
from machd.engine.protocol.tokenizer import Tokenizer
from machd.link.decode_mode import DecodeModeDecision, decide_decode_mode
from machd.link.kv_memory import KvMemory, kv_memory
from machd.link.port import EnginePort
from machd.link.snapshot import LoopSnapshot
from machd.link.speculation_mode import SpeculationDecision, decide_speculation
from machd.link.state import ServedState
from machd.served.vector_cache import VectorCache
from machd.settings.cache import PromptRuleName
from machd.settings.model import Settings

_MB = 1_000_000


class ServedModel:
    """One model: its description, verdicts and decode mode, and the link to its engine.

    Properties of a loaded model raise NotReadyError, DrainingError or EngineFaultError while none is loaded.

    Attributes:
        link: To the engine; another one after an engine has failed for good.
        vectors: What is kept of an encoder's earlier answers.
    """

    def __init__(
        self,
        link: EnginePort,
        settings: Callable[[], Settings],
        check_accepting: Callable[[], None],
    ) -> None:
        """Know nothing of the model yet; ``check_accepting`` raises why there is no model to speak of."""
        self.link = link
        self.vectors = VectorCache()
        self._settings = settings
        self._check_accepting = check_accepting

    @property
    def state(self) -> ServedState | None:
        """The state that the engine process has published; None until the model is served."""
        return None if self.link.front is None else self.link.state

    @property
    def front(self) -> ModelFront:
        """The model's description, tokenizer and templates."""
        front = self.link.front
        if front is None:
            self._check_accepting()
        assert front is not None, "who accepts has a model"
        return front

    @property
    def model(self) -> ModelDescription:
        """The model's description."""
        return self.front.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.front.tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiler of grammars for the model's vocabulary."""
        return self.front.grammars

    @property
    def prompt_rules(self) -> tuple[PromptRuleName, ...]:
        """Names of the rules that take texts out of the model's prompts."""
        return self._settings().cache.normalise

    @property
    def media(self) -> MediaProcessor | None:
        """Decoder and processor of images and videos; None for a model that takes text only."""
        return self.front.media

    @property
    def encoder(self) -> EncoderDescription | None:
        """What the model makes of texts; None for one that generates."""
        return self.front.model.encoder

    @property
    def inputs(self) -> InputTokenizer:
        """Makes the inputs of an encoder, which the model is."""
        inputs = self.front.inputs
        assert inputs is not None, "an encoder has a tokenizer for its inputs"
        return inputs

    async def encode(self, inputs: tuple[EncoderInput, ...]) -> PlainArray:
        """Make vectors or labels of texts, float32 [texts, dimensions]; who is cancelled has them forgotten.

        Raises:
            MachdError: The engine has ended, is overloaded, or has failed over these texts.
        """
        try:
            return await asyncio.wrap_future(self.link.encode(inputs))
        except asyncio.CancelledError:
            self.link.drop_inputs(inputs)
            raise

    def kept_vectors(self) -> VectorCache:
        """Return the cache of vectors, which holds none but those of the process that serves, within its bound."""
        limit_bytes = self._settings().cache.vectors_mb * _MB
        self.vectors.hold(load=self.state, limit_bytes=limit_bytes)
        return self.vectors

    @property
    def takes_media(self) -> bool:
        """True unless the model is known to take text only."""
        return self.state is None or self.state.model.vision is not None

    @property
    def verdicts(self) -> ModelVerdicts:
        """What the model can do, by its rules and its probe results."""
        return self.known.verdicts

    @property
    def bitwise(self) -> BitwiseVerdict:
        """Whether a row of the model has the same bits however it is computed."""
        return self.known.bitwise

    @property
    def decode_mode(self) -> DecodeModeDecision:
        """The decode mode, with its reason."""
        return self.decode_mode_under(self._settings())

    def decode_mode_under(self, settings: Settings) -> DecodeModeDecision:
        """Return the decode mode under other settings, with its reason."""
        return decide_decode_mode(
            is_batching_asked=settings.continuous_batching.enabled,
            verdict=self.verdicts.continuous_batching,
        )

    @property
    def speculation(self) -> SpeculationDecision:
        """The proposer in force, and why."""
        known = self.known
        return decide_speculation(self._settings().speculation, known.model, known.verdicts)

    @property
    def kv(self) -> KvMemory:
        """KV memory now; all 0 while no model is served."""
        return KvMemory(0, 0, 0) if self.state is None else kv_memory(self.snapshot, self.model)

    @property
    def snapshot(self) -> LoopSnapshot:
        """The engine's newest counts; memory at most a second old."""
        return self.link.snapshot

    @property
    def idle_snapshot(self) -> LoopSnapshot:
        """The engine's counts at the last idle moment."""
        return self.link.idle_snapshot

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last moved."""
        return self.link.heartbeat_age_s

    @property
    def known(self) -> ServedState:
        """What is known of the model."""
        if self.state is None:
            self._check_accepting()
        assert self.state is not None, "who accepts has a model"
        return self.state
