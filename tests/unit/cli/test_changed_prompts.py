"""Places in a prompt are found without a look at each token, and are those of a look at each."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

from hypothesis import example, given
from hypothesis import strategies as st

from machd.cli.changed_prompts import RenderedRequest
from machd.reading.prompt_places import PromptPart, PromptPlace


def _rendered(places: Sequence[PromptPlace | None]) -> RenderedRequest:
    prepared = Mock(prompt=tuple(range(len(places))))
    prepared.places.at = places.__getitem__
    return RenderedRequest(1, Mock(), prepared)


@st.composite
def _prompts(draw: st.DrawFn) -> list[PromptPlace | None]:
    """Messages of any length, with unknown tokens before and behind each."""
    places = list[PromptPlace | None]()
    for index in range(draw(st.integers(1, 5))):
        places += [None] * draw(st.integers(0, 20))
        count = draw(st.integers(1, 40))
        places += [PromptPlace(PromptPart.MESSAGE, index, "user", at) for at in range(count)]
    return places + [None] * draw(st.integers(0, 20))


@example([None, PromptPlace(PromptPart.MESSAGE, 0, "user", 0), *[None] * 20], 0, 0, 0)
@given(_prompts(), st.integers(0, 5), st.integers(0, 40), st.integers(0, 60))
def test_strides_miss_nothing(
    places: list[PromptPlace | None], index: int, character: int, start: int
) -> None:
    """A message of one token between unknown ones is found, too, and so is the beginning of a short prompt."""
    rendered = _rendered(places)

    def is_wanted(place: PromptPlace | None) -> bool:
        return (
            place is not None and place.message_index is not None and place.message_index >= index
        )

    of_part = (at for at in range(start, len(places)) if is_wanted(places[at]))
    assert rendered.first_of_part(is_wanted, start) == next(of_part, None)
    behind = (
        at
        for at, place in enumerate(places)
        if place is not None
        and ((place.message_index or 0), place.character or 0) >= (index, character)
    )
    assert rendered.token_behind(index, character) == next(behind, None)
