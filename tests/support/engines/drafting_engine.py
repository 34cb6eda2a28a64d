"""A fake engine that drafts two tokens where a plan allows it; the first is accepted."""

from __future__ import annotations

from typing import Any

from support.engines.fake_engine import FakeEngine, FakeFaults


def _first_is_right(position: int, max_tokens: int) -> tuple[int, int]:
    del position
    return min(2, max_tokens), 1


def drafting_engine(*arguments: Any, fails: bool = False, **options: Any) -> FakeEngine:
    """Make a fake engine; with ``fails`` the proposer fails for the row of the first slot, once."""
    if fails:
        error = RuntimeError("it was to fail")
        options["faults"] = FakeFaults(draft_errors={(0, place): error for place in range(4)})
    engine = FakeEngine(*arguments, **options)
    engine.draft_script = _first_is_right
    return engine
