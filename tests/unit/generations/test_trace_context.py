"""W3C trace context: read strictly, or not at all."""

from __future__ import annotations

import pytest

from machd.generations.trace_context import TraceContext, new_trace, read_trace

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_well_formed_parent_is_taken() -> None:
    """The trace, the caller's span and whether it is recorded."""
    assert read_trace([PARENT]) == TraceContext(TRACE, SPAN, is_sampled=True)
    assert read_trace([f"00-{TRACE}-{SPAN}-00"]) == TraceContext(TRACE, SPAN, is_sampled=False)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        PARENT.upper(),
        f" {PARENT}",
        f"{PARENT} ",
        f"{PARENT}\n",
        f"{PARENT}-",
        f"{PARENT}-more",
        f"{PARENT},{PARENT}",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"01-{TRACE}-{SPAN}-01more",
        f"01-{TRACE}-{SPAN}-01-{'x' * 600}",
        "my secret prompt",
        f"00-{chr(0x661) * 32}-{SPAN}-01",
    ],
)
def test_anything_else_is_no_trace(parent: str) -> None:
    """Whatever differs from the form by one character is ignored as a whole."""
    assert read_trace([parent]) is None


def test_a_later_version_may_say_more() -> None:
    """What this version knows is read from it, as the specification asks."""
    assert read_trace([f"01-{TRACE}-{SPAN}-03-more"]) == TraceContext(TRACE, SPAN, is_sampled=True)


@pytest.mark.parametrize("parents", [[], [PARENT, PARENT], [PARENT, ""]])
def test_there_is_one_parent_or_none(parents: list[str]) -> None:
    """Two headers are none, even if they agree."""
    assert read_trace(parents) is None


def test_the_state_is_handed_on_in_order() -> None:
    """Members of several headers come out as one list; empty ones and spaces go."""
    trace = read_trace([PARENT], ["a=1 , b@c=x y", ",", "1d@e=2"])
    assert trace is not None
    assert trace.state == "a=1,b@c=x y,1d@e=2"


@pytest.mark.parametrize(
    "state",
    [
        "no value",
        "A=1",
        "a=1,a=2",
        "a==1",
        "a=\x00",
        "a=\xe9",
        "a=1\r\nx: y",
        ",".join(f"k{n}=1" for n in range(33)),
        f"a={'x' * 600}",
    ],
)
def test_a_malformed_state_costs_the_state_alone(state: str) -> None:
    """The trace is taken without it."""
    assert read_trace([PARENT], [state]) == TraceContext(TRACE, SPAN, is_sampled=True)


def test_new_traces_differ_and_are_well_formed() -> None:
    """A trace that begins here has an id that others would accept, and no parent."""
    first, second = new_trace(), new_trace()
    assert first.trace_id != second.trace_id
    assert first.parent_span_id is None
    assert read_trace([f"00-{first.trace_id}-{SPAN}-01"]) is not None
