"""Computing prompts ahead, so that the requests that begin with them find them in the prefix cache."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from machd.admin.cache_wire import WarmPrompt
from machd.clock import Clock
from machd.errors import ConflictError, InvalidRequestError, MachdError
from machd.request.generation import GenerationOptions, SamplingParams
from machd.serving.generation import GenerationIdentity, GenerationUsage
from machd.serving.service import GenerationService

_ENDPOINT = "cache_warm"
_MB = 1_000_000

_IDLE_S = 60.0
"""How long a look at a generation waits for news; it looks again until the end."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """What came of one prompt.

    Attributes:
        error: Why it failed; None where it did not.
    """

    prompt_tokens: int
    cached_tokens: int
    duration_s: float
    error: MachdError | None = None


class Warmer:
    """Generates one token after each prompt and drops it; prompts wait behind everybody's requests."""

    def __init__(
        self,
        service: GenerationService,
        clock: Clock,
        *,
        client: str,
        salt: str | None,
        request_id: str,
        limit_bytes: Callable[[], int | None],
    ) -> None:
        """Warm for one client.

        Args:
            service: Opens generations.
            clock: Reads time.
            client: Whose requests are to find the prompts; its limits are not touched.
            salt: What those requests send.
            request_id: Of the request that asked for it, for the log.
            limit_bytes: Reads what the prefix cache may take now; None where only the number of
                texts is limited.
        """
        self._service = service
        self._clock = clock
        self._client = client
        self._request_id = request_id
        self._limit_bytes = limit_bytes
        self._options = GenerationOptions(
            SamplingParams(temperature=0.0), max_tokens=1, priority="batch", cache_salt=salt
        )

    async def warm(self, prompt: WarmPrompt) -> Warmed:
        """Compute one prompt. Ends with the generation that it opens, also when it is cancelled."""
        started_s = self._clock.monotonic_s()
        try:
            token_ids = await self._tokens(prompt)
            self._check_room(len(token_ids))
            usage = await self._generate(token_ids, started_s)
        except MachdError as error:
            return Warmed(0, 0, self._clock.monotonic_s() - started_s, error)
        duration_s = self._clock.monotonic_s() - started_s
        return Warmed(usage.prompt_tokens, usage.cached_tokens, duration_s)

    async def _tokens(self, prompt: WarmPrompt) -> tuple[int, ...]:
        """A text as completions read it, a conversation as chat completions do."""
        service = self._service
        conversation = await service.in_worker(prompt.conversation, service.model.model_id)
        if conversation is not None:
            return (await service.prepare(conversation)).prompt
        token_ids = await service.in_worker(
            service.tokenizer.encode, prompt.prompt or "", add_special_tokens=True
        )
        if not token_ids:
            raise InvalidRequestError("prompt: holds no token; send some text", param="prompt")
        return tuple(token_ids)

    def _check_room(self, tokens: int) -> None:
        """Refuse a prompt that would not be kept whole, however much made room for it.

        Where a model keeps more than positions, what a prompt takes is only known once it is kept.

        Raises:
            ConflictError: It is.
        """
        facts, limit_bytes = self._service.model.cache, self._limit_bytes()
        # The last token is computed again whenever the prompt comes.
        needed_bytes = (tokens - 1) * facts.bytes_per_token
        if facts.has_positions_only and limit_bytes is not None and needed_bytes > limit_bytes:
            raise ConflictError(
                f"prompt: {tokens} tokens take {needed_bytes / _MB:.1f} MB, and the prefix cache may "
                f"take {limit_bytes / _MB:.1f} MB: raise cache.memory_mb"
            )

    async def _generate(self, prompt: tuple[int, ...], arrived_s: float) -> GenerationUsage:
        identity = GenerationIdentity(
            generation_id=f"warm-{secrets.token_hex(14)}",
            request_id=self._request_id,
            endpoint=_ENDPOINT,
            client=self._client,
            arrived_s=arrived_s,
            created_unix_s=int(self._clock.unix_s()),
            model=self._service.model.model_id,
            is_limited=False,
        )
        generation = self._service.open([prompt], self._options, identity, prompt_param="prompt")
        try:
            async for _ in generation.deltas(idle_s=_IDLE_S):
                pass  # the token is of no use
        finally:
            generation.close()
        return generation.usage
