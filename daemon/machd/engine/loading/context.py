"""How many positions a model has."""

from __future__ import annotations

from machd.errors import SettingsError

UNBOUNDED_CONTEXT_TOKENS = 32_768
"""For a model that names no limit, as recurrent ones need none: what a request may take unless
``model.max_context_tokens`` says otherwise."""

_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "n_positions",
    "n_ctx",
    "seq_length",
)


def context_tokens(config: dict[str, object], max_context_tokens: int | None) -> int:
    """Positions that a prompt and its completion share.

    Args:
        config: ``config.json``; models with several parts have theirs under ``text_config``.
        max_context_tokens: The user's limit; None for the model's own.

    Raises:
        SettingsError: The user's limit is above the model's.
    """
    own = _own_context_tokens(config)
    if max_context_tokens is None:
        return own or UNBOUNDED_CONTEXT_TOKENS
    if own is not None and max_context_tokens > own:
        raise SettingsError(
            [f"model.max_context_tokens: the model has {own}, fewer than {max_context_tokens}"]
        )
    return max_context_tokens


def _own_context_tokens(config: dict[str, object]) -> int | None:
    text_config = config.get("text_config")
    places = [config, text_config] if isinstance(text_config, dict) else [config]
    for place in places:
        for key in _KEYS:
            value = place.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
