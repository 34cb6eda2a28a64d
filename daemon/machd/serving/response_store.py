"""Responses that later requests may refer to: in memory, bounded, gone with the daemon.

``previous_response_id`` and ``GET /v1/responses/{id}`` need what was said before. It is kept as the
bytes that went over the wire, oldest use first out, within a number of responses and of bytes.
Nothing of it is ever logged or written to a disk.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["ResponseStore", "StoredResponse"]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One finished response, with all that led to it.

    Attributes:
        answer: The response object, as JSON.
        items: The conversation up to and with this response: an item each, as JSON. Responses of
            one chain share the bytes of their common items.
        output_ids: Ids of the last ``len(output_ids)`` items, which the response itself made.
    """

    answer: bytes
    items: tuple[bytes, ...]
    output_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        """Hold the ids against the items."""
        assert len(self.output_ids) <= len(self.items), "what was made is part of what is kept"

    @property
    def size_bytes(self) -> int:
        """What it counts: every byte of it, shared or not."""
        return len(self.answer) + sum(map(len, self.items))


class ResponseStore:
    """Responses by namespace and id. Owned by the event loop: no other thread may call it.

    A namespace is the name of an API key. Nobody finds what another key's requests have left here.
    """

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        """Start empty; with 0 for either bound nothing is ever kept."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._makers: dict[tuple[str, str], str] = {}
        self._size_bytes = 0
        self._evictions = 0

    def __len__(self) -> int:
        """Responses that are kept, over all namespaces."""
        return len(self._responses)

    @property
    def size_bytes(self) -> int:
        """What they count together."""
        return self._size_bytes

    @property
    def evictions(self) -> int:
        """Responses that made room for others, since the start."""
        return self._evictions

    def put(self, namespace: str, response_id: str, response: StoredResponse) -> bool:
        """Keep a response, at the cost of those that were not used for the longest time.

        Returns:
            Whether it is kept: one that is larger than all the room there is is not, and nothing
            is given up for it.
        """
        self.delete(namespace, response_id)
        if response.size_bytes > self._max_bytes or self._max_responses < 1:
            return False
        while (
            len(self._responses) >= self._max_responses
            or self._size_bytes + response.size_bytes > self._max_bytes
        ):
            self._remove(next(iter(self._responses)))
            self._evictions += 1
        self._responses[namespace, response_id] = response
        self._size_bytes += response.size_bytes
        for item_id in response.output_ids:
            self._makers[namespace, item_id] = response_id
        return True

    def get(self, namespace: str, response_id: str) -> StoredResponse | None:
        """A response, which counts as used now; None where there is none of that id."""
        found = self._responses.get((namespace, response_id))
        if found is not None:
            self._responses.move_to_end((namespace, response_id))
        return found

    def item(self, namespace: str, item_id: str) -> bytes | None:
        """An item that a stored response made, which then counts as used; None for any other."""
        response_id = self._makers.get((namespace, item_id))
        maker = None if response_id is None else self.get(namespace, response_id)
        if maker is None:
            return None
        first = len(maker.items) - len(maker.output_ids)
        return maker.items[first + maker.output_ids.index(item_id)]

    def delete(self, namespace: str, response_id: str) -> bool:
        """Forget a response; those that continue it stay. Returns whether there was one."""
        if (namespace, response_id) not in self._responses:
            return False
        self._remove((namespace, response_id))
        return True

    def _remove(self, key: tuple[str, str]) -> None:
        namespace, response_id = key
        response = self._responses.pop(key)
        self._size_bytes -= response.size_bytes
        for item_id in response.output_ids:
            if self._makers.get((namespace, item_id)) == response_id:
                del self._makers[namespace, item_id]
