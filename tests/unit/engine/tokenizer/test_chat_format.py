"""The chat formats that mlx-lm infers, and their splitters and parsers."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from support.engines.tiny_models import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.chat_format import (
    _INNER_MARKERS,
    JSON_TOOL_MARKERS,
    JSON_TOOLS,
    ChatFormat,
    SystemMessages,
    TextState,
    parsed_call,
)
from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.errors import InvalidRequestError
from machd.reading.chat_output import ChatOutput
from machd.reading.output import Content, Reasoning

pytestmark = pytest.mark.usefixtures("one_template_process")

THINKING_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n"
    "calls: <tool_call>{# tool_call.name #}</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def _tokenizer(
    template: str, special: Sequence[str] = (), plain: Sequence[str] = ()
) -> MlxTokenizer:
    import_mlx_lm()
    from mlx_lm.tokenizer_utils import (  # noqa: PLC0415 - after import_mlx_lm()
        TokenizerWrapper,
        _infer_tool_parser,
    )

    inner = tiny_tokenizer().wrapped._tokenizer
    inner.add_tokens([AddedToken(one, special=True) for one in special], special_tokens=True)
    inner.add_tokens([AddedToken(one, special=False, normalized=False) for one in plain])
    inner.chat_template = template
    name = _infer_tool_parser(inner)
    if name is None:
        return MlxTokenizer(TokenizerWrapper(inner))
    module = __import__(f"mlx_lm.tool_parsers.{name}", fromlist=["x"])
    return MlxTokenizer(
        TokenizerWrapper(
            inner,
            tool_call_start=module.tool_call_start,
            tool_call_end=module.tool_call_end,
            tool_parser=module.parse_tool_call,
        )
    )


def test_a_format_is_read_from_the_tokenizer_and_its_template() -> None:
    """Markers from the vocabulary, abilities from a few rendered words."""
    chat_format = _tokenizer(THINKING_TEMPLATE, plain=("<think>", "</think>")).chat_format
    assert chat_format.reasoning_markers == ("<think>", "</think>")
    assert chat_format.shows_tools
    assert chat_format.tool_format == JSON_TOOLS
    assert chat_format.tool_markers == JSON_TOOL_MARKERS
    assert chat_format.opening_state is TextState.NORMAL


def test_a_plain_model_has_no_format() -> None:
    """No markers and no tools; and a template that fails says no."""
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert _tokenizer(plain).chat_format == ChatFormat()
    failing = "{{ raise_exception('never') }}"
    nowhere = ChatFormat(system_messages=SystemMessages.NONE)
    assert _tokenizer(failing).chat_format == nowhere
    assert not _tokenizer("{{ 1 // 0 }}").chat_format.shows_tools


def test_the_format_is_read_once_and_by_any_thread() -> None:
    """Threads that ask first get equal answers."""
    tokenizer = _tokenizer(THINKING_TEMPLATE, plain=("<think>", "</think>"))
    with ThreadPoolExecutor(4) as pool:
        formats = list(pool.map(lambda _: tokenizer.chat_format, range(8)))
    assert all(one == formats[0] for one in formats)
    assert tokenizer.chat_format is tokenizer.chat_format


def test_every_parser_of_mlx_lm_has_its_inner_markers() -> None:
    """A new mlx-lm with a new parser fails here, so that its special tokens are looked at."""
    import_mlx_lm()
    import mlx_lm.tool_parsers  # noqa: PLC0415 - after import_mlx_lm()

    names = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert names == set(_INNER_MARKERS)


def test_edges_are_those_of_mlx_lms_server() -> None:
    """Every format that mlx-lm splits in its own way is split alike here."""
    import_mlx_lm()
    from mlx_lm.generate import (  # noqa: PLC0415 - after import_mlx_lm()
        TextStateMachine,
        make_text_state_machine,
    )

    class Facts:
        think_start, think_end, has_thinking = "<think>", "</think>", True
        tool_call_start, tool_call_end, has_tool_calling = "<tool_call>", "</tool_call>", True
        structural_markers = ("<|end|>",)
        response_transitions: ClassVar = {"header": [("to=me", "normal")]}

    chat_format = ChatFormat(
        tool_format=JSON_TOOLS,
        tool_markers=JSON_TOOL_MARKERS,
        reasoning_markers=("<think>", "</think>"),
        structural_markers=("<|end|>",),
        transitions=Facts.response_transitions,
    )
    text = "a<think>b</think> <|end|>c<thi"
    for state in ("normal", "header"):
        machine = make_text_state_machine(Facts()).make_state(state)
        _, expected = TextStateMachine.split(machine, f"to=me{text}")
        output = ChatOutput(chat_format, starts_in=TextState(state), tools=({"function": {}},))
        parser = output.parser()
        pieces = [*parser.push(f"to=me{text}"), *parser.finish(is_cut=False)]
        said = "".join(one.text for one in pieces if isinstance(one, Content))
        thought = "".join(one.text for one in pieces if isinstance(one, Reasoning))
        assert thought == "".join(one for name, one in expected if name == "reasoning").strip()
        normal = "".join(one for name, one in expected if name == "normal")
        assert said.replace(" ", "") == f"{normal}<thi".replace(" ", "")


def test_reading_an_answer_needs_no_mlx() -> None:
    """Answers with thoughts and calls are read in a process without mlx-lm."""
    program = (
        "import sys\n"
        "from machd.engine.fake.tokenizer import FakeTokenizer\n"
        "from machd.reading.chat_output import ChatOutput\n"
        "tools = ({'function': {'name': 'f'}},)\n"
        "parser = ChatOutput(FakeTokenizer().chat_format, tools=tools).parser()\n"
        'call = \'<tool_call>{"name": "f", "arguments": {}}</tool_call>\'\n'
        "assert len(parser.push(f'<think>hm</think>{call}')) == 4\n"
        "assert not {'mlx', 'mlx_lm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("parsed", "arguments"),
    [
        ({"name": "f"}, "{}"),
        ({"name": "f", "arguments": None}, "{}"),
        ({"name": "f", "arguments": {"a": "\u00e9"}}, '{"a": "\u00e9"}'),
        ({"name": "f", "arguments": '{"a":1}'}, '{"a": 1}'),
        ({"name": "f", "arguments": {"a": "\ud800"}}, '{"a": "\\ud800"}'),
    ],
)
def test_a_parsed_call_has_json_arguments(parsed: object, arguments: str) -> None:
    """Whatever form the parser left them in, and always text that has a UTF-8."""
    call = parsed_call(parsed)
    assert (call.name, call.arguments) == ("f", arguments)
    call.arguments.encode()


@pytest.mark.parametrize(
    "parsed",
    [
        None,
        "f",
        {},
        {"name": 1},
        {"name": ""},
        {"name": "f", "arguments": [1]},
        {"name": "f", "arguments": "[1]"},
        {"name": "f", "arguments": "{"},
        {"name": "f", "arguments": "[" * 100_000},
        {"name": "f", "arguments": {"a": float("nan")}},
        {"name": "f", "arguments": {"a": {1, 2}}},
        {"name": "f", "arguments": {(1, 2): 3}},
        {"name": "f", "arguments": 5},
    ],
)
def test_text_without_a_call_is_a_value_error(parsed: object) -> None:
    """The one way to fail."""
    with pytest.raises(ValueError):  # noqa: PT011 - its text is not shown
        parsed_call(parsed)


@pytest.mark.parametrize(
    "failure", [KeyError("x"), SyntaxError(), AttributeError(), RecursionError(), MemoryError()]
)
def test_parsers_have_one_way_to_fail(failure: Exception) -> None:
    """mlx-lm's raise whatever comes to hand."""

    def parse(_text: str, _tools: object) -> object:
        raise failure

    with pytest.raises(ValueError, match="no call"):
        ChatFormat(parse=parse).parse_tool_calls("x", [])
    with pytest.raises(ValueError, match="no call"):
        ChatFormat(parse=lambda _text, _tools: []).parse_tool_calls("x", [])


def test_prompted_calls_are_json_whatever_the_model_would_do() -> None:
    """A model whose template shows no tools is told how to write them."""
    base = ChatFormat(
        reasoning_markers=("<think>", "</think>"),
        tool_format="mistral",
        tool_markers=("[TOOL_CALLS]", ""),
    )
    told = base.with_json_calls()
    assert told.tool_markers == JSON_TOOL_MARKERS
    assert told.reasoning_markers == base.reasoning_markers
    (call,) = told.parse_tool_calls('\n{"name": "f", "arguments": {}}\n', [])
    assert call.name == "f"


def test_special_tokens_are_decoded_on_request() -> None:
    """Markers that are special tokens reach the reader, and other special tokens never do."""
    tokenizer = _tokenizer("", special=("<|call|>", "<|other|>"), plain=("<plain>",))
    text = "a<|call|>b<|other|><plain>c"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for keeps, expected in (
        ((), "ab<plain>c"),
        (("<|call|>",), "a<|call|>b<plain>c"),
        (("<|call|>thought", "no token"), "a<|call|>b<plain>c"),
    ):
        detokenizer = tokenizer.detokenizer(keeps=keeps)
        out = "".join(detokenizer.push(one) for one in token_ids) + detokenizer.finish()
        assert out == expected


def test_other_decoders_keep_markers_too() -> None:
    """A vocabulary whose joints only its decoder knows, through the window."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - only here

    vocabulary = {"[UNK]": 0, "green": 1, "##house": 2, "plant": 3, "[END]": 4}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["<call>", "<other>"])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[END]")
    import_mlx_lm()
    from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: PLC0415 - after import_mlx_lm()

    tokenizer = MlxTokenizer(TokenizerWrapper(inner), chat=False)
    assert not tokenizer.knows_token_bytes
    token_ids = [1, 2, 5, 3, 6, 3, 4]
    detokenizer = tokenizer.detokenizer(keeps=("<call>",))
    out = "".join(detokenizer.push(one) for one in token_ids) + detokenizer.finish()
    assert out == "greenhouse <call> plant plant"
    assert tokenizer.decode(token_ids) == "greenhouse plant plant"


MESSAGES: list[dict[str, object]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "I thi"},
]


def test_a_final_message_is_continued_where_it_stops() -> None:
    """No end of turn after it, no new turn."""
    tokenizer = _tokenizer(THINKING_TEMPLATE)
    text = tokenizer.render_chat(MESSAGES, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant: I thi")


def test_a_final_message_that_a_template_hides_is_not_quoted() -> None:
    """The library's own words hold the conversation; ours do not."""
    template = "{% for message in messages[:-1] %}{{ message.content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="cannot be continued") as caught:
        _tokenizer(template).render_chat(
            MESSAGES, add_generation_prompt=False, continue_final_message=True
        )
    assert "I thi" not in caught.value.message


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // (messages | length - 1) }}",
    ],
)
def test_a_template_that_runs_away_is_the_requests_failure(template: str) -> None:
    """Endless recursion and arithmetic are 400s with a constant text."""
    with pytest.raises(InvalidRequestError, match=r"RecursionError|ZeroDivisionError"):
        _tokenizer(template).render_chat([{"role": "user", "content": "hi"}])


def test_tools_and_variables_reach_the_template() -> None:
    """And an empty list of tools is none."""
    tokenizer = _tokenizer("{{ tools is none }} {{ tools | tojson }} {{ mood }}")
    user: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(user, variables={"mood": "good"}) == "True null good"
    assert '"name": "f"' in tokenizer.render_chat(user, tools=[{"function": {"name": "f"}}])


def test_mlx_lms_own_renderers_get_arguments_as_text() -> None:
    """They parse the JSON themselves, where templates want the object."""
    seen: list[object] = []

    def render(messages: list[dict[str, object]], **_options: object) -> str:
        seen.extend(messages)
        return "text"

    tokenizer = _tokenizer(THINKING_TEMPLATE)
    tokenizer.wrapped._chat_template = render
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    message: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert tokenizer.render_chat([message]) == "text"
    (rendered,) = seen
    assert isinstance(rendered, dict)
    assert json.loads(rendered["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert call["function"] == {"name": "f", "arguments": {"a": 1}}


def test_fake_tokenizer_renders_lines() -> None:
    """Plain conversations as ever; tools, calls and thinking on lines of their own."""
    fake = FakeTokenizer()
    user: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    assert fake.render_chat(user) == "user: hi\nassistant: "
    assert fake.render_chat(user, variables={"enable_thinking": True}).endswith(
        "assistant: <think>"
    )
    call = {"function": {"name": "f", "arguments": {}}}
    text = fake.render_chat(
        [*user, {"role": "assistant", "content": None, "tool_calls": [call]}],
        tools=[{"function": {"name": "f"}}],
        add_generation_prompt=False,
    )
    assert text.splitlines() == [
        'tools: [{"function": {"name": "f"}}]',
        "user: hi",
        'assistant calls: {"name": "f", "arguments": {}}',
    ]
    continued = fake.render_chat(MESSAGES, add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("assistant: I thi")
