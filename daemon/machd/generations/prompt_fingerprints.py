"""Fingerprints of prompts by the ids of their answers, with which a client has two of its requests compared.

They hold hashes and token counts, no texts. They are in memory, a bounded number for each client, and lost when the
daemon ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MAX_FINGERPRINTS = 1024
"""Fingerprints of one client: about 0.5 MiB."""


class PromptChange(StrEnum):
    """The first part of a request in which it differs from an earlier one."""

    MODEL = "model"
    SYSTEM = "system"
    TOOLS = "tools"
    SETTINGS = "settings"
    """What else changes a prompt, such as whether the model thinks."""

    MESSAGES = "messages"
    """An earlier message was changed or left out, instead of new ones following it."""


_PARTS = (PromptChange.MODEL, PromptChange.SYSTEM, PromptChange.TOOLS, PromptChange.SETTINGS)


@dataclass(frozen=True, slots=True)
class PromptFingerprint:
    """Hashes of a request's parts.

    Attributes:
        parts: Of model, system, tools and settings.
        messages: Of the first ``n`` messages, for each ``n`` from 0.
    """

    parts: tuple[int, ...]
    messages: tuple[int, ...]

    @classmethod
    def of(
        cls, *, model: str, system: bytes, tools: bytes, settings: bytes, messages: Iterable[bytes]
    ) -> PromptFingerprint:
        """Hash the parts of a request."""
        hashes = [0]
        for one in messages:
            hashes.append(hash((hashes[-1], one)))
        return cls((hash(model), hash(system), hash(tools), hash(settings)), tuple(hashes))


@dataclass(frozen=True, slots=True)
class KeptFingerprint:
    """An earlier request.

    Attributes:
        parts: As of :class:`PromptFingerprint`.
        messages_count: Number of its messages.
        messages: Hash of all of them.
        prompt_tokens: Tokens of its prompt.
    """

    parts: tuple[int, ...]
    messages_count: int
    messages: int
    prompt_tokens: int

    def change(self, later: PromptFingerprint) -> PromptChange | None:
        """Return where a later request differs; None where it only goes on behind this one."""
        for before, now, part in zip(self.parts, later.parts, _PARTS, strict=True):
            if before != now:
                return part
        is_kept = later.messages[self.messages_count : self.messages_count + 1] == (self.messages,)
        return None if is_kept else PromptChange.MESSAGES


class PromptFingerprints:
    """The newest fingerprints of each client."""

    def __init__(self, max_fingerprints: int = MAX_FINGERPRINTS) -> None:
        """Start empty."""
        self._max = max_fingerprints
        self._clients: dict[str, OrderedDict[str, KeptFingerprint]] = {}

    def get(self, client: str, answer_id: str) -> KeptFingerprint | None:
        """Return the fingerprint of the request that an answer belongs to; None if it is not kept for this client."""
        return self._clients.get(client, OrderedDict()).get(answer_id)

    def put(
        self, client: str, answer_id: str, one: PromptFingerprint, *, prompt_tokens: int
    ) -> None:
        """Keep a request's fingerprint, and drop the client's oldest one if it has too many."""
        kept = self._clients.setdefault(client, OrderedDict())
        count = len(one.messages) - 1
        kept[answer_id] = KeptFingerprint(one.parts, count, one.messages[-1], prompt_tokens)
        while len(kept) > self._max:
            kept.popitem(last=False)
