"""Responses that later requests may refer to: in memory, bounded, gone with the daemon.

``previous_response_id`` and ``GET /v1/responses/{id}`` need what was said before. It is kept as the
bytes that went over the wire, within a number of responses and of bytes. A response holds its own
turn alone and stands on the turn before it, so a conversation counts its length and not the square
of it. The namespace that holds the most makes room, so no client can evict what the others keep.
Nothing of it is ever logged or written to a disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Turn:
    """One request and its response in a conversation. Compared by identity.

    Attributes:
        items: An item each, as JSON.
        previous: The turn before it; None for the first.
    """

    items: tuple[bytes, ...]
    previous: Turn | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its own items."""
        return sum(map(len, self.items))

    def lineage(self) -> list[Turn]:
        """This turn and all before it, latest first."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns

    def conversation(self) -> tuple[bytes, ...]:
        """The items of the conversation up to and with this turn, oldest first."""
        return tuple(item for turn in reversed(self.lineage()) for item in turn.items)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoredResponse:
    """One finished response, with all that led to it.

    Attributes:
        answer: The response object, as JSON.
        turn: What it adds to the conversation.
        output_ids: Ids of the turn's last items, which the response itself made.
    """

    answer: bytes
    turn: Turn
    output_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        """Hold the ids against the items."""
        assert len(self.output_ids) <= len(self.turn.items), "what was made is part of what is kept"

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its answer and of the whole conversation."""
        return len(self.answer) + sum(turn.size_bytes for turn in self.turn.lineage())

    def item(self, item_id: str) -> bytes:
        """An item that it made."""
        first = len(self.turn.items) - len(self.output_ids)
        return self.turn.items[first + self.output_ids.index(item_id)]


@dataclass(slots=True)
class _Namespace:
    """The responses of one API key, those used last at the end.

    Attributes:
        makers: Id of an item to that of the response that made it.
        holders: Turns that are kept, and how many responses and later turns stand on each.
    """

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    makers: dict[str, str] = field(default_factory=dict)
    holders: dict[Turn, int] = field(default_factory=dict)
    size_bytes: int = 0

    def add(self, response_id: str, response: StoredResponse) -> None:
        self.responses[response_id] = response
        self.size_bytes += len(response.answer)
        self._hold(response.turn)
        for item_id in response.output_ids:
            self.makers[item_id] = response_id

    def remove(self, response_id: str) -> None:
        response = self.responses.pop(response_id)
        self.size_bytes -= len(response.answer)
        self._release(response.turn)
        for item_id in response.output_ids:
            if self.makers.get(item_id) == response_id:
                del self.makers[item_id]

    def _hold(self, turn: Turn | None) -> None:
        # The turns before may be gone from here: a request holds them while it is answered.
        while turn is not None:
            self.holders[turn] = self.holders.get(turn, 0) + 1
            if self.holders[turn] > 1:
                return
            self.size_bytes += turn.size_bytes
            turn = turn.previous

    def _release(self, turn: Turn | None) -> None:
        while turn is not None:
            self.holders[turn] -= 1
            if self.holders[turn]:
                return
            del self.holders[turn]
            self.size_bytes -= turn.size_bytes
            turn = turn.previous


class ResponseStore:
    """Responses by namespace and id. Owned by the event loop: no other thread may call it.

    A namespace is the name of an API key. No request finds another key's responses.
    """

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        """Start empty; with 0 for either bound nothing is ever kept."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._namespaces: dict[str, _Namespace] = {}
        self._evictions = 0

    def __len__(self) -> int:
        """Responses that are kept, over all namespaces."""
        return sum(len(one.responses) for one in self._namespaces.values())

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all; a turn that several stand on counts once."""
        return sum(one.size_bytes for one in self._namespaces.values())

    @property
    def evictions(self) -> int:
        """Responses that made room for others, since the start."""
        return self._evictions

    def put(self, namespace: str, response_id: str, response: StoredResponse) -> bool:
        """Keep a response, at the cost of the namespaces that have the most.

        Of such a namespace go those responses that were not used for the longest time.

        Returns:
            Whether it is kept. One that is larger than all the room there is is not, and nothing is
            given up for it; nor is one that is by itself more than what any other namespace has.
        """
        self.delete(namespace, response_id)
        if response.size_bytes > self._max_bytes or self._max_responses < 1:
            return False
        self._namespaces.setdefault(namespace, _Namespace()).add(response_id, response)
        self._make_room(newcomer=namespace)
        return self._find(namespace, response_id) is not None

    def set_bounds(self, *, max_responses: int, max_bytes: int) -> None:
        """Keep to other bounds from now on; what is too much for them goes."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._make_room(newcomer="")

    def clear(self) -> None:
        """Forget everything; none of it counts as evicted."""
        self._namespaces.clear()

    def get(self, namespace: str, response_id: str) -> StoredResponse | None:
        """A response, which counts as used now; None where there is none of that id."""
        found = self._find(namespace, response_id)
        if found is not None:
            self._namespaces[namespace].responses.move_to_end(response_id)
        return found

    def item(self, namespace: str, item_id: str) -> bytes | None:
        """An item that a stored response made, which then counts as used; None for any other."""
        if namespace not in self._namespaces:
            return None
        response_id = self._namespaces[namespace].makers.get(item_id)
        maker = None if response_id is None else self.get(namespace, response_id)
        return None if maker is None else maker.item(item_id)

    def delete(self, namespace: str, response_id: str) -> bool:
        """Forget a response; those that continue it stay. Returns whether there was one."""
        if self._find(namespace, response_id) is None:
            return False
        self._remove(namespace, response_id)
        return True

    def _find(self, namespace: str, response_id: str) -> StoredResponse | None:
        inside = self._namespaces.get(namespace)
        return None if inside is None else inside.responses.get(response_id)

    def _make_room(self, *, newcomer: str) -> None:
        while len(self) > self._max_responses:
            self._evict(lambda one: len(one.responses), newcomer=newcomer)
        while self.size_bytes > self._max_bytes:
            self._evict(lambda one: one.size_bytes, newcomer=newcomer)

    def _evict(self, size: Callable[[_Namespace], int], *, newcomer: str) -> None:
        """Drop the least recently used of the largest; among equals, not the newcomer's."""
        namespace = max(
            self._namespaces,
            key=lambda name: (size(self._namespaces[name]), name != newcomer, name),
        )
        self._remove(namespace, next(iter(self._namespaces[namespace].responses)))
        self._evictions += 1

    def _remove(self, namespace: str, response_id: str) -> None:
        self._namespaces[namespace].remove(response_id)
        if not self._namespaces[namespace].responses:
            del self._namespaces[namespace]
