"""The values that a place in a wire type takes, for the message about one that it does not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec import inspect

_STEP = re.compile(r"\.(?P<field>\w+)|\[[^\]]*\]")


def expected_values(type_: object, path: str) -> tuple[str, ...]:
    """Sorted values of the literals and union tags at a path, such as ``.messages[0].role``.

    Args:
        type_: A wire type.
        path: msgspec's path without its ``$``; an index or a key is any index or key.
    """
    values: set[str] = set()
    nodes = list(_alternatives([inspect.type_info(type_)]))
    for step in _STEP.finditer(path):
        values = set(_tags(nodes, step["field"]))
        nodes = list(_alternatives(_children(nodes, step["field"])))
    for node in nodes:
        if isinstance(node, inspect.LiteralType):
            values.update(str(value) for value in node.values)
    return tuple(sorted(values))


def _alternatives(nodes: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """The nodes with unions and annotations opened up."""
    for node in nodes:
        if isinstance(node, inspect.UnionType):
            yield from _alternatives(node.types)
        elif isinstance(node, inspect.Metadata):
            yield from _alternatives([node.type])
        else:
            yield node


def _tags(nodes: Iterable[inspect.Type], field: str | None) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, inspect.StructType) and field and node.tag_field == field:
            yield str(node.tag)


def _children(nodes: Iterable[inspect.Type], field: str | None) -> Iterator[inspect.Type]:
    """What stands under one step: a struct's field, a list's items or a mapping's values."""
    for node in nodes:
        if isinstance(node, inspect.StructType):
            yield from (one.type for one in node.fields if one.encode_name == field)
        elif field is None and isinstance(node, inspect.ListType):
            yield node.item_type
        elif field is None and isinstance(node, inspect.DictType):
            yield node.value_type
