"""Options and sampling parameters of a request, whatever its dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

from machd.request.adapter import Adapter
from machd.request.constraint import Constraint

PriorityName: TypeAlias = Literal["interactive", "normal", "batch"]
"""The order in which waiting requests are started."""

WHOLE_ROOM = -1
"""As a number of completion tokens: as many as the context has room for; llama.cpp's spelling."""


class Grammar:
    """A compiled grammar, shared by all rows that it constrains. It is not changed.

    It is no dataclass, so that the link can leave out ``compiled``: of those msgspec encodes every field.

    Attributes:
        source: The compiler's own text, which decides alone whether two grammars are the same.
        constraint: What it was compiled from, and can be again.
        compiled: What the engine makes matchers from; opaque to everything else. None behind the link.
        ignored_keywords: Keywords of a JSON schema that the grammar cannot express, sorted.
    """

    __slots__ = ("compiled", "constraint", "ignored_keywords", "source")

    def __init__(
        self,
        source: str,
        constraint: Constraint,
        compiled: object = None,
        ignored_keywords: tuple[str, ...] = (),
    ) -> None:
        self.source = source
        self.constraint = constraint
        self.compiled = compiled
        self.ignored_keywords = ignored_keywords

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grammar) and self.source == other.source

    def __hash__(self) -> int:
        return hash(self.source)

    def __repr__(self) -> str:
        return f"Grammar({self.source!r}, ignored_keywords={self.ignored_keywords!r})"


@dataclass(frozen=True, slots=True)
class Thinking:
    """Markers around a completion's thoughts; no grammar holds inside of them.

    Attributes:
        start_token_ids: What opens them.
        end_token_ids: What closes them; at least one token.
        is_open: The prompt ends inside of them.
        budget_tokens: Tokens of thought after which the engine itself closes them; None for never.
    """

    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    is_open: bool
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a completion; they hold whatever other rows share its batch.

    The order is: penalties and ``logit_bias`` on the logits, then temperature, then ``top_k``,
    ``top_p`` and ``min_p`` on the resulting distribution. Temperature 0 is greedy.

    Attributes:
        seed: With the token's position it alone decides the row's random draw.
        logit_bias: Pairs of token id and addend; ids are inside the vocabulary.
        top_logprobs: None for no log-probabilities, else how many alternatives (0 to 20).
            They are of the model's own distribution, before penalties and temperature.
        logprob_token_ids: Tokens whose log-probabilities come with every token, of the same distribution;
            unique, inside the vocabulary.
        allowed_token_ids: The only tokens that may be chosen, by id; empty for all.
        min_tokens: Tokens before which none of ``end_token_ids`` is chosen.
        end_token_ids: Tokens that end the completion; empty unless ``min_tokens`` needs them.
        predicted_token_ids: Tokens that the completion may repeat, for proposers; no token depends on
            them.
        prompt_logprobs: The same for the tokens of the prompt. Such a prompt is computed whole,
            nothing of it is reused.
        forced_token_ids: The completion's first tokens, whatever the model says; empty leaves the
            choice to it.
        grammar: What the completion may say after its thoughts; it ends with one of the model's
            end tokens. Other rows are not touched by it.
        thinking: None for a completion without thoughts.
        adapters: Adapters that compute prompt and completion; empty for the base model. Not a parameter of sampling,
            but, like the grammar, of all that tokens depend on beside the prompt.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    top_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    predicted_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    forced_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """Sampling parameters that hold where a request says nothing; None leaves one to the dialect.

    The names are those of :class:`SamplingParams`.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def named(self) -> dict[str, float]:
        """Return those that are set, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


NO_DEFAULT_SAMPLING = DefaultSampling()
"""Of a model whose publisher says nothing."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """A checked request without its prompt. Values are inside the bounds of ``dialects/wire/bounds.py``.

    Attributes:
        sampling: Reaches the rows as it is, but for the seed and what the model decides (grammar,
            thinking, end tokens, predicted tokens).
        unsaid: Names of the sampling parameters about which the request says nothing.
        seed: Seed of the first choice; None asks for a fresh one.
        max_tokens: Tokens of completion; ``WHOLE_ROOM`` for all that fit, None leaves it to
            ``limits.max_tokens_default``.
        stop: Texts that end the completion.
        shows_stop: Whether the text that ended the completion belongs to it.
        stop_token_ids: Tokens that end the completion.
        ignore_eos: Go on after the model's own end of text.
        n: Completions for each prompt.
        include_usage: Send a last event with the usage; only ever true with ``stream``.
        tells_progress: Tell how far the prompt is computed; only ever true with ``stream``.
        includes_cache_diagnosis: Say in the usage why the prefix cache had no more of the prompt.
        stream_interval: Tokens in one event; None leaves it to ``streaming.interval``.
        priority: Its place among the requests that wait.
        cache_salt: Only requests with the same one find each other's prompts; a secret, so that it
            stands in no repr.
        in_turns: Prompts for which the slots have no room wait outside the queue, which the many of one request
            would fill.
    """

    sampling: SamplingParams = SamplingParams()
    unsaid: frozenset[str] = field(default=frozenset(), compare=False)
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    shows_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    tells_progress: bool = False
    includes_cache_diagnosis: bool = False
    stream_interval: int | None = None
    priority: PriorityName = "normal"
    cache_salt: str | None = field(default=None, repr=False)
    in_turns: bool = False

    def with_defaults(self, defaults: Mapping[str, float]) -> GenerationOptions:
        """Return the options with other defaults, by name, for what the request leaves unsaid."""
        used = {name: value for name, value in defaults.items() if name in self.unsaid}
        return replace(self, sampling=replace(self.sampling, **used)) if used else self  # type: ignore[arg-type]
