"""A conversation whose middle was replaced begins with its head from the prefix cache, with each kind of cache.

The same text behind the middle stands at other positions there, and is computed again.
"""

from __future__ import annotations

import pytest
from support.engines.block_rows import ASKED
from support.engines.parity import differences
from support.engines.tiny_models import TinyKind, each_kind
from support.schedulers.tiny_serving import TinyServing, row_alone

from machd.scheduler.events import CacheReason
from machd_probes.scripts import random_prompt

_SYSTEM = random_prompt(45, 1)
"""System prompt and tools."""

_USERS = tuple(random_prompt(9 + turn, 10 + turn) for turn in range(4))
_SUMMARY = random_prompt(23, 3)
_OTHER_SUMMARY = random_prompt(23, 4)


def _converse(serving: TinyServing) -> list[tuple[int, ...]]:
    """Have a conversation of four turns; returns the text after each."""
    text, texts = _SYSTEM, list[tuple[int, ...]]()
    for turn, user in enumerate(_USERS):
        serving.submit(f"turn {turn}", (*text, *user))
        serving.finish()
        answer = (one.token_id for one in serving.tokens(f"turn {turn}"))
        text = (*text, *user, *answer)
        texts.append(text)
    return texts


def _ask(serving: TinyServing, name: str, prompt: tuple[int, ...]) -> None:
    serving.submit(name, prompt)
    serving.finish()


@each_kind()
@pytest.mark.parametrize("kept_turns", [1, 2])
def test_the_head_of_a_compacted_conversation_is_found(kind: TinyKind, kept_turns: int) -> None:
    """System, tools and first turns come from the cache; where state is kept, up to where an answer's was."""
    serving = TinyServing(kind, "none", batched=True)
    texts = _converse(serving)
    head, tail = texts[kept_turns - 1], texts[-1][len(texts[2]) :]
    compacted = (*head, *_SUMMARY, *tail, *random_prompt(6, 5))
    _ask(serving, "compacted", compacted)

    told = serving.looked_up("compacted")
    assert (told.reason, told.parted_at_tokens) == (CacheReason.DIVERGED, len(head))
    # An answer's last token is computed by the next turn.
    uncut = 0 if kind is TinyKind.STANDARD else 1
    assert told.cached_tokens == len(head) - uncut
    assert differences(row_alone(kind, compacted), serving.tokens("compacted"), ASKED) == []


@each_kind()
def test_nothing_behind_the_middle_is_found(kind: TinyKind) -> None:
    """A long tail that was computed before, at other positions, changes nothing in what is found."""
    serving = TinyServing(kind, "none", batched=True)
    texts = _converse(serving)
    head = texts[0]
    long_tail = texts[-1][len(texts[0]) :]
    _ask(serving, "compacted", (*head, *_SUMMARY, *long_tail))

    told = serving.looked_up("compacted")
    assert told.parted_at_tokens == len(head)
    assert told.cached_tokens <= len(head)


@each_kind()
def test_another_compaction_of_the_conversation_begins_where_both_part(kind: TinyKind) -> None:
    """State is kept there once a second text has parted, so that a third one begins there, inside the first turn."""
    serving = TinyServing(kind, "none", batched=True)
    _converse(serving)
    head = (*_SYSTEM, *_USERS[0][:3])
    for name, summary in (("second", _SUMMARY), ("third", _OTHER_SUMMARY)):
        _ask(serving, name, (*head, *summary, *random_prompt(30, 6)))

    third = serving.looked_up("third")
    assert third.parted_at_tokens == third.cached_tokens == len(head)
    assert third.reason is CacheReason.DIVERGED
