"""mlx-lm's knowledge of how a model writes thoughts and calls, taken once for each tokenizer."""

from __future__ import annotations

from dataclasses import replace

from machd.engine.backend.untyped import WrappedTokenizer
from machd.engine.protocol.chat_format import ChatFormat


def read_chat_format(wrapped: WrappedTokenizer, rendered: ChatFormat) -> ChatFormat:
    """Add what mlx-lm has inferred of a tokenizer to what was found by rendering."""
    known = replace(
        rendered,
        reasoning_markers=(
            (wrapped.think_start, wrapped.think_end) if wrapped.has_thinking else None
        ),
        structural_markers=tuple(wrapped.structural_markers),
        transitions=dict(wrapped.response_transitions),
        first_state=wrapped.response_initial_state,
    )
    parser = wrapped.tool_parser if wrapped.has_tool_calling else None
    if parser is None:
        return known
    # mlx-lm's loader notes the format; of another loader's tokenizer the parser's module tells it.
    named = getattr(wrapped, "init_kwargs", {}).get("tool_parser_type")
    return replace(
        known,
        tool_format=str(named or parser.__module__.rpartition(".")[2]),
        tool_markers=(wrapped.tool_call_start, wrapped.tool_call_end or ""),
        parse=parser,
    )
