"""Messages as bytes: what is decoded is what was sent, and anything else is refused."""

from __future__ import annotations

import math
from typing import cast, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.daemon.engine_thread import running_thread
from support.engines.fake_engine import FakeEngine
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import TinyKind
from support.schedulers.sequence_samples import request_of
from unit.link.typed_values import comparable, values_of

from machd.capabilities.evidence import Evidence, MeasuredOn, Outcome, ProbeResult
from machd.engine.assembly import make_engine
from machd.engine.protocol.media import FIRST_MEDIA_KEY, Media, MediaSpan, PlainArray
from machd.engine.protocol.step import SampledToken
from machd.errors import QueueFullError
from machd.link.messages import (
    Abort,
    Beat,
    ChangeConfig,
    CompileGrammar,
    Message,
    Report,
    Served,
    Stop,
    Submit,
    ToEngine,
    ToFront,
)
from machd.link.snapshot import LoopSnapshot
from machd.link.state import ServedState
from machd.link.wire import decode_to_engine, decode_to_front, encode
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import Grammar, SamplingParams
from machd.request.media import MediaKind
from machd.scheduler.events import Event, FinishReason, OutputGenerated, SequenceFinished
from machd.scheduler.subscriber import SequenceRequest
from machd.settings.model import Settings

_EXAMPLES = settings(max_examples=20)
"""Each draws every field, and each kind of value of a field is drawn by many messages."""


def _by_name(kinds: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", get_args(kinds), ids=lambda one: str(one.__name__))


def _submitted(request: SequenceRequest) -> SequenceRequest:
    message = decode_to_engine(encode(Submit((request,))))
    assert isinstance(message, Submit)
    (sent,) = message.requests
    return sent


@_by_name(ToEngine)
@_EXAMPLES
@given(data=st.data())
def test_message_of_the_front_is_the_same_in_the_engine_process(
    kind: object, data: st.DataObject
) -> None:
    """Every field of every message survives, with its type."""
    message = data.draw(values_of(kind))
    assert isinstance(message, Message)
    assert comparable(decode_to_engine(encode(message))) == comparable(message)


@_by_name(ToFront)
@_EXAMPLES
@given(data=st.data())
def test_message_of_the_engine_process_is_the_same_in_the_front(
    kind: object, data: st.DataObject
) -> None:
    """Every field of every message survives, with its type."""
    message = data.draw(values_of(kind))
    assert isinstance(message, Message)
    assert comparable(decode_to_front(encode(message))) == comparable(message)


@_by_name(Event)
@_EXAMPLES
@given(data=st.data())
def test_event_is_the_same_in_the_front(kind: object, data: st.DataObject) -> None:
    """Every field of every event of a report survives, with its type."""
    events = data.draw(st.lists(values_of(kind), max_size=3).map(tuple))
    report = Report(cast(tuple[Event, ...], events), None)
    assert comparable(decode_to_front(encode(report))) == comparable(report)


@pytest.mark.parametrize("kind", [TinyKind.STANDARD, TinyKind.HYBRID_GDN, TinyKind.NESTED_ROTATING])
def test_state_of_a_model_crosses(kind: TinyKind) -> None:
    """Description, evidence and verdicts of a model in memory are equal behind the link."""
    evidence = Evidence(3, math.inf, 0.5, 8)
    results = (
        ProbeResult("batch_parity", Outcome.FAILED, "3 differ", evidence, 1.5),
        ProbeResult("trim", Outcome.PASSED, measured_on=MeasuredOn.WEIGHTS),
    )
    engine = make_engine(loaded(kind))
    assert engine.model.code is not None
    state = ServedState.of(engine.model, results)
    served = Served(state, frozenset({"continuous_batching"}), LoopSnapshot(slot_count=3))

    sent = decode_to_front(encode(served))

    assert sent == served
    assert comparable(sent) == comparable(served)


def test_snapshot_of_an_engine_at_work_crosses() -> None:
    """The counts that an engine thread has taken, and the events that it has published, are equal behind the link."""
    with running_thread(FakeEngine()) as thread:
        thread.submit(request_of("a"), request_of("b", group_id="a"))
        thread.published.ends(2)
        report = Report(tuple(thread.published.events), thread.loop.snapshot)

    assert report.snapshot != LoopSnapshot()
    assert decode_to_front(encode(report)) == report


def test_keys_of_an_image_cross() -> None:
    """A prompt holds keys of 64 bits, which an image has again from its content behind the link."""
    pixels = PlainArray((1, 2), "<f4", memoryview(bytes(range(8))))
    media = Media(MediaKind.IMAGE, b"digest", (900, 901, 902), {"pixel_values": pixels}, "\n", "")
    prompt = (5, *media.keys, 2**64 - 1)
    request = SequenceRequest(
        "s", "g", prompt, SamplingParams(), 4, frozenset({2}), 0.0, media=(MediaSpan(1, media),)
    )

    sent = _submitted(request)

    assert max(media.keys) >= FIRST_MEDIA_KEY
    assert sent.prompt == prompt
    assert sent.media[0].media.keys == media.keys
    assert comparable(sent) == comparable(request)


def test_arrays_of_an_image_are_not_copied() -> None:
    """They are sent from where they lie, once for all sequences of a request, and stay where they arrive."""
    content = memoryview(bytes(1_000_000))
    media = Media(MediaKind.IMAGE, b"d", (9,), {"p": PlainArray((1,), "|u1", content)})
    requests = tuple(
        SequenceRequest(
            name, "g", (1,), SamplingParams(), 4, frozenset(), 0.0, media=(MediaSpan(0, media),)
        )
        for name in "ab"
    )
    message, *arrays = encode(Submit(requests))

    sent = decode_to_engine([message, *arrays])

    assert len(arrays) == 1
    assert arrays[0] is content
    assert isinstance(sent, Submit)
    for one in sent.requests:
        assert one.media[0].media.arrays["p"].content.obj is content.obj


def test_grammar_crosses_without_what_is_compiled() -> None:
    """A grammar is the same behind the link, where nothing is compiled of it yet."""
    constraint = Constraint(ConstraintKind.GRAMMAR, "start: /a+/", "grammar")
    grammar = Grammar("start: /a+/", constraint, object(), ("not", "uniqueItems"))
    request = SequenceRequest("s", "g", (1,), SamplingParams(grammar=grammar), 4, frozenset(), 0.0)

    sent = _submitted(request).sampling.grammar

    assert sent == grammar
    assert sent is not None
    assert (sent.compiled, sent.ignored_keywords) == (None, ("not", "uniqueItems"))


@pytest.mark.parametrize("kind", ConstraintKind)
def test_constraint_crosses(kind: ConstraintKind) -> None:
    """Constraints of every kind are equal behind the link."""
    message = CompileGrammar(3, Constraint(kind, '["a"]', "tools", frozenset({"if", "not"})))
    assert decode_to_engine(encode(message)) == message


def test_settings_cross() -> None:
    """Settings are equal behind the link, defaults included."""
    settings = Settings.model_validate({"limits": {"max_queue": 3}})
    message = ChangeConfig(2, settings, is_measured=True)

    sent = decode_to_engine(encode(message))

    assert sent == message
    assert isinstance(sent, ChangeConfig)
    assert sent.settings.model_dump() == settings.model_dump()


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1.7976931348623157e308]
)
def test_every_number_crosses(value: float) -> None:
    """Infinite numbers, NaN and the smallest and largest floats keep their bits."""
    event = OutputGenerated("s", SampledToken(0, 7, value), value)

    sent = decode_to_front(encode(Report((event,), None)))

    assert isinstance(sent, Report)
    (again,) = sent.events
    assert isinstance(again, OutputGenerated)
    assert isinstance(again.output, SampledToken)
    assert [again.at_s.hex(), again.output.logprob] == [
        value.hex(),
        pytest.approx(value, nan_ok=True),
    ]


_NO_MESSAGES = [
    (["Halt", None], r"Invalid value 'Halt'"),
    (["Beat", 0.0], r"Invalid value 'Beat'"),  # the other way
    (["Abort", ["s"]], "Expected `array` of at least length 3"),
    (["Abort", ["s"], None, 1], "Expected `array` of at most length"),
    (["Abort", "s", None], "Expected `array`, got `str`"),
    (["Abort", ["s"], ["NoSuchError", {}]], "machd has no error NoSuchError"),
    (["SetLimits", "{"], "Invalid JSON"),
    (["SetLimits", '{"no_such_section": {}}'], "no_such_section"),
    (["Submit", [{"sequence_id": "s"}]], "missing required field `group_id`"),
    ({"type": "Stop"}, "Expected `array`, got `object`"),
]


@pytest.mark.parametrize(("data", "reason"), _NO_MESSAGES)
def test_what_is_no_message_is_refused(data: object, reason: str) -> None:
    """An unknown name, a missing field, one too many and one of another type are named."""
    with pytest.raises(msgspec.ValidationError, match=reason):
        decode_to_engine([msgspec.msgpack.encode(data)])


def test_an_event_that_is_none_is_refused() -> None:
    """A report with an event of an unknown name, or with too few fields, is no report."""
    for event in (["TokenLost", "s"], ["OutputGenerated", "s"]):
        with pytest.raises(msgspec.ValidationError, match=r"at `\$\[1\]\[0\]"):
            decode_to_front([msgspec.msgpack.encode(["Report", [event], None])])


def test_half_a_frame_is_refused() -> None:
    """A frame that was cut off, or has more behind it, is no message."""
    (frame,) = encode(Beat(1.0))
    for broken in (frame[:-1], bytes(frame) + b"\x00", b""):
        with pytest.raises(msgspec.DecodeError):
            decode_to_front([broken])


def test_what_has_no_form_on_the_wire_is_not_sent() -> None:
    """An object of a type that no message has is named when it is to be sent."""
    with pytest.raises(NotImplementedError, match="object does not cross the link"):
        encode(Abort(("s",), object()))  # type: ignore[arg-type]


def test_an_error_of_an_event_crosses() -> None:
    """The error that ended a sequence is the one that its client is told."""
    error = QueueFullError("full", retry_after_s=7)
    ended = SequenceFinished("s", FinishReason.ERROR, error, 4, 0, 0, 1.0)

    sent = decode_to_front(encode(Report((ended,), None)))

    assert comparable(sent) == comparable(Report((ended,), None))
    assert comparable(decode_to_engine(encode(Stop(error)))) == comparable(Stop(error))
