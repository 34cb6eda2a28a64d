"""The grammar and the output format of a completion."""

from __future__ import annotations

from dataclasses import dataclass

from machd.reading.output import PLAIN_OUTPUT, OutputFormat
from machd.request.generation import Grammar, Thinking


@dataclass(frozen=True, slots=True)
class Guidance:
    """The same for all choices of a request.

    Attributes:
        grammar: What the answer may say after its thoughts; None for anything.
        thinking: Where thoughts begin and end; None for a model without.
        predicted_token_ids: Tokens that the answer may repeat.
        output: How the answer is read.
    """

    grammar: Grammar | None = None
    thinking: Thinking | None = None
    predicted_token_ids: tuple[int, ...] = ()
    output: OutputFormat = PLAIN_OUTPUT


NO_GUIDANCE = Guidance()
