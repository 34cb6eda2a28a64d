"""What raw parts of a body take of their allowance is counted without decoding them."""

from __future__ import annotations

import json
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from machd.dialects.wire.raw_json import Allowance, raw_object
from machd.errors import InvalidRequestError

_Json: TypeAlias = "int | str | list[_Json] | dict[str, _Json] | None"

_TEXTS = st.text(alphabet='\\"[]{}a\u00e9\ud800', max_size=6)
_VALUES: st.SearchStrategy[_Json] = st.recursive(
    st.none() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


def _containers(value: _Json) -> int:
    if isinstance(value, dict):
        return 1 + sum(_containers(one) for one in value.values())
    return 1 + sum(map(_containers, value)) if isinstance(value, list) else 0


@given(value=_VALUES, indent=st.none() | st.just(1), is_raw=st.booleans())
def test_every_container_is_counted(value: _Json, indent: int | None, is_raw: bool) -> None:  # noqa: FBT001
    """Objects and arrays count, and brackets in texts and keys do not, however they are escaped."""
    text = json.dumps(value, indent=indent)
    allowance = Allowance(containers=1000, length_bytes=100_000)
    allowance.take(Raw(text.encode()) if is_raw else text, param="p")
    assert allowance.containers == 1000 - _containers(value)
    assert allowance.length_bytes == 100_000 - len(text.encode())


@pytest.mark.parametrize("opening", ["[", '{"[":'])
def test_sixty_four_levels_are_deep_enough(opening: str) -> None:
    """The level after the last one is refused, closed or not."""
    Allowance().take(opening * 64, param="p")
    with pytest.raises(InvalidRequestError, match="64 levels") as caught:
        Allowance().take(opening * 65, param="p")
    assert caught.value.param == "p"


def test_depth_is_not_length() -> None:
    """Containers side by side are as deep as one of them."""
    assert raw_object('{"a": [' + "[[]]," * 1000 + "[]]}", param="p")["a"] == [[[]]] * 1000 + [[]]


def test_parts_share_an_allowance() -> None:
    """What the first part took is gone for the second, which is the one that is refused."""
    allowance = Allowance(containers=3)
    raw_object('{"a": {}}', param="first", allowance=allowance)
    raw_object("{}", param="second", allowance=allowance)
    with pytest.raises(InvalidRequestError) as caught:
        raw_object("{}", param="third", allowance=allowance)
    assert caught.value.param == "third"


def test_bytes_are_counted_and_not_characters() -> None:
    """A text of wide characters is as long as its UTF-8."""
    with pytest.raises(InvalidRequestError):
        raw_object('{"a": "éé"}', param="p", max_bytes=11)
    raw_object('{"a": "éé"}', param="p", max_bytes=13)
