"""Log-probabilities in the two shapes of OpenAI's API. All are natural logarithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from machd.engine.protocol.step import PromptLogprob, SampledToken, ScoredPrompt, TokenLogprob
from machd.engine.protocol.tokenizer import Detokenizer, Tokenizer
from machd.generations.choice import ChoiceDelta

LOGPROB_FLOOR = -9999.0
"""What OpenAI's API writes for a token of no probability; JSON has no minus infinity."""


def wire_logprob(logprob: float) -> float:
    """A log-probability that JSON can carry: finite, and at least ``LOGPROB_FLOOR``."""
    # The floor stands first so that NaN, which no comparison prefers, becomes the floor too.
    return max(LOGPROB_FLOOR, logprob)


class ChatTopLogprob(Struct, frozen=True, kw_only=True):
    """One alternative at a position.

    Attributes:
        token: The token as text; U+FFFD stands for bytes that are no whole character.
        bytes: The token's own bytes, 0 to 255 each.
    """

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(ChatTopLogprob, frozen=True, kw_only=True):
    """The token at a position, with its likeliest alternatives, best first."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """``logprobs`` of a chat choice: one entry for each token that the choice brings."""

    content: list[ChatTokenLogprob] | None
    refusal: None = None


class CompletionChoiceLogprobs(Struct, frozen=True, kw_only=True):
    """``logprobs`` of a completion's choice: columns of equal length, one row a token.

    Attributes:
        token_logprobs: Null for the first token of an echoed prompt, which nothing precedes.
        top_logprobs: Text of a token to its log-probability, of the likeliest and, as OpenAI has it, of the
            token itself where it is none of them; null where none were asked for, and for the first token of
            an echoed prompt.
        text_offset: Where each token's text starts in the choice's whole text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptTokenLogprob(Struct, frozen=True, kw_only=True):
    """A token at a position of the prompt, in vLLM's shape.

    Attributes:
        rank: 1 for the most likely token of the vocabulary, 2 for the next one.
        decoded_token: The token as text; U+FFFD stands for bytes that are no whole character.
    """

    logprob: float
    rank: int
    decoded_token: str


PromptTokenLogprobs: TypeAlias = list[dict[str, PromptTokenLogprob] | None]
"""``prompt_logprobs``: one entry for each token of the prompt, null for the first.

An entry maps token ids to their log-probabilities: the prompt's own token, then the likeliest ones.
"""


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as text; U+FFFD stands for bytes that are no whole character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(tokens: Sequence[SampledToken], tokenizer: Tokenizer) -> list[ChatTokenLogprob]:
    """One entry for each token."""

    def top(entry: TokenLogprob) -> ChatTopLogprob:
        return ChatTopLogprob(
            token=token_text(entry.token_id, tokenizer),
            logprob=wire_logprob(entry.logprob),
            bytes=list(tokenizer.token_bytes(entry.token_id)),
        )

    return [
        ChatTokenLogprob(
            token=token_text(token.token_id, tokenizer),
            logprob=wire_logprob(_logprob(token)),
            bytes=list(tokenizer.token_bytes(token.token_id)),
            top_logprobs=[top(entry) for entry in token.top_logprobs],
        )
        for token in tokens
    ]


class GrowingLogprobs:
    """Log-probabilities of one choice's tokens; those without a frame yet wait for the next one."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Begin without tokens; ``tokenizer`` spells them, and is None where none are wanted."""
        self._tokenizer = tokenizer
        self._entries: list[ChatTokenLogprob] = []
        self._framed = 0

    def push(self, tokens: Sequence[SampledToken]) -> None:
        """Append the next tokens."""
        if self._tokenizer is not None:
            self._entries += chat_logprobs(tokens, self._tokenizer)

    def unframed(self) -> list[ChatTokenLogprob]:
        """Return the entries since the last frame, which are now in one."""
        entries, self._framed = self._entries[self._framed :], len(self._entries)
        return entries

    def finish(self) -> list[ChatTokenLogprob]:
        """Return all entries."""
        return self._entries


def completion_logprobs(
    tokens: Sequence[SampledToken],
    tokenizer: Tokenizer,
    *,
    text_offsets: list[int],
    with_top: bool,
) -> CompletionChoiceLogprobs:
    """Columns, one row a token; ``text_offsets`` says where each token's text starts."""
    return CompletionChoiceLogprobs(
        tokens=[token_text(token.token_id, tokenizer) for token in tokens],
        token_logprobs=[wire_logprob(_logprob(token)) for token in tokens],
        top_logprobs=[
            _top(token.top_logprobs, TokenLogprob(token.token_id, _logprob(token)), tokenizer)
            for token in tokens
        ]
        if with_top
        else None,
        text_offset=text_offsets,
    )


def prompt_logprobs(delta: ChoiceDelta) -> tuple[PromptLogprob, ...] | None:
    """Log-probabilities of the prompt, which come with one of a choice's deltas; None with the others."""
    return next((one.logprobs for one in delta.outputs if isinstance(one, ScoredPrompt)), None)


def prompt_columns(
    prompt: Sequence[int],
    logprobs: Sequence[PromptLogprob],
    tokenizer: Tokenizer,
    *,
    text: str,
    top_logprobs: int,
) -> CompletionChoiceLogprobs:
    """Columns of an echoed prompt; ``logprobs`` and ``top_logprobs`` are of all tokens but the first."""
    tops = [
        _top(one.top_logprobs[:top_logprobs], TokenLogprob(one.token_id, one.logprob), tokenizer)
        for one in logprobs
    ]
    return CompletionChoiceLogprobs(
        tokens=[token_text(one, tokenizer) for one in prompt],
        token_logprobs=[None, *(wire_logprob(one.logprob) for one in logprobs)],
        top_logprobs=[None, *tops] if top_logprobs else None,
        text_offset=_prompt_offsets(prompt, tokenizer, text),
    )


def joined_columns(parts: Sequence[CompletionChoiceLogprobs]) -> CompletionChoiceLogprobs:
    """The rows of all parts, in order; at least one. Either all have alternatives or none has."""
    tops = [row for one in parts for row in one.top_logprobs or ()]
    return CompletionChoiceLogprobs(
        tokens=[row for one in parts for row in one.tokens],
        token_logprobs=[row for one in parts for row in one.token_logprobs],
        top_logprobs=None if parts[0].top_logprobs is None else tops,
        text_offset=[row for one in parts for row in one.text_offset],
    )


def prompt_token_logprobs(
    logprobs: Sequence[PromptLogprob], tokenizer: Tokenizer, *, top_logprobs: int
) -> PromptTokenLogprobs:
    """``prompt_logprobs`` in vLLM's shape; ``logprobs`` are of all tokens but the first."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptTokenLogprob:
        return PromptTokenLogprob(
            logprob=wire_logprob(logprob),
            rank=rank,
            decoded_token=token_text(token_id, tokenizer),
        )

    def entries(one: PromptLogprob) -> dict[str, PromptTokenLogprob]:
        found = {str(one.token_id): entry(one.token_id, one.logprob, one.rank)}
        for rank, top in enumerate(one.top_logprobs[:top_logprobs], start=1):
            found.setdefault(str(top.token_id), entry(top.token_id, top.logprob, rank))
        return found

    return [None, *map(entries, logprobs)]


class TextOffsets:
    """Offsets of tokens in their choice's whole text, in characters."""

    def __init__(self, detokenizer: Detokenizer, *, start: int = 0) -> None:
        """Start at the first character of the completion with a fresh detokenizer."""
        self._detokenizer = detokenizer
        self._offset = start

    def advance(self, tokens: Sequence[SampledToken]) -> list[int]:
        """The offsets of the next tokens. A token inside a character starts where that does."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token.token_id))
        return offsets


def _prompt_offsets(prompt: Sequence[int], tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the offset of each token of a prompt in its text, which holds special tokens if it was sent so."""
    detokenizer, special = tokenizer.detokenizer(), tokenizer.special_token_ids
    offsets, offset = [], 0
    for token_id in prompt:
        offsets.append(min(offset, len(text)))
        offset += len(detokenizer.push(token_id))
        if token_id in special and text.startswith(name := token_text(token_id, tokenizer), offset):
            offset += len(name)
    return offsets


def _top(
    likeliest: Sequence[TokenLogprob], own: TokenLogprob, tokenizer: Tokenizer
) -> dict[str, float]:
    """Texts to log-probabilities, best first, the token's own among them.

    Of tokens with the same text the best one counts.
    """
    top: dict[str, float] = {}
    for entry in (*likeliest, own):
        top.setdefault(token_text(entry.token_id, tokenizer), wire_logprob(entry.logprob))
    return top


def _logprob(token: SampledToken) -> float:
    assert token.logprob is not None, "log-probabilities come when they were asked for"
    return token.logprob
