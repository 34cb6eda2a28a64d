"""What a client asks of a generation, whatever dialect it spoke."""

from __future__ import annotations

from dataclasses import dataclass, field

from machd.api.bounds import PriorityName


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """A checked request without its prompt. Values are inside the bounds of ``api/bounds.py``.

    Attributes:
        max_tokens: Tokens of completion; ``bounds.WHOLE_ROOM`` for all that fit, None leaves it to
            ``limits.max_tokens_default``.
        min_tokens: Tokens before which the completion does not end by itself.
        top_k: Likeliest tokens that take part; 0 is off.
        logit_bias: Pairs of token id and addend, by id.
        allowed_token_ids: The only tokens that the completion may have, by id; empty for all.
        seed: None asks for a fresh one.
        top_logprobs: None for no log-probabilities, else alternatives at each position (0 to 20).
        prompt_logprobs: The same for the prompt's tokens.
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

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
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

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are wanted at all."""
        return self.top_logprobs is not None
