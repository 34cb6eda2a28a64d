"""The open requests as an operator sees them: who and how far, never what."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from machd.capabilities.document import DecodeMode


class OpenRequest(Struct, frozen=True, kw_only=True):
    """One generation that somebody waits for.

    Attributes:
        id: The answer's id; unique.
        request_id: Of its X-Request-Id header; the client may have chosen it, and it need not be
            unique.
        endpoint: Such as ``chat_completions``.
        client: Name of the API key, or ``anonymous``.
        state: ``running`` once one of its sequences has a slot.
        age_s: Since it came.
        ttft_s: From then to its first token; null before that.
        prompt_tokens: Of all its prompts.
        completion_tokens: Of all its completions, so far.
        decode_mode: Null while it waits.
    """

    id: str
    request_id: str
    endpoint: str
    client: str
    state: Literal["waiting", "running"]
    age_s: float
    ttft_s: float | None
    prompt_tokens: int
    completion_tokens: int
    decode_mode: DecodeMode | None


class OpenRequestList(Struct, frozen=True, kw_only=True):
    """Those whose prompt is read, the oldest first."""

    requests: list[OpenRequest]


class AbortedRequests(Struct, frozen=True, kw_only=True):
    """The generations that an operator has ended.

    Asking twice does no harm: one that is on its way out is ended again, and one that has left is
    unknown.
    """

    aborted: list[str]
