"""Cache diagnostics of ``POST /v1/messages``: where a request differs from the one that an earlier answer belongs to.

The fields are those of https://platform.claude.com/docs/en/build-with-claude/cache-diagnostics, and of
``types/diagnostics.py`` in Anthropic's Python client. Like the API, machd compares requests and not what the cache has; what
that had is told by ``return_cache_diagnosis``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Struct

from machd.dialects.anthropic.answer import (
    CacheMissReason,
    Diagnostics,
    MessagesChanged,
    ModelChanged,
    PreviousMessageNotFound,
    SystemChanged,
    ToolsChanged,
    Unavailable,
)
from machd.dialects.anthropic.request import MessagesRequest
from machd.dialects.anthropic.turns import ToolResultBlock, blocks_of
from machd.generations.generation import GenerationUsage
from machd.generations.identity import GenerationIdentity
from machd.generations.prompt_fingerprints import (
    KeptFingerprint,
    PromptChange,
    PromptFingerprint,
    PromptFingerprints,
)

_Change: TypeAlias = type[ModelChanged | SystemChanged | ToolsChanged | MessagesChanged]

_CHANGES: dict[PromptChange, _Change] = {
    PromptChange.MODEL: ModelChanged,
    PromptChange.SYSTEM: SystemChanged,
    PromptChange.TOOLS: ToolsChanged,
    PromptChange.MESSAGES: MessagesChanged,
}


def fingerprint(body: MessagesRequest, model: str) -> PromptFingerprint:
    """Hash a request's parts, for a worker thread: marks of what to cache are no part of the prompt."""
    encode = msgspec.json.encode
    return PromptFingerprint.of(
        model=model,
        system=encode(_unmarked(blocks_of(body.system))),
        tools=encode(_unmarked(body.tools or [])),
        settings=encode([body.thinking, body.tool_choice, body.output_config]),
        messages=(encode([one.role, _unmarked(blocks_of(one.content))]) for one in body.messages),
    )


def _unmarked(blocks: Sequence[Struct]) -> list[Struct]:
    return [_without_mark(one) for one in blocks]


def _without_mark(block: Struct) -> Struct:
    changes: dict[str, object] = {}
    if hasattr(block, "cache_control"):
        changes["cache_control"] = UNSET
    if isinstance(block, ToolResultBlock):
        changes["content"] = _unmarked(blocks_of(block.content))
    return msgspec.structs.replace(block, **changes)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A request that asks to be compared with an earlier one.

    Attributes:
        asks: False for a first turn, which is compared with nothing.
        previous: The earlier request; None if it is not kept.
    """

    kept: PromptFingerprints
    identity: GenerationIdentity
    own: PromptFingerprint
    asks: bool
    previous: KeptFingerprint | None

    def diagnostics(self, usage: GenerationUsage) -> Diagnostics | None:
        """Keep the request for later ones; returns where it differs from the earlier one, and None if nowhere."""
        identity = self.identity
        self.kept.put(
            identity.client, identity.generation_id, self.own, prompt_tokens=usage.prompt_tokens
        )
        reason = self._reason(usage)
        return None if reason is None else Diagnostics(cache_miss_reason=reason)

    def _reason(self, usage: GenerationUsage) -> CacheMissReason | None:
        if not self.asks:
            return None
        if self.previous is None:
            return PreviousMessageNotFound()
        change = self.previous.change(self.own)
        if change is None:
            return None
        if change not in _CHANGES:
            return Unavailable()
        missed = max(0, self.previous.prompt_tokens - usage.cached_tokens)
        return _CHANGES[change](cache_missed_input_tokens=missed)
