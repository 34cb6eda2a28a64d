"""Prompt lookup: the tokens that followed the same ones before, without a second model.

Answers that quote, correct or continue a text repeat much of it. The row's last two tokens are looked up
in its prompt and completion; the draft is the text behind the place where most tokens before agree. While
a copy is right it continues from its source. Where it breaks off, the place just behind is tried first:
an edit that changes a word mostly continues with the next one.

The text is indexed by pairs of tokens, each with the earlier place of the same pair, so that a token
costs the same to index however long the text is, and a proposal a bounded number of looks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from machd.engine.protocol.step import ProposerKind
from machd.request.generation import SamplingParams

_MAX_LOOKS = 48
"""Earlier places of the last two tokens that are compared, the latest first."""

_MAX_MATCH_TOKENS = 16
"""A longer match is no better evidence."""

_WEAK_MATCH_TOKENS = 2
"""After a pair alone the next token is right in a third of the cases in free text; behind the place
where a copy broke off even one token is right in nine of ten."""

_SURE_MATCH_TOKENS = 4
_WEAK_TOKENS = 3
"""Draft tokens behind a match of fewer tokens in common."""

_STRONG_COPY_TOKENS = 6
"""Length of a copy whose source is worth returning to. Shorter ones are chance: in free text the tokens
behind them are right in a third of the cases, behind these in half."""

_NEAR_TOKENS = 12
"""Tokens behind the end of a copy in which it may resume."""

_PAIR_BYTES = 144
"""Bytes of a pair of tokens in the index: key, place and share of the table."""

_INDEXED_TOKENS = 4096
"""Tokens indexed at a time, some 2 ms: other rows wait for it."""

_NOWHERE = -1


class NgramProposer:
    """Proposer by prompt lookup. The rows share nothing."""

    @property
    def kind(self) -> ProposerKind:
        """Prompt lookup."""
        return ProposerKind.NGRAM

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> NgramRow:
        """Begin with a row's prompt, which is indexed with the first proposal."""
        return NgramRow(prompt, predicted=sampling.predicted_token_ids)

    def close(self) -> None:
        """Rows share nothing."""


class NgramRow:
    """A row's text, and the place in it that the row seems to copy from.

    ``_source`` is the place of the next token if the copy continues, ``_matched`` the number of tokens
    before it that agree with the row's last ones.
    """

    def __init__(self, prompt: Sequence[int], *, predicted: Sequence[int] = ()) -> None:
        """Hold a prompt's tokens; ``predicted`` is an earlier text, which the row begins to copy."""
        self._text = array("i", [*predicted, *prompt])
        self._latest: dict[int, int] = {}
        self._earlier = array("i")
        self._source = 0 if predicted else _NOWHERE
        self._matched = _SURE_MATCH_TOKENS if predicted else 0
        self._broken = _NOWHERE
        self._broken_matched = 0
        self._broken_at = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of the text and its index."""
        arrays = (self._text, self._earlier)
        held = sum(len(one) * one.itemsize for one in arrays)
        return held + len(self._latest) * _PAIR_BYTES

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append generated tokens, and follow the copy as long as they agree."""
        text, source = self._text, self._source
        for token_id in token_ids:
            if source >= 0:
                if text[source] == token_id:
                    source += 1
                    self._matched += 1
                else:
                    self._broken, self._broken_matched = source, self._matched
                    self._broken_at = len(text)
                    source = _NOWHERE
            text.append(token_id)
        self._source = source

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Propose the tokens behind the copy's source; empty where there is none."""
        if self._source < 0:
            if not self._index():
                return ()
            self._source, self._matched = self._find()
        if self._source < 0:
            return ()
        is_weak = self._matched < _SURE_MATCH_TOKENS
        return self._copied(min(max_tokens, _WEAK_TOKENS) if is_weak else max_tokens)

    def close(self) -> None:
        """Drop the text and its index."""
        self._text, self._earlier, self._latest = array("i"), array("i"), {}
        self._source = self._broken = _NOWHERE

    def _copied(self, count: int) -> tuple[int, ...]:
        """Return the text from the source on; at its end the copy repeats itself."""
        copied = self._text[self._source : self._source + count]
        period = len(self._text) - self._source
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return tuple(copied)

    def _index(self) -> bool:
        """Index the next new pairs; returns True once all are indexed."""
        text, latest, earlier = self._text, self._latest, self._earlier
        if text and not earlier:
            earlier.append(_NOWHERE)  # the first token ends no pair
        for place in range(len(earlier), min(len(text), len(earlier) + _INDEXED_TOKENS)):
            pair = text[place - 1] << 32 | text[place]
            earlier.append(latest.get(pair, _NOWHERE))
            latest[pair] = place
        return len(earlier) == len(text)

    def _find(self) -> tuple[int, int]:
        """Find a source and its matching tokens; _NOWHERE and 0 if there is none."""
        source, matched = self._longest_match()
        if matched <= _WEAK_MATCH_TOKENS and self._broken >= 0:
            resumed = self._resumed()
            if resumed >= 0:
                return resumed, self._broken_matched
        return source, matched

    def _longest_match(self) -> tuple[int, int]:
        """Find the latest earlier place of the last pair with the longest match before it."""
        text, earlier = self._text, self._earlier
        end = len(text) - 1
        place = earlier[end] if end > 0 else _NOWHERE
        source, longest = _NOWHERE, 0
        for _ in range(_MAX_LOOKS):
            if place < 0 or longest >= _MAX_MATCH_TOKENS:
                break
            length = 2
            bound = min(_MAX_MATCH_TOKENS, place + 1)
            while length < bound and text[place - length] == text[end - length]:
                length += 1
            if length > longest:
                source, longest = place + 1, length
            place = earlier[place]
        return source, longest

    def _resumed(self) -> int:
        """Find the row's last token just behind the end of the broken copy; _NOWHERE if not there."""
        text = self._text
        is_recent = len(text) - self._broken_at <= _NEAR_TOKENS
        if not is_recent or self._broken_matched < _STRONG_COPY_TOKENS:
            return _NOWHERE
        last = len(text) - 1
        for place in range(self._broken, min(self._broken + _NEAR_TOKENS, last)):
            if text[place] == text[last]:
                return place + 1
        return _NOWHERE
