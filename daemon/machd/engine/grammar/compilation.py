"""The compilation of one grammar by llguidance, under its limits.

It knows no request: its errors are the ends of sentences that begin with the field of one.
"""

from __future__ import annotations

from collections.abc import Iterable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from machd.clock import thread_cpu_s
from machd.request.schema_bounds import UNSUPPORTED_KEYWORDS

MAX_FORCED_TOKENS = 8192
"""Forced tokens in a row. A recursion that cannot end would force tokens for ever."""

LIMITS = LLParserLimits(
    # The work of one mask, beside the time that matchers measure: with llguidance's own limits a
    # pattern of 12 characters took 0.4 s for one.
    step_max_items=10_000,
    step_lexer_fuel=40_000,
    max_lexer_states=20_000,  # 1 to 2 kB each
    verbose_errors=False,  # its errors would quote the text
)

_MAX_FIRST_S = 0.05
"""Processor time of the first mask; that of a schema with 1,000 properties takes 0.01."""

_TRIES = 2
"""A virtual machine that its host holds up counts the pause as processor time."""

_MAX_MESSAGE_CHARACTERS = 600

_STOP_REASONS = {
    "NoExtension": "no text can satisfy it",
    "NoExtensionBias": "no text can satisfy it",
    "LexerTooComplex": "too complex to be followed in time",
    "ParserTooComplex": "too complex to be followed in time",
}
_WARNINGS = {
    "format": "Unknown format: ",
    "oneOf": "oneOf not fully supported",
    "minProperties": "min/maxProperties only supported",
    "maxProperties": "min/maxProperties only supported",
    **{keyword: f'"{keyword}"' for keyword in UNSUPPORTED_KEYWORDS},
}
"""Keyword of a JSON schema to llguidance's warning that it is ignored."""


class CompilationError(Exception):
    """A grammar that cannot be compiled; the message is for the client."""


def compile_source(vocabulary: LLTokenizer, source: str, eos_token_ids: Iterable[int]) -> LLMatcher:
    """Compile a grammar and write its first mask, which builds most of what later ones need.

    Raises:
        CompilationError: It has a mistake, nothing satisfies it, or it is beyond the limits.
    """
    ends = sum(1 << one for one in eos_token_ids)
    for _ in range(_TRIES):
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
        _check(matcher)
        # Some mistakes show only in the first mask.
        before_s = thread_cpu_s()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        forced = matcher.deep_copy().compute_ff_tokens()
        took_s = thread_cpu_s() - before_s
        _check(matcher)
        if not mask & ~ends and not matcher.is_accepting():
            raise CompilationError("no text can satisfy it")
        if len(forced) > MAX_FORCED_TOKENS:
            raise CompilationError(
                f"it begins with more than {MAX_FORCED_TOKENS} tokens that are always the same, or "
                "never ends"
            )
        if took_s <= _MAX_FIRST_S:
            return matcher
    raise CompilationError("too complex to be followed in time")


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise CompilationError(_sentence(matcher.get_error()))


def _sentence(error: str) -> str:
    """Put an error of llguidance into words for a client."""
    text = " ".join(error.split())
    if "Unable to determine if regex is empty" in text:  # the rest spells out the regex
        return "too complex: it intersects too many patterns"
    if "panic" in text or "<backtrace>" in text:
        return "too large for the compiler"
    reason, mark, _ = text.partition("<non-verbose/>")
    if mark:
        # llguidance gives the name of its stop reason alone.
        return _STOP_REASONS.get(reason.strip(" :"), "it cannot be followed")
    return text[:_MAX_MESSAGE_CHARACTERS]


def ignored_keywords(warnings: Iterable[str], source: str) -> frozenset[str]:
    """List the keywords of a schema that its grammar does not enforce, by llguidance's warnings."""
    text = "\n".join(warnings)
    named = {keyword for keyword, words in _WARNINGS.items() if words in text}
    return frozenset(one for one in named if one in source)
