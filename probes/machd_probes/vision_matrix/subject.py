"""The subject of the vision matrix: a tiny checkpoint in machd's engine, and mlx-vlm's own answers of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Self

import mlx.core as mx

from machd.capabilities.evidence import Evidence
from machd.engine.assembly import make_engine
from machd.engine.loading.loader import load_model
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.media import MediaBounds
from machd.engine.protocol.step import SampledToken
from machd.engine_process.scheduling import prefix_shape
from machd.generations.decodings import MediaRules, decode_media
from machd.generations.media_fetch import FetchRules
from machd.reading.keyed_prompt import KeyedPrompt, keyed_prompt
from machd.request.media import MediaKind, media_of
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import PrefixLimits
from machd.settings.cache import CacheSettings
from machd_probes.comparison import compared, largest_difference, tolerated
from machd_probes.subject import COARSEST_FLOOR, is_equal
from machd_probes.vision_matrix.mlx_vlm_generation import OwnGeneration
from machd_probes.vision_matrix.rows import Answer, AskedRow, Rows
from machd_probes.vision_matrix.turns import TURNS, VIDEO_TURNS, Turn, message

_TOKENS = 10
_TOP_LOGPROBS = 32
_MAX_ROWS = 8
_CHUNK_TOKENS = 7
"""Less than any image's tokens, so that a chunk begins and ends inside an image."""

_BLOCK_TOKENS = 16
_PREFIX_BYTES = 1 << 28
_MEDIA_BYTES = 64_000_000
_RULES = MediaRules(
    FetchRules(hosts=frozenset(), directory=None, max_bytes=1 << 24),
    MediaBounds(max_pixels=1 << 22, max_frames=64, max_decode_s=60.0),
)
_LARGEST_FLOOR = COARSEST_FLOOR / 100
"""In nats. Above it what chunks change is no rounding of float32."""


class VisionSubject:
    """One family under test. Lives on the thread that made it.

    Rows say what mlx-vlm's own generation says, so that log-probabilities can be compared at every position.
    """

    def __init__(self, directory: Path, own: OwnGeneration | None = None) -> None:
        """Load a checkpoint as the daemon does, in float32.

        Args:
            directory: Of the checkpoint.
            own: The checkpoint as mlx-vlm loads it; loaded now unless given.

        Raises:
            Exception: Any error of machd's or mlx-vlm's about the checkpoint.
        """
        self._own = own or OwnGeneration(directory)
        source = ModelSource(SourceKind.DIRECTORY, directory, directory.name)
        loaded = load_model(source, dtype="float32", media_bytes=_MEDIA_BYTES)
        self.engine = make_engine(loaded, max_rows=_MAX_ROWS)
        self._expected: dict[str, list[SampledToken]] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        """Return the subject; leaving the context closes it."""
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Give back the model, and end the processor's process."""
        self.engine.close()
        mx.clear_cache()

    @property
    def description(self) -> ModelDescription:
        """The description of the loaded model."""
        return self.engine.model

    @property
    def turns(self) -> Mapping[str, Turn]:
        """The messages that the family can be asked, by name."""
        vision = self.description.vision
        has_video = vision is not None and MediaKind.VIDEO in vision.kinds
        return {**TURNS, **VIDEO_TURNS} if has_video else TURNS

    def expected(self, name: str) -> list[SampledToken]:
        """Return mlx-vlm's own answer to a turn, alone."""
        if name not in self._expected:
            turn = self.turns[name]
            self._expected[name] = self._own.tokens(turn, _TOKENS, _TOP_LOGPROBS)
        return self._expected[name]

    def new_namespace(self) -> str:
        """Return a name under which nothing is known: its images are encoded anew."""
        return str(next(self._numbers))

    def row(self, name: str, namespace: str, *, at_step: int = 0) -> AskedRow:
        """Make the row of a turn: its prompt as serving makes it, and mlx-vlm's tokens to say."""
        said = tuple(token.token_id for token in self.expected(name))
        return AskedRow(self.prompt(name, namespace), said, at_step)

    def prompt(self, name: str, namespace: str) -> KeyedPrompt:
        """Decode a turn's images and render its prompt, as serving does."""
        tokenizer, processor = self.engine.tokenizer, self.engine.media
        assert processor is not None, "the family is served with its tower"
        messages = [message(self.turns[name])]
        decoded = {
            id(source): decode_media(source, processor, _RULES, namespace)
            for source in media_of(messages)
        }
        return keyed_prompt(
            messages,
            decoded,
            processor,
            render=tokenizer.render_chat,
            encode=partial(tokenizer.encode, add_special_tokens=False),
        )

    def rows(self, *, is_batch: bool = False, is_chunked: bool = False) -> Rows:
        """Open a scheduler: of one slot or a batch, with whole prompts or in chunks."""
        slots = _MAX_ROWS if is_batch else 1
        if not is_chunked:
            return Rows(self.engine, slots=slots, top_logprobs=_TOP_LOGPROBS)
        return Rows(
            self.engine, slots=slots, chunk_tokens=_CHUNK_TOKENS, top_logprobs=_TOP_LOGPROBS
        )

    def rows_with_prefixes(self) -> Rows:
        """Open a scheduler of one slot with a prefix cache."""
        shape = prefix_shape(CacheSettings(block_tokens=_BLOCK_TOKENS), self.description)
        prefixes = PrefixCache(shape, PrefixLimits(max_bytes=_PREFIX_BYTES))
        return Rows(self.engine, prefixes=prefixes, top_logprobs=_TOP_LOGPROBS)

    @cached_property
    def noise_floor(self) -> float:
        """The largest change of a log-probability that rounding alone makes, in nats.

        A row alone with its prompt in one chunk and in many. Where chunks change more than rounding could, they are
        no floor.
        """
        namespace = self.new_namespace()
        asked = [self.row(name, namespace) for name in ("an image", "text")]
        whole = self.rows().answers(asked)
        chunked = self.rows(is_chunked=True).answers(asked)
        found = max(
            largest_difference(one.tokens, other.tokens)
            for one, other in zip(whole, chunked, strict=True)
        )
        return found if found < _LARGEST_FLOOR else 0.0

    def compared(self, names: Sequence[str], answers: Sequence[Answer]) -> dict[str, Evidence]:
        """Compare the answers to turns with mlx-vlm's own."""
        return {
            name: compared(self.expected(name), answer.tokens, self.noise_floor)
            for name, answer in zip(names, answers, strict=True)
        }

    def depends_on(self, name: str, other: str) -> bool:
        """Tell whether mlx-vlm's answers to two turns differ by more than rounding."""
        difference = largest_difference(self.expected(name)[:1], self.expected(other)[:1])
        return difference > tolerated(self.noise_floor)


def wrong_turns(evidence: Mapping[str, Evidence]) -> list[str]:
    """Describe the turns whose answers are not mlx-vlm's."""
    return [
        f"{name}: {one.token_mismatches} other tokens, log-probabilities off by up to "
        f"{one.max_logprob_diff:.2g} nats (rounding: {one.noise_floor:.1g})"
        for name, one in evidence.items()
        if not is_equal(one)
    ]
