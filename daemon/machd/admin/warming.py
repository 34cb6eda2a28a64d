"""Computing prompts ahead: requests that begin with them find them in the prefix cache."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

import structlog
from litestar import Request
from litestar.di import NamedDependency
from msgspec import Meta, Raw, Struct

from machd.admin.config import body_timeout_s
from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.clock import Clock
from machd.dialects.chat.messages import ChatMessageList
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.wire.bounds import CacheSalt, ContentText, ModelName
from machd.dialects.wire.decoding import decode_body, unknown_fields
from machd.dialects.wire.errors import ErrorDetail, error_body
from machd.dialects.wire.reasoning import ReasoningEffort, TemplateVariables
from machd.dialects.wire.tools import ChatToolList
from machd.errors import (
    ConflictError,
    InvalidRequestError,
    MachdError,
    NotFoundError,
)
from machd.generations.generation import GenerationUsage
from machd.generations.identity import GenerationIdentity
from machd.generations.service import GenerationService
from machd.http.authentication import ANONYMOUS
from machd.http.bodies import read_json
from machd.http.stamps import request_id
from machd.http.stream import while_connected
from machd.request.adapter import Adapter
from machd.request.conversation import Conversation
from machd.request.generation import GenerationOptions, SamplingParams

MAX_WARM_PROMPTS = 64
"""Prompts of one request."""

MAX_WARM_BODY_BYTES = 8 * 1024 * 1024
"""Of a request's body: prompts are what an operator sends that is not small."""

_ClientName = Annotated[str, Meta(min_length=1, max_length=256)]

_ENDPOINT = "cache_warm"
_MB = 1_000_000

_IDLE_S = 60.0
"""How long a look at a generation waits for news; it looks again until the end."""


class WarmPrompt(Struct, frozen=True, kw_only=True):
    """A text, or the beginning of a conversation as chat completions take it.

    A conversation is rendered as a chat completion's is, so that what is kept of it is what such a
    request begins with.
    """

    prompt: ContentText | None = None
    messages: ChatMessageList | None = None
    tools: ChatToolList | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateVariables | None = None

    def check(self, where: str = "") -> None:
        """Raise InvalidRequestError for what is neither a text nor a conversation, or both, at ``where``."""
        param = where or None
        place = f"{where}: " if where else ""
        if (self.prompt is None) is (self.messages is None):
            raise InvalidRequestError(f"{place}send one of prompt and messages", param=param)
        if self.prompt is None:
            return
        if any((self.tools, self.reasoning_effort, self.chat_template_kwargs)):
            raise InvalidRequestError(
                f"{place}tools, reasoning_effort and chat_template_kwargs go with messages only",
                param=param,
            )
        if not self.prompt:
            raise InvalidRequestError(f"{place}prompt is empty; send some text", param=param)

    def conversation(self, model: ModelName) -> Conversation | None:
        """Return the conversation to render; None for a text.

        Raises:
            InvalidRequestError, UnsupportedParameterError: As for a chat completion.
        """
        if self.messages is None:
            return None
        request = ChatCompletionRequest(
            model=model,
            messages=self.messages,
            tools=self.tools,
            reasoning_effort=self.reasoning_effort,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        return request.checked().conversation()


WARM_PROMPT_FIELDS = "prompt, or messages with tools, reasoning_effort and chat_template_kwargs where they are asked for"


class _Prompts(Struct, frozen=True):
    prompts: list[Raw]


class WarmRequest(Struct, frozen=True, kw_only=True):
    """Prompts to compute and keep.

    Attributes:
        client: Name of the API key whose requests find them; null where all find all, or there are
            no keys.
        cache_salt: What those requests send.
    """

    prompts: Annotated[list[WarmPrompt], Meta(min_length=1, max_length=MAX_WARM_PROMPTS)]
    client: _ClientName | None = None
    cache_salt: CacheSalt | None = None

    @classmethod
    def decoded(cls, body: bytes) -> Self:
        """Read a request, in which every field counts: a salt that is misspelt would be none.

        Raises:
            InvalidRequestError: It is not what is expected, or has fields that mean nothing here.
        """
        request = decode_body(body, cls)
        if names := unknown_fields(body, cls):
            raise InvalidRequestError(
                f"{', '.join(names)}: not known; send prompts, client and cache_salt",
                param=names[0],
            )
        for index, prompt in enumerate(decode_body(body, _Prompts).prompts):
            if names := unknown_fields(bytes(prompt), WarmPrompt):
                raise InvalidRequestError(
                    f"prompts[{index}]: {', '.join(names)}: not known; send {WARM_PROMPT_FIELDS}. "
                    "client and cache_salt hold for all prompts and stand beside them",
                    param=f"prompts[{index}].{names[0]}",
                )
        for index, one in enumerate(request.prompts):
            one.check(f"prompts[{index}]")
        return request


class WarmedPrompt(Struct, frozen=True, kw_only=True):
    """Result of one prompt.

    Attributes:
        prompt_tokens: How long it is; 0 where it failed.
        cached_tokens: How much of it was kept already.
        duration_s: From its turn to its end.
        error: Why it failed; null where it did not.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    duration_s: float
    error: ErrorDetail | None = None


class CacheWarmed(Struct, frozen=True, kw_only=True):
    """Results of all prompts.

    Attributes:
        prompts: In the order in which they were sent.
        prompt_tokens: Of those that did not fail.
        failed: How many did.
    """

    prompts: list[WarmedPrompt]
    prompt_tokens: int
    cached_tokens: int
    failed: int
    duration_s: float

    @classmethod
    def of(cls, prompts: list[WarmedPrompt]) -> Self:
        """Sum the results up."""
        return cls(
            prompts=prompts,
            prompt_tokens=sum(one.prompt_tokens for one in prompts),
            cached_tokens=sum(one.cached_tokens for one in prompts),
            failed=sum(one.error is not None for one in prompts),
            duration_s=round(sum(one.duration_s for one in prompts), 6),
        )


class Warmer:
    """Generates one token after each prompt and drops it; prompts wait behind all other requests."""

    def __init__(  # noqa: PLR0913 - one argument for each fact of the requests that are to come
        self,
        service: GenerationService,
        clock: Clock,
        *,
        client: str,
        salt: str | None,
        request_id: str,
        adapters: tuple[Adapter, ...] = (),
        limit_bytes: Callable[[], int | None],
    ) -> None:
        """Warm for one client, whose own limits are not touched, and with the adapters of its requests.

        ``limit_bytes`` reads what the prefix cache may take now; None where only the number of texts is limited.
        """
        self._service = service
        self._clock = clock
        self._client = client
        self._request_id = request_id
        self._adapters = adapters
        self._limit_bytes = limit_bytes
        self._options = GenerationOptions(
            SamplingParams(temperature=0.0), max_tokens=1, priority="batch", cache_salt=salt
        )

    async def warm(self, prompt: WarmPrompt) -> WarmedPrompt:
        """Compute one prompt. Ends with the generation that it opens, also when it is cancelled."""
        started_s = self._clock.monotonic_s()
        try:
            token_ids = await self._tokens(prompt)
            self._check_room(len(token_ids))
            usage = await self._generate(token_ids, started_s)
        except MachdError as error:
            return WarmedPrompt(
                duration_s=self._duration_s(started_s), error=error_body(error).error
            )
        return WarmedPrompt(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            duration_s=self._duration_s(started_s),
        )

    def _duration_s(self, started_s: float) -> float:
        return round(self._clock.monotonic_s() - started_s, 6)

    async def _tokens(self, prompt: WarmPrompt) -> tuple[int, ...]:
        """A text as completions read it, a conversation as chat completions do."""
        service = self._service
        conversation = await service.in_worker(prompt.conversation, service.served.model.model_id)
        if conversation is not None:
            return (await service.prepare(conversation)).prompt
        token_ids = await service.in_worker(
            service.served.tokenizer.encode, prompt.prompt or "", add_special_tokens=True
        )
        return tuple(token_ids)

    def _check_room(self, tokens: int) -> None:
        """Raise ConflictError for a prompt that would not be kept whole, however much made room for it.

        Where a model keeps more than positions, what a prompt takes is only known once it is kept.
        """
        facts, limit_bytes = self._service.served.model.cache, self._limit_bytes()
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
            model=self._service.served.model.model_id,
            is_limited=False,
            adapters=self._adapters,
        )
        generation = self._service.open([prompt], self._options, identity, prompt_param="prompt")
        try:
            async for _ in generation.deltas(idle_s=_IDLE_S):
                pass  # the token is of no use
        finally:
            generation.close()
        return generation.usage


@endpoint(
    "POST /admin/cache/warm",
    CacheWarmed,
    takes=WarmRequest,
    also=(404, 409),
    request_max_body_size=MAX_WARM_BODY_BYTES,
)
async def warm_cache(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> CacheWarmed:
    """Compute prompts, one after the other, and keep them for later requests.

    A client that leaves ends it.

    A prompt that fails says so in its place, and the others are computed all the same.
    """
    body = WarmRequest.decoded(await read_json(request, timeout_s=body_timeout_s(admin)))
    admin.lifecycle.check_accepting()
    loading = admin.models.lease(admin.model)
    with contextlib.closing(await while_connected(request.receive, loading)):
        warmed = await _warmed(request, admin, body)
    structlog.get_logger("machd.admin").info(
        "cache.warmed",
        prompts=len(warmed.prompts),
        failed=warmed.failed,
        prompt_tokens=warmed.prompt_tokens,
        cached_tokens=warmed.cached_tokens,
        duration_s=warmed.duration_s,
    )
    return warmed


async def _warmed(
    request: Request[Any, Any, Any], admin: AdminContext, body: WarmRequest
) -> CacheWarmed:
    """Compute the prompts with the model that the request holds."""
    _check_cache(admin)
    warmer = Warmer(
        admin.service,
        admin.clock,
        client=_client(admin, body.client),
        salt=body.cache_salt,
        request_id=request_id(request.scope),
        adapters=await admin.chosen(),
        limit_bytes=lambda: _limit_bytes(admin),
    )
    return await while_connected(request.receive, _warm(warmer, body.prompts))


def _check_cache(admin: AdminContext) -> None:
    """Raise ConflictError where nothing would be kept; the message says why."""
    verdicts = admin.served.verdicts
    if not admin.settings.cache.prefix:
        raise ConflictError(
            "cache.prefix is off, so that nothing would be kept; turn it on and restart the daemon"
        )
    if admin.served.snapshot.prefix is None:
        raise ConflictError(
            f"this model's prompts cannot be kept, so that there is no prefix cache: "
            f"{verdicts.prefix_cache.reason}"
        )
    if _limit_bytes(admin) == 0:
        raise ConflictError(
            "the prefix cache may take no memory now, so that nothing would be kept: set "
            "cache.memory_mb to more than 0, or free memory of the machine"
        )


def _limit_bytes(admin: AdminContext) -> int | None:
    """Bytes that the prefix cache may take now; None where there is none, or only texts are limited."""
    prefix = admin.served.snapshot.prefix
    return None if prefix is None else prefix.limit_bytes


def _client(admin: AdminContext, asked: str | None) -> str:
    """In whose name the prompts are computed.

    Raises:
        NotFoundError: No API key is called that.
        ConflictError: Every key keeps its prompts to itself, and none is named.
    """
    names = admin.client_names() or frozenset({ANONYMOUS})
    if asked is not None:
        if asked not in names:
            raise NotFoundError("client: no API key has this name", param="client")
        return asked
    is_shared = admin.configuration.settings.cache.namespace == "shared"
    if is_shared or names == {ANONYMOUS}:
        return ANONYMOUS
    raise ConflictError(
        "every API key keeps its prompts to itself (cache.namespace is key): name the key whose "
        "requests are to find these as client",
        param="client",
    )


async def _warm(warmer: Warmer, prompts: Sequence[WarmPrompt]) -> CacheWarmed:
    return CacheWarmed.of([await warmer.warm(prompt) for prompt in prompts])
