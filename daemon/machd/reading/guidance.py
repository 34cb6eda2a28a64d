"""The grammar and the output format of a completion."""

from __future__ import annotations

from dataclasses import dataclass

from machd.reading.output import PLAIN_OUTPUT, OutputFormat
from machd.request.generation import Grammar, Thinking


@dataclass(frozen=True, slots=True)
class Guidance:
    """Grammar, thinking and output format of all choices of a request.

    Attributes:
        grammar: Grammar of the answer after its thoughts; None for any text.
        thinking: Markers of thoughts; None for a model without thoughts.
        predicted_token_ids: Tokens that the answer may repeat.
        output: Makes the answer's parser.
    """

    grammar: Grammar | None = None
    thinking: Thinking | None = None
    predicted_token_ids: tuple[int, ...] = ()
    output: OutputFormat = PLAIN_OUTPUT


NO_GUIDANCE = Guidance()
