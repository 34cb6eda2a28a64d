"""Prompts that are shortened: which turns stay, and how much room is left for the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machd.reading.truncation import kept_messages, max_prompt_tokens
from machd.request.generation import WHOLE_ROOM

_roles = st.lists(st.sampled_from(["user", "assistant", "tool", "system"]), max_size=12)


@given(opening=st.integers(0, 2), roles=_roles, room=st.integers(0, 16))
def test_fewest_oldest_turns_are_dropped(opening: int, roles: list[str], room: int) -> None:
    """What is kept is the opening and a run of turns to the end; one turn more would not fit."""
    all_roles = ["system"] * opening + roles
    messages: list[dict[str, object]] = [
        {"role": role, "content": str(index)} for index, role in enumerate(all_roles)
    ]
    kept = kept_messages(messages, lambda some: len(some) <= room)
    start = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
    assert kept[:start] == messages[:start]
    tail = kept[start:]
    assert tail == messages[len(messages) - len(tail) :]
    if len(kept) < len(messages):
        assert tail[0]["role"] == "user"
        turns = [
            index
            for index in range(start + 1, len(messages))
            if messages[index]["role"] == "user" and messages[index - 1]["role"] != "user"
        ]
        place = len(messages) - len(tail)
        assert len(kept) <= room or place == turns[-1]
        earlier = [index for index in turns if index < place]
        if earlier:
            assert start + len(messages) - earlier[-1] > room


@pytest.mark.parametrize(
    ("asked", "context_tokens", "expected"),
    [(WHOLE_ROOM, 100, 75), (10, 100, 10), (90, 100, 75), (WHOLE_ROOM, 1, 1), (5, 2, 2)],
)
def test_room_is_left_for_the_answer(asked: int, context_tokens: int, expected: int) -> None:
    """A shortened prompt leaves a quarter of the context to its answer."""
    assert max_prompt_tokens(asked, context_tokens) == expected
