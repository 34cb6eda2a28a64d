"""Clearing and warming what is kept for later requests, on the admin listener."""

from __future__ import annotations

from typing import Annotated, Self

from msgspec import Meta, Raw, Struct

from machd.admin.status_wire import StoredResponses
from machd.dialects.chat.messages import ChatMessageList
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.wire.bounds import CacheSalt, ContentText, ModelName
from machd.dialects.wire.decoding import decode_body, unknown_fields
from machd.dialects.wire.errors import ErrorDetail
from machd.dialects.wire.reasoning import ReasoningEffort, TemplateVariables
from machd.dialects.wire.tools import ChatToolList
from machd.errors import InvalidRequestError
from machd.request.conversation import Conversation

MAX_WARM_PROMPTS = 64
"""Prompts of one request."""

MAX_WARM_BODY_BYTES = 8 * 1024 * 1024
"""Of a request's body: prompts are what an operator sends that is not small."""

_ClientName = Annotated[str, Meta(min_length=1, max_length=256)]


class CacheCleared(Struct, frozen=True, kw_only=True):
    """What was forgotten.

    Attributes:
        blocks: Of the prefix cache, that left memory or the disk, each counted once; those of
            running sequences stay.
        deleted_blocks: Those that were deleted on disk, a file each.
        deleted_bytes: What their files took.
        disk_bytes: What this model's files on disk take afterwards; null without a disk tier.
    """

    responses: StoredResponses
    blocks: int
    deleted_blocks: int = 0
    deleted_bytes: int = 0
    disk_bytes: int | None = None


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
        """Refuse what is neither a text nor a conversation, or both.

        Args:
            where: Path of the prompt in the request, such as ``prompts[2]``.

        Raises:
            InvalidRequestError: It is.
        """
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
        """What is to be rendered; None for a text.

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
    """The prompts of a request as they were sent."""

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
    """What came of one prompt.

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
    """What came of all of them.

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
