"""The items of a conversation that goes over several responses, and what of it is new."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from machd.dialects.responses.items import InputItem
from machd.errors import InvalidRequestError

_MAX_ITEMS = 8192
"""Items of a conversation; as many as one request may bring."""

_MAX_STORED_BYTES = 8 * 1024 * 1024
"""What a short body may bring in of what is stored: an earlier conversation, and references."""


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """A checked item, and the place in the request that errors about it name."""

    item: InputItem
    place: str


@dataclass(frozen=True, slots=True)
class ItemChain:
    """A conversation's items, oldest first.

    Attributes:
        added: Those that the request adds to the conversation before it, as JSON.
    """

    items: tuple[PlacedItem, ...]
    added: tuple[bytes, ...]


def item_chain(
    given: str | Sequence[InputItem],
    *,
    previous: Sequence[bytes] = (),
    referenced: Mapping[str, bytes] | None = None,
) -> ItemChain:
    """The items of a request, after those of the responses before it.

    Args:
        given: ``input``, its items checked.
        previous: Items of the chain that ``previous_response_id`` ends, as JSON.
        referenced: Items that ``given`` refers to, by id, as far as they are stored.

    Raises:
        InvalidRequestError: An item refers to nothing that is stored, or there are too many items
            or too many bytes of them.
    """
    room_bytes = _MAX_STORED_BYTES - sum(map(len, previous))
    if room_bytes < 0:
        raise _too_long(f"{_MAX_STORED_BYTES} bytes")
    items = [PlacedItem(_decoded(one), "previous_response_id") for one in previous]
    added: list[bytes] = []
    seen = {one.item.id for one in items}
    for placed, data in _resolved(given, referenced or {}, room_bytes):
        # What a chain holds already is not said twice, though clients do name it again.
        if data is not None and placed.item.id in seen:
            continue
        seen.add(placed.item.id)
        items.append(placed)
        added.append(data or msgspec.json.encode(placed.item))
    if len(items) > _MAX_ITEMS:
        raise _too_long(f"{_MAX_ITEMS} items")
    return ItemChain(tuple(items), tuple(added))


def _resolved(
    given: str | Sequence[InputItem], referenced: Mapping[str, bytes], room_bytes: int
) -> Iterator[tuple[PlacedItem, bytes | None]]:
    """Each item that is worth keeping; those behind references with their bytes."""
    if isinstance(given, str):
        yield PlacedItem(InputItem(type="message", role="user", content=given), "input"), None
        return
    for index, item in enumerate(given):
        place = f"input[{index}]"
        if item.type == "item_reference":
            data = _stored(item, referenced, place)
            room_bytes -= len(data)
            if room_bytes < 0:
                raise InvalidRequestError(
                    f"{place}: what is stored may bring in {_MAX_STORED_BYTES} bytes, and the "
                    "references bring in more",
                    param=place,
                )
            yield PlacedItem(_decoded(data), place), data
        elif item.type != "reasoning" or item.text:
            kept = msgspec.structs.replace(item, summary=None, encrypted_content=None)
            yield PlacedItem(kept, place), None


def _stored(item: InputItem, referenced: Mapping[str, bytes], place: str) -> bytes:
    data = referenced.get(item.id or "")
    if data is None:
        raise InvalidRequestError(
            f"{place}.id: no such item is stored here; it may belong to a response with "
            "store: false or to one that was dropped",
            param=f"{place}.id",
        )
    return data


def _too_long(limit: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"previous_response_id: a conversation may have {limit}, and this one has more; start a "
        "new one with what matters of it",
        param="previous_response_id",
    )


def _decoded(data: bytes) -> InputItem:
    return msgspec.json.decode(data, type=InputItem)
