"""Fields that requests for a generation share, and the options that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, Self, TypeAlias, TypeVar

from msgspec import Struct

from machd.dialects.wire import bounds
from machd.errors import InvalidRequestError
from machd.request.adapter import NumberedAdapter
from machd.request.generation import WHOLE_ROOM, GenerationOptions, PriorityName, SamplingParams

_T = TypeVar("_T")

ServiceTier: TypeAlias = Literal["auto", "default", "flex", "scale", "priority"]
"""OpenAI's word for the order of requests."""

UsedTier: TypeAlias = Literal["default", "flex", "scale", "priority"]
"""The service tier that a request asked for; ``auto`` is ``default``."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters for which a checkpoint may have defaults."""

_TIER_PRIORITIES: Mapping[str | None, PriorityName] = MappingProxyType(
    {"flex": "batch", "priority": "interactive"}
)
"""Priorities that OpenAI's service tiers ask for; the other tiers change nothing."""


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """A request for a generation; dialects derive theirs from it.

    Attributes:
        uses_tokens: False if only the prompt is looked at, so that a client's limit on tokens does not count.
        takes_media: True if it may hold images and videos.
        model: May be left out where every name is accepted.
    """

    uses_tokens: ClassVar[bool] = True
    takes_media: ClassVar[bool] = False

    model: bounds.ModelName | None = None

    @property
    def is_stream(self) -> bool:
        """Whether it asks for a stream."""
        return False

    @property
    def idle_s(self) -> float | None:
        """Idle seconds after which the model is to be unloaded from now on; None where the request says nothing.

        0 is for once this answer has ended, infinity for never.

        Raises:
            InvalidRequestError: It says so in a wrong form.
        """
        return None

    def listed_adapters(self) -> Sequence[NumberedAdapter] | None:
        """Adapters that it lists beside its model, by id, each with its scale; None where it lists none."""
        return None

    def checked(self) -> Self:
        """The request, once what no single field's bounds can say holds too.

        Raises:
            InvalidRequestError: Fields contradict each other.
            UnsupportedParameterError: A field asks for what machd does not do.
        """
        return self

    def check_vocabulary(self, vocabulary_tokens: int) -> None:
        """Raise InvalidRequestError if a token id that the request names is outside the vocabulary."""


class SamplingFields(GenerationRequest, frozen=True, kw_only=True):
    """Fields that chat completions, completions and responses share. Null means the default.

    From ``top_k`` on the fields are extensions, spelled as vLLM spells them; ``stream_interval`` and
    ``return_cache_diagnosis`` are machd's own.

    Attributes:
        return_cache_diagnosis: Say in the usage why the prefix cache had no more of the prompt.
    """

    temperature: bounds.Temperature | None = None
    top_p: bounds.TopP | None = None
    presence_penalty: bounds.Penalty | None = None
    frequency_penalty: bounds.Penalty | None = None
    seed: bounds.Seed | None = None
    stop: bounds.Stop | None = None
    stream: bool | None = None

    top_k: bounds.TopK | None = None
    min_p: bounds.MinP | None = None
    repetition_penalty: bounds.RepetitionPenalty | None = None
    stream_interval: bounds.StreamInterval | None = None
    priority: PriorityName | bounds.PriorityNumber | None = None
    cache_salt: bounds.CacheSalt | None = None
    return_cache_diagnosis: bool | None = None

    @property
    def is_stream(self) -> bool:
        """Whether it asks for a stream."""
        return bool(self.stream)

    def shared_options(
        self,
        *,
        max_tokens: int | None,
        top_logprobs: int | None = None,
        service_tier: str | None = None,
    ) -> GenerationOptions:
        """Read these fields, beside what the dialects spell differently.

        ``top_p`` 0 leaves no mass at all, so that the likeliest token alone takes part; ``top_k`` -1
        is off, as 0 is.
        """
        unsaid = {name for name in _SAMPLING if getattr(self, name) is None}
        if self.top_p == 0:
            unsaid.discard("top_k")
        return GenerationOptions(
            unsaid=frozenset(unsaid),
            sampling=SamplingParams(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=self.top_p or 1.0,
                top_k=1 if self.top_p == 0 else max(0, self.top_k or 0),
                min_p=self.min_p or 0.0,
                repetition_penalty=self.repetition_penalty or 1.0,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                top_logprobs=top_logprobs,
            ),
            seed=self.seed,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stream=bool(self.stream),
            stream_interval=self.stream_interval,
            priority=self._priority(service_tier),
            cache_salt=self.cache_salt,
            includes_cache_diagnosis=bool(self.return_cache_diagnosis),
        )

    def _priority(self, service_tier: str | None) -> PriorityName:
        if self.priority is None:
            return _TIER_PRIORITIES.get(service_tier, "normal")
        return priority_name(self.priority)


def priority_name(asked: PriorityName | int | None) -> PriorityName:
    """Return the name of a priority that a request gives by name or by vLLM's number."""
    if isinstance(asked, int):
        return "normal" if asked == 0 else "interactive" if asked < 0 else "batch"
    return asked or "normal"


def agreed(asked: Mapping[str, _T | None]) -> _T | None:
    """Return the one value that several spellings of a field have; InvalidRequestError if two differ."""
    given = {name: value for name, value in asked.items() if value is not None}
    first = next(iter(given), None)
    for name, value in given.items():
        if first is not None and value != given[first]:
            raise InvalidRequestError(f"{first} and {name} contradict each other", param=name)
    return None if first is None else given[first]


def agreed_tokens(asked: Mapping[str, int | None], *, least: int = 1) -> int | None:
    """The number of tokens that a request asks for, whichever field says so; ``least`` or more.

    Raises:
        InvalidRequestError: Two fields differ, or one is 0 where that makes no sense.
    """
    for name, value in asked.items():
        if value is not None and value != WHOLE_ROOM and value < least:
            raise InvalidRequestError.at(
                name, f"expected at least {least}, or {WHOLE_ROOM} for all that fits"
            )
    return agreed(asked)


def check_token_ids(token_ids: Iterable[int], *, vocabulary_tokens: int, param: str) -> None:
    """Raise InvalidRequestError, naming the first one, where ids are outside the width of the logits."""
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary_tokens:
            raise InvalidRequestError.at(
                param,
                f"token id {token_id} is not in the model's vocabulary "
                f"(0 to {vocabulary_tokens - 1})",
            )
