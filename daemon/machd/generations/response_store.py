"""Responses that later requests may refer to: in memory, bounded, lost when the daemon ends.

``previous_response_id`` and ``GET /v1/responses/{id}`` need earlier responses. They are kept as the bytes
that were sent, up to a number of responses and of bytes. A response has its own turn and refers to the
turn before it, so a conversation's size is linear in its length. Responses of the largest namespace are
evicted first, so no client can evict those of the others. None is ever logged or written to a disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Turn:
    """One request and its response in a conversation. Compared by identity.

    Attributes:
        items: Items of the conversation, as JSON.
        previous: The turn before it; None for the first.
    """

    items: tuple[bytes, ...]
    previous: Turn | None = None

    @property
    def size_bytes(self) -> int:
        """Size of its own items."""
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
    """One finished response with its conversation.

    Attributes:
        answer: The response object, as JSON.
        turn: Its turn of the conversation.
        output_ids: Ids of the turn's last items, the response's output.
    """

    answer: bytes
    turn: Turn
    output_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the ids against the items."""
        assert len(self.output_ids) <= len(self.turn.items), "what was made is part of what is kept"

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its answer and of the whole conversation."""
        return len(self.answer) + sum(turn.size_bytes for turn in self.turn.lineage())

    def item(self, item_id: str) -> bytes:
        """Return an item of its output."""
        first = len(self.turn.items) - len(self.output_ids)
        return self.turn.items[first + self.output_ids.index(item_id)]


@dataclass(slots=True)
class _Namespace:
    """The responses of one API key, those used last at the end.

    Attributes:
        makers: Id of an output item to the id of its response.
        holders: Stored turns, each with the number of responses and later turns that refer to it.
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
        # Earlier turns may be evicted already: a request holds them while it is answered.
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
        """Number of stored responses of all namespaces."""
        return sum(len(one.responses) for one in self._namespaces.values())

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all responses; a turn that several refer to counts once."""
        return sum(one.size_bytes for one in self._namespaces.values())

    @property
    def evictions(self) -> int:
        """Number of evicted responses since the start."""
        return self._evictions

    def put(self, namespace: str, response_id: str, response: StoredResponse) -> bool:
        """Store a response, and evict the least recently used responses of the largest namespaces.

        Returns:
            Whether it is stored. A response is not stored, and none is evicted for it, if it is larger than the
            limit or larger than every other namespace.
        """
        self.delete(namespace, response_id)
        if response.size_bytes > self._max_bytes or self._max_responses < 1:
            return False
        self._namespaces.setdefault(namespace, _Namespace()).add(response_id, response)
        self._make_room(newcomer=namespace)
        return self._find(namespace, response_id) is not None

    def set_bounds(self, *, max_responses: int, max_bytes: int) -> None:
        """Set other bounds, and evict responses down to them."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._make_room(newcomer="")

    def clear(self) -> None:
        """Drop all responses; none counts as evicted."""
        self._namespaces.clear()

    def get(self, namespace: str, response_id: str) -> StoredResponse | None:
        """Return a response, which counts as used now; None if the id is unknown."""
        found = self._find(namespace, response_id)
        if found is not None:
            self._namespaces[namespace].responses.move_to_end(response_id)
        return found

    def item(self, namespace: str, item_id: str) -> bytes | None:
        """Return an output item of a stored response, which then counts as used; None if the id is unknown."""
        if namespace not in self._namespaces:
            return None
        response_id = self._namespaces[namespace].makers.get(item_id)
        maker = None if response_id is None else self.get(namespace, response_id)
        return None if maker is None else maker.item(item_id)

    def delete(self, namespace: str, response_id: str) -> bool:
        """Delete a response; those that continue it stay. Returns whether there was one."""
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
        """Evict the least recently used response of the largest namespace; among equals, not of the new response's."""
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
