"""What a client asks of a generation, whatever dialect it spoke."""

from __future__ import annotations

from dataclasses import dataclass, field

from machd.api.bounds import PriorityName
from machd.request import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """A checked request without its prompt. Values are inside the bounds of ``api/bounds.py``.

    Attributes:
        sampling: Reaches the rows as it is, but for the seed and what the model decides (grammar,
            thinking, end tokens, predicted tokens).
        seed: Seed of the first choice; None asks for a fresh one.
        max_tokens: Tokens of completion; ``bounds.WHOLE_ROOM`` for all that fit, None leaves it to
            ``limits.max_tokens_default``.
        stop: Texts that end the completion.
        shows_stop: Whether the text that ended the completion belongs to it.
        stop_token_ids: Tokens that end the completion.
        ignore_eos: Go on after the model's own end of text.
        n: Completions for each prompt.
        include_usage: Send a last event with the usage; only ever true with ``stream``.
        stream_interval: Tokens in one event; None leaves it to ``streaming.interval``.
        priority: Its place among the requests that wait.
        cache_salt: Only requests with the same one find each other's prompts; a secret, so that it
            stands in no repr.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    shows_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    stream_interval: int | None = None
    priority: PriorityName = "normal"
    cache_salt: str | None = field(default=None, repr=False)
