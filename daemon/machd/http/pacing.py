"""Pacing of a stream: a number of tokens for each event of a choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from machd.generations.choice import ChoiceDelta
from machd.reading.output import joined_pieces


class Pacer:
    """Deltas held back until an event is due.

    The first piece of text of a choice is due at once, for the sake of the time to first token,
    and its end and an output that is no token always are. A piece without text is not: half a character is of no use.
    """

    def __init__(self, interval_tokens: int) -> None:
        """Let an event have ``interval_tokens`` tokens."""
        self._interval_tokens = interval_tokens
        self._held: dict[int, ChoiceDelta] = {}
        self._begun: set[int] = set()

    def due(self, deltas: Iterable[ChoiceDelta]) -> Iterator[ChoiceDelta]:
        """Take in what has come, and give what is to be sent now."""
        for delta in deltas:
            held = self._held.pop(delta.index, None)
            merged = delta if held is None else merge_deltas([held, delta])
            if self._is_due(merged):
                if merged.text:
                    self._begun.add(delta.index)
                yield merged
            else:
                self._held[delta.index] = merged

    def rest(self) -> list[ChoiceDelta]:
        """Return the deltas still held back, once no more will come."""
        rest, self._held = list(self._held.values()), {}
        return rest

    def _is_due(self, delta: ChoiceDelta) -> bool:
        tokens = len(delta.tokens)
        if delta.finish_reason is not None or tokens < len(delta.outputs):
            return True
        if not delta.text:
            return False
        return delta.index not in self._begun or tokens >= self._interval_tokens


def merge_deltas(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Join the deltas of one choice, in order; at least one."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return ChoiceDelta(
        last.index,
        "".join(one.text for one in deltas),
        tuple(output for one in deltas for output in one.outputs),
        last.finish_reason,
        joined_pieces(piece for one in deltas for piece in one.pieces),
        last.stop,
        last.stop_token,
    )
