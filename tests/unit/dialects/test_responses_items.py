"""Items become messages, survive being stored, and refer to nothing that is not there."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from machd.dialects.responses.items import InputItem, ItemChain, item_chain, item_messages
from machd.errors import InvalidRequestError

_USER = {"role": "user", "content": "add"}
_THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
_TEXT = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}],
}


def _call(call_id: str = "c1", arguments: str = '{"a":1}', **fields: object) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "call_id": call_id,
        "name": "add",
        "arguments": arguments,
        **fields,
    }


def _output(call_id: str = "c1", output: object = "2") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def _custom(call_id: str = "c1") -> dict[str, Any]:
    return {"type": "custom_tool_call", "call_id": call_id, "name": "patch", "input": "+ a\n"}


def _items(*items: dict[str, Any]) -> list[InputItem]:
    return msgspec.json.decode(msgspec.json.encode(items), type=list[InputItem])


def _chain(*items: dict[str, Any], **stored: Any) -> ItemChain:
    return item_chain(_items(*items), **stored)


def _messages(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return item_messages(_chain(*items).items, instructions=instructions).messages


def _refusal(*items: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        _messages(*items)
    return caught.value


def _template_call(call_id: str = "c1") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 1}},
    }


def test_what_the_assistant_does_in_one_go_is_one_message() -> None:
    """Thoughts, text and calls join; outputs become messages of the tool's, with its name."""
    assert _messages(_USER, _THOUGHT, _TEXT, _call(), _call("c2"), _output("c2"), _output()) == [
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [_template_call(), _template_call("c2")],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c2", "name": "add"},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]


def test_rounds_are_messages_of_their_own() -> None:
    """A second thought after a tool's answer, and a second text, each begin a message."""
    roles = [
        message["role"]
        for message in _messages(_USER, _call(), _output(), _THOUGHT, _call("c2"), _output("c2"))
    ]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    twice = _messages(_TEXT, _TEXT)
    assert [message["content"] for message in twice] == ["so", "so"]


def _round(*between: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the model wrote, and then an output for every call of it."""
    ids = [item["call_id"] for item in between if "call_id" in item]
    return [_USER, *between, *(_output(one) for one in ids)]


@pytest.mark.parametrize(
    ("written", "said", "thought", "calls"),
    [
        ([_call(), _TEXT, _call("c2")], "so", None, 2),
        ([_call(), _THOUGHT, _call("c2")], "", "hm", 2),
        ([_call(), _TEXT], "so", None, 1),
        ([_call(), _THOUGHT], "", "hm", 1),
        ([_TEXT, _call(), _TEXT, _THOUGHT, _call("c2"), _TEXT], "sososo", "hm", 2),
        ([_THOUGHT, _TEXT, _call(), _THOUGHT, _TEXT], "soso", "hmhm", 1),
    ],
)
def test_what_stands_between_calls_joins_their_message(
    written: list[dict[str, Any]], said: str, thought: str | None, calls: int
) -> None:
    """Models speak and think between and after calls; outputs come after all of it."""
    items = _round(*written)
    _, turn, *answers = _messages(*items)
    assert (turn["content"], turn.get("reasoning_content")) == (said, thought)
    assert len(turn["tool_calls"]) == len(answers) == calls
    assert {answer["role"] for answer in answers} == {"tool"}
    # The same by previous_response_id: what was written is stored, and the outputs are new.
    stored = _chain(_USER, *written).added
    again = _chain(*items[1 + len(written) :], previous=stored)
    assert item_messages(again.items, instructions=None).messages == _messages(*items)


def test_a_turn_ends_with_its_last_output() -> None:
    """Outputs may come one by one among what the model wrote; then a new message begins."""
    items = [_call(), _call("c2"), _output(), _TEXT, _output("c2"), _TEXT]
    turn, *answers, last = _messages(*items)
    assert (turn["content"], len(turn["tool_calls"])) == ("so", 2)
    assert [answer["tool_call_id"] for answer in answers] == ["c1", "c2"]
    assert last == {"role": "assistant", "content": "so"}


def test_a_custom_tools_call_has_one_argument() -> None:
    """The template sees the function that the tool was shown as; outputs go by the call's id."""
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    call, answer = _messages(_custom(), output)
    assert call["tool_calls"] == [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "patch", "arguments": {"input": "+ a\n"}},
        }
    ]
    assert answer == {"role": "tool", "content": "done", "tool_call_id": "c1", "name": "patch"}


@pytest.mark.parametrize("arguments", ["", "[1]", "{", '{"a":', "null"])
def test_arguments_that_are_no_object_are_none(arguments: str) -> None:
    """A model's slip does not end the conversation."""
    [call, _] = _messages(_call(arguments=arguments), _output())
    assert call["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ([], ""),
        ([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}], "ab"),
        ([{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "ano"),
    ],
)
def test_parts_are_joined(content: object, text: str) -> None:
    """Without anything between them, in messages and in outputs."""
    assert _messages({"role": "user", "content": content}) == [{"role": "user", "content": text}]
    assert _messages(_call(), _output(output=content))[1]["content"] == text


def test_the_operators_first_words_are_one_message() -> None:
    """Templates take one system message, and it stands first; later ones stay where they are."""
    developer = {"role": "developer", "content": "brief"}
    assert _messages(developer, _USER, developer, instructions="be") == [
        {"role": "system", "content": "be\n\nbrief"},
        {"role": "user", "content": "add"},
        {"role": "system", "content": "brief"},
    ]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([_output()], "input[0].call_id"),
        ([_call(), _output(), _output()], "input[2].call_id"),
        ([_call(), _USER], "input[1]"),
        ([_call()], "input"),
        ([_call(), _output(), _call(), _output()], "input[2].call_id"),
        ([_call(), _TEXT, _USER], "input[2]"),
        ([_custom()], "input"),
        ([_call(arguments="[" * 100_000), _output()], "input[0].arguments"),
    ],
)
def test_calls_and_outputs_go_together(items: list[dict[str, Any]], param: str) -> None:
    """Each call has one output before the next message, and its arguments are valid."""
    assert _refusal(*items).param == param


def test_a_call_that_was_cut_short_is_not_shown() -> None:
    """An incomplete call has no output and invalid arguments; the items before it stay."""
    cut = _call(arguments='{"a":', status="incomplete")
    assert _messages(_TEXT, cut, _USER) == [
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "add"},
    ]


def test_thoughts_without_text_are_dropped() -> None:
    """What only OpenAI could decrypt is accepted, and neither shown nor stored."""
    sealed = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x" * 1000}
    chain = _chain(sealed, _USER)
    assert len(chain.items) == len(chain.added) == 1
    both = _chain({**_THOUGHT, "encrypted_content": "y" * 1000})
    assert b"yyy" not in both.added[0]
    assert item_messages(both.items, instructions=None).messages[0]["reasoning_content"] == "hm"


def test_a_chain_goes_on_where_it_stopped() -> None:
    """Stored items come first, and only the others are new; mistakes in them have no index."""
    first = _chain(_USER, _TEXT, _call())
    second = item_chain(_items(_output()), previous=first.added)
    assert second.added == _chain(_output()).added
    messages = item_messages(second.items, instructions=None).messages
    assert [one["role"] for one in messages] == ["user", "assistant", "tool"]
    unanswered = item_chain("next", previous=first.added)
    with pytest.raises(InvalidRequestError) as caught:
        item_messages(unanswered.items, instructions=None)
    assert caught.value.message.startswith("previous_response_id: a function_call has no")


def test_references_stand_for_what_is_stored() -> None:
    """An item by its id; once, though it be named twice or be in the chain already."""
    stored = msgspec.json.encode(_TEXT)
    reference = {"type": "item_reference", "id": "msg_1"}
    alone = _chain(reference, reference, _USER, referenced={"msg_1": stored})
    assert [one["content"] for one in item_messages(alone.items, instructions=None).messages] == [
        "so",
        "add",
    ]
    inside = _chain(reference, _USER, previous=(stored,), referenced={"msg_1": stored})
    assert len(inside.items) == 2


def test_a_reference_to_nothing_is_refused() -> None:
    """By its place, and without its id."""
    with pytest.raises(InvalidRequestError) as caught:
        _chain(_USER, {"type": "item_reference", "id": "msg_secret"})
    assert caught.value.param == "input[1].id"
    assert "secret" not in caught.value.message


def test_references_bring_in_a_bounded_amount() -> None:
    """A short body cannot make a prompt of all that is stored."""
    large = msgspec.json.encode({"role": "user", "content": "x" * 3_000_000})
    ids = [f"msg_{number}" for number in range(3)]
    with pytest.raises(InvalidRequestError) as caught:
        _chain(
            *({"type": "item_reference", "id": one} for one in ids),
            referenced=dict.fromkeys(ids, large),
        )
    assert caught.value.param == "input[2]"


def test_a_conversation_has_an_end() -> None:
    """Stored items and bytes are bounded, and the refusal says what the bound is."""
    item = msgspec.json.encode(_USER)
    for previous, limit in (
        ((item,) * 8192, "8192 items"),
        ((msgspec.json.encode({"role": "user", "content": "x" * 8_388_608}),), "8388608 bytes"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            item_chain("next", previous=previous)
        assert caught.value.param == "previous_response_id"
        assert limit in caught.value.message
    assert len(item_chain("next", previous=(item,) * 8191).items) == 8192


def test_references_count_with_the_conversation_before() -> None:
    """Both come out of the store, and have one bound."""
    stored = msgspec.json.encode({"role": "user", "content": "x" * 5_000_000})
    reference = {"type": "item_reference", "id": "msg_1"}
    with pytest.raises(InvalidRequestError) as caught:
        _chain(reference, previous=(stored,), referenced={"msg_1": stored})
    assert caught.value.param == "input[0]"


_TEXTS = st.text(max_size=20)
_ANY_ITEM = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["user", "system", "assistant"]),
        _TEXTS,
    ),
    st.builds(
        lambda text: {**_THOUGHT, "content": [{"type": "reasoning_text", "text": text}]}, _TEXTS
    ),
    st.builds(_call, st.sampled_from(["c1", "c2"]), st.sampled_from(["", "{}", "{", "[]"])),
    st.builds(_custom, st.sampled_from(["c1", "c2"])),
    st.builds(_output, st.sampled_from(["c1", "c2"]), _TEXTS),
)


@example(items=[_custom("c1"), {"role": "system", "content": "Be kind."}, _output("c1", "done")])
@given(items=st.lists(_ANY_ITEM, min_size=1, max_size=8))
def test_any_items_are_rendered_or_refused(items: list[dict[str, Any]]) -> None:
    """No order of items breaks anything, and what is stored reads back as it was."""
    chain = _chain(*items)
    again = item_chain([], previous=chain.added)
    assert [one.item for one in again.items] == [one.item for one in chain.items]
    messages: list[dict[str, object]] = []
    with contextlib.suppress(InvalidRequestError):
        messages = item_messages(chain.items, instructions=None).messages
    for before, message in pairwise(messages):
        if message["role"] == "tool":
            assert before["role"] in ("assistant", "tool")
