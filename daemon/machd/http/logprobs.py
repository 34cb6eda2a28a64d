"""Log-probabilities in the wire's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from machd.api.logprobs import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionChoiceLogprobs,
    wire_logprob,
)
from machd.engine.protocol import Detokenizer, SampledToken, Tokenizer, TokenLogprob

__all__ = ["TextOffsets", "chat_logprobs", "completion_logprobs", "token_text"]


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as text; U+FFFD stands for bytes that are no whole character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(tokens: Sequence[SampledToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """One entry for each token."""

    def top(entry: TokenLogprob) -> ChatTopLogprob:
        return ChatTopLogprob(
            token=token_text(entry.token_id, tokenizer),
            logprob=wire_logprob(entry.logprob),
            bytes=list(tokenizer.token_bytes(entry.token_id)),
        )

    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=token_text(token.token_id, tokenizer),
                logprob=wire_logprob(_logprob(token)),
                bytes=list(tokenizer.token_bytes(token.token_id)),
                top_logprobs=[top(entry) for entry in token.top_logprobs],
            )
            for token in tokens
        ]
    )


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
        top_logprobs=[_top(token, tokenizer) for token in tokens] if with_top else None,
        text_offset=text_offsets,
    )


class TextOffsets:
    """Where each token's text starts in its choice's whole text, in characters."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        """Start at 0 with a fresh detokenizer."""
        self._detokenizer = detokenizer
        self._offset = 0

    def advance(self, tokens: Sequence[SampledToken]) -> list[int]:
        """The offsets of the next tokens. A token inside a character starts where that does."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token.token_id))
        return offsets


def _top(token: SampledToken, tokenizer: Tokenizer) -> dict[str, float]:
    return {
        token_text(entry.token_id, tokenizer): wire_logprob(entry.logprob)
        for entry in token.top_logprobs
    }


def _logprob(token: SampledToken) -> float:
    assert token.logprob is not None, "log-probabilities come when they were asked for"
    return token.logprob
