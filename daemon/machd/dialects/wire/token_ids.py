"""Token ids that a client names, held against the vocabulary of the model that will see them."""

from __future__ import annotations

from collections.abc import Iterable

from machd.errors import InvalidRequestError


def check_token_ids(token_ids: Iterable[int], *, vocabulary_tokens: int, param: str) -> None:
    """Refuse ids that the model does not have.

    Args:
        token_ids: Ids as the client sent them, already inside ``bounds.TokenId``.
        vocabulary_tokens: Width of the model's logits; ids count from 0.
        param: The request field that holds them.

    Raises:
        InvalidRequestError: One of them is outside; the message names the first.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary_tokens:
            raise InvalidRequestError(
                f"{param}: token id {token_id} is not in the model's vocabulary "
                f"(0 to {vocabulary_tokens - 1})",
                param=param,
            )
