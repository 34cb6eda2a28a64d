"""What a row says next, as it followed the same words before: prompt lookup, without a second model.

Answers that quote, correct or continue a text say much of it again. The row's last two tokens are
looked up in its prompt and in what it has said itself, and what followed them where the words before
agree the longest is the guess. While a copy is right it goes on from where it was taken. Where it
breaks off, the place just behind is tried first: who changes a word mostly goes on with the next one.

The text is indexed by pairs of tokens, each with the earlier place of the same pair, so that a token
costs the same to take in however long the text is, and a guess a bounded number of looks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from machd.engine.protocol.sampling import SamplingParams
from machd.engine.protocol.step import ProposerKind

_MAX_LOOKS = 48
"""Earlier places of the last two tokens that are looked at, the latest first."""

_MAX_MATCH_TOKENS = 16
"""Beyond this a longer match says nothing more."""

_WEAK_MATCH_TOKENS = 2
"""After a pair alone the next token is right in a third of the cases in free text; behind the place
where a copy broke off even one token is right in nine of ten."""

_SURE_MATCH_TOKENS = 4
_WEAK_TOKENS = 3
"""After fewer tokens in common no more than so many are guessed, which also tells whoever asked for more
that the guess is not a sure one."""

_STRONG_COPY_TOKENS = 6
"""So long was a copy that its text is worth returning to. Shorter ones are chance: in free text what is
found behind them is right in a third of the cases, behind these in half."""

_NEAR_TOKENS = 12
"""How far behind the place where a copy broke off it is taken up again, and for how long."""

_PAIR_BYTES = 144
"""What a pair of tokens takes in the index: its key, its place and its share of the table."""

_INDEXED_TOKENS = 4096
"""Taken into the index at a time, some 2 ms: others wait for it."""

_NOWHERE = -1


class NgramProposer:
    """Looks up what followed the same words before. The rows share nothing."""

    @property
    def kind(self) -> ProposerKind:
        """Always the same."""
        return ProposerKind.NGRAM

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> NgramRow:
        """Begin with a row's prompt, which is copied now and indexed with the first guess."""
        return NgramRow(prompt, predicted=sampling.predicted_token_ids)

    def close(self) -> None:
        """Nothing is shared."""


class NgramRow:
    """A row's text, and where in it the copy is that the row seems to be making.

    ``_source`` is the place of the token that comes next if the copy goes on, and ``_matched`` the
    number of tokens before it that the row has said as well.
    """

    def __init__(self, prompt: Sequence[int], *, predicted: Sequence[int] = ()) -> None:
        """Hold a prompt's tokens.

        Args:
            prompt: Tokens.
            predicted: Tokens that the client expects; they count as an earlier text, whose copy the row
                begins with.
        """
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
        """Take in what the row has said, and follow the copy for as long as it is one."""
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
        """What followed the same words before; nothing where they are new."""
        if self._source < 0:
            if not self._index():
                return ()
            self._source, self._matched = self._find()
        if self._source < 0:
            return ()
        is_weak = self._matched < _SURE_MATCH_TOKENS
        return self._copied(min(max_tokens, _WEAK_TOKENS) if is_weak else max_tokens)

    def close(self) -> None:
        """Forget the text."""
        self._text, self._earlier, self._latest = array("i"), array("i"), {}
        self._source = self._broken = _NOWHERE

    def _copied(self, count: int) -> tuple[int, ...]:
        """The text from the source on; where it ends, the copy copies itself."""
        copied = self._text[self._source : self._source + count]
        period = len(self._text) - self._source
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return tuple(copied)

    def _index(self) -> bool:
        """Enter pairs that have come since the last time; returns whether those are all."""
        text, latest, earlier = self._text, self._latest, self._earlier
        if text and not earlier:
            earlier.append(_NOWHERE)  # the first token ends no pair
        for place in range(len(earlier), min(len(text), len(earlier) + _INDEXED_TOKENS)):
            pair = text[place - 1] << 32 | text[place]
            earlier.append(latest.get(pair, _NOWHERE))
            latest[pair] = place
        return len(earlier) == len(text)

    def _find(self) -> tuple[int, int]:
        """Where to copy from, and how many tokens speak for it; nowhere and none if none do."""
        source, matched = self._longest_match()
        if matched <= _WEAK_MATCH_TOKENS and self._broken >= 0:
            resumed = self._resumed()
            if resumed >= 0:
                return resumed, self._broken_matched
        return source, matched

    def _longest_match(self) -> tuple[int, int]:
        """Of the earlier places of the last pair the latest with the most words in common before."""
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
        """The place behind the row's last token in the text that it has just left, if it is there."""
        text = self._text
        is_recent = len(text) - self._broken_at <= _NEAR_TOKENS
        if not is_recent or self._broken_matched < _STRONG_COPY_TOKENS:
            return _NOWHERE
        last = len(text) - 1
        for place in range(self._broken, min(self._broken + _NEAR_TOKENS, last)):
            if text[place] == text[last]:
                return place + 1
        return _NOWHERE
