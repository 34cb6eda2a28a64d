"""Readers of tool calls: what is computed is no call, and a value's own characters stay as they are."""

from __future__ import annotations

import json

import pytest

from machd.engine.protocol.chat_format import ParsedToolCall
from machd.reading.pythonic_calls import well_formed_python
from machd.reading.tagged_calls import (
    CALL_TAGS,
    TaggedCall,
    TaggedValue,
    read_tagged_calls,
)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('[a(x="1"), b(y=[1, {"z": true}])]', '[a(x="1"), b(y=[1, {"z": true}])]'),
        ("[a(city=Paris), a(city=London)]", "[a(city='Paris'), a(city='London')]"),
        ("[a(x=[b, null])]", "[a(x=['b', None])]"),
    ],
)
def test_python_of_constants_is_read(text: str, read: str) -> None:
    """A word without quotes is a text; JSON's words are what they are."""
    assert well_formed_python(text) == read


@pytest.mark.parametrize(
    "text",
    [
        '[a(x="1", n=1+2), b(path="p")]',
        "[a(x=f'{y}')]",
        '[a(**{"city": "x"})]',
        '[a(x="a" + "b")]',
        "[a(x=b())]",
        "[a(x=b.c)]",
    ],
)
def test_python_that_would_have_to_be_computed_is_no_call(text: str) -> None:
    """mlx-lm would merge several calls into one, with values that the model did not write."""
    with pytest.raises(ValueError, match=r"\S"):
        well_formed_python(text)


@pytest.mark.parametrize("value", ["x = '\\ue000' < 3", "\ue000 < \\uE001", "a < b"])
def test_values_keep_what_stands_for_less_than(value: str) -> None:
    """The character that replaces it meanwhile is one that the value does not hold, nor spells by its number."""
    tagged = TaggedCall("f", "<f>", (TaggedValue("x", "<x>", value, "</x>"),), "</f>")

    def parse(text: str) -> list[ParsedToolCall]:
        inner = text.removeprefix("<f><x>").removesuffix("</x></f>")
        assert "<" not in inner
        return [ParsedToolCall("f", json.dumps({"x": inner}))]

    assert json.loads(tagged.parsed(parse).arguments) == {"x": value}


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (("content", "path"), {"content": "\na <parameter=foo> b\n", "path": "\np\n"}),
        (("content", "foo"), {"content": "\na ", "foo": " b\n"}),
        (None, {"content": "\na ", "foo": " b\n"}),
    ],
)
def test_an_opening_inside_a_value_ends_it_only_if_the_function_has_such_an_argument(
    keys: tuple[str, ...] | None, values: dict[str, str]
) -> None:
    """An agent writes files that show the format; a model leaves closing tags out."""
    text = "<function=write>\n<parameter=content>\na <parameter=foo> b\n</parameter>\n"
    if "path" in values:
        text += "<parameter=path>\np\n</parameter>\n"
    (call,) = read_tagged_calls(
        CALL_TAGS["qwen3_coder"], f"{text}</function>", (), keys_of=lambda _: keys
    )
    assert {one.key: one.text for one in call.values} == values


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "muse_spark",
            '<atem:invoke name="w"><atem:parameter name="c">' + '<atem:parameter name="a" ' * 4000,
            "^$",
        ),
        (
            "kimi_k3",
            '<|open|>call tool="w"<|sep|>' + '<|open|>argument key="a' * 4000,
            "has to stand here",
        ),
    ],
)
def test_begins_of_tags_are_looked_at_once(name: str, text: str, said: str) -> None:
    """Thousands of them take milliseconds; a search over all of them from each one would reach the test's time limit."""
    with pytest.raises(ValueError, match=said):
        read_tagged_calls(CALL_TAGS[name], text, ())
