"""Bodies for ``POST /v1/chat/completions`` that must be refused and must harm nothing.

Plain data: a name, the bytes, and the statuses that are a right answer, all of them 4xx. Every
body of the right shape names the fake engine's model, unless a wrong model is what is hostile: what
is wrong between fields is told only to those who ask for a model that is served.
"""

from __future__ import annotations

import json

HostileBody = tuple[str, bytes, frozenset[int]]

_BAD = frozenset({400})
_UNKNOWN_MODEL = frozenset({400, 404})
_TOO_LARGE = frozenset({400, 413})
_DIGITS_400 = "9" * 400
_DIGITS_5000 = "9" * 5000
_DEPTH = 200_000


def _body(**fields: object) -> bytes:
    """A valid body with some fields replaced or added."""
    whole = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields}
    return json.dumps(whole).encode()


def _raw(field: str) -> bytes:
    """A valid body with one more member, written by hand."""
    return _body()[:-1] + b", " + field.encode("utf-8", "surrogatepass") + b"}"


def _message(**fields: object) -> bytes:
    return _body(messages=[fields])


def _part(**fields: object) -> bytes:
    return _message(role="user", content=[fields])


_NOT_JSON: tuple[tuple[str, bytes], ...] = (
    ("empty body", b""),
    ("white space only", b" \r\n\t "),
    ("a NUL byte", b"\x00"),
    ("text", b"hello"),
    ("a form", b"model=model&messages=hi"),
    ("an opening brace", b"{"),
    ("cut off in the middle", _body()[:-12]),
    ("two documents", _body() + _body()),
    ("trailing text", _body() + b"x"),
    ("trailing comma", _body()[:-1] + b",}"),
    ("single quotes", _body().replace(b'"', b"'")),
    ("bare key", b"{model: 1}"),
    ("a comment", b"/* hi */" + _body()),
    ("byte order mark", b"\xef\xbb\xbf" + _body()),
    ("UTF-16", _body().decode().encode("utf-16")),
    ("UTF-32", _body().decode().encode("utf-32")),
    ("gzip magic", b"\x1f\x8b\x08\x00" + _body()),
    ("NaN", _raw('"temperature": NaN')),
    ("Infinity", _raw('"temperature": Infinity')),
    ("negative Infinity", _raw('"top_p": -Infinity')),
    ("leading zero", _raw('"n": 01')),
    ("plus sign", _raw('"n": +1')),
    ("hexadecimal", _raw('"n": 0x1')),
    ("bad escape", _raw('"user": "\\x41"')),
    ("short unicode escape", _raw('"user": "\\u12"')),
    ("raw newline in a string", _raw('"user": "a\nb"')),
    ("raw NUL in a string", _raw('"user": "a\x00b"')),
    ("escaped lone high surrogate", _raw('"user": "\\ud800"')),
    ("escaped surrogates in the wrong order", _raw('"user": "\\udc00\\ud800"')),
    ("surrogate encoded as UTF-8", _raw('"user": "\ud800"')),
    ("invalid UTF-8 in a value", _raw('"user": "?"').replace(b"?", b"\xff")),
    ("invalid UTF-8 in a key", _raw('"?": 1').replace(b"?", b"\xc3\x28")),
    ("invalid UTF-8 in an unknown field", _raw('"zz": "?"').replace(b"?", b"\x80")),
    ("overlong UTF-8", _raw('"user": "?"').replace(b"?", b"\xc0\xaf")),
    ("truncated UTF-8", _raw('"user": "?"').replace(b"?", b"\xf0\x9f\x98")),
)

_WRONG_SHAPE: tuple[tuple[str, bytes], ...] = (
    ("null", b"null"),
    ("a number", b"1"),
    ("a string", b'"hi"'),
    ("a list", b"[]"),
    ("a list with a body", b"[" + _body() + b"]"),
    ("an empty object", b"{}"),
    ("deep lists", b"[" * _DEPTH + b"]" * _DEPTH),
    ("deep lists, never closed", b"[" * _DEPTH),
    ("deep objects", b'{"a":' * _DEPTH + b"1" + b"}" * _DEPTH),
    ("deep lists in an unknown field", _raw('"zz": ' + "[" * _DEPTH + "]" * _DEPTH)),
    ("deep lists in a refused field", _raw('"tools": ' + "[" * _DEPTH + "]" * _DEPTH)),
    ("deep objects in metadata", _raw('"metadata": ' + '{"a":' * _DEPTH + "1" + "}" * _DEPTH)),
    ("no messages", b'{"model": "fake"}'),
    ("model is a number", _body(model=1)),
    ("model of 10000 characters", _body(model="m" * 10_000)),
    ("messages are null", _body(messages=None)),
    ("messages are a string", _body(messages="hi")),
    ("messages are an object", _body(messages={"role": "user", "content": "hi"})),
    ("no message at all", _body(messages=[])),
    ("a message is null", _body(messages=[None])),
    ("10000 messages", _body(messages=[{"role": "user", "content": "hi"}] * 10_000)),
    ("no role", _message(content="hi")),
    ("unknown role", _message(role="root", content="hi")),
    ("role of 10000 characters", _message(role="r" * 10_000, content="hi")),
    ("role is a list", _message(role=["user"], content="hi")),
    ("content is a number", _message(role="user", content=1)),
    ("tool without a call", _message(role="tool", content="4")),
    ("unknown part", _part(type="hologram")),
    ("part without a type", _part(text="hi")),
    ("text part without text", _part(type="text")),
    ("duplicate key, the last one wrong", _raw('"n": 1, "n": "1"')),
)

_OUT_OF_RANGE: tuple[tuple[str, bytes], ...] = (
    ("max_tokens 0", _body(max_tokens=0)),
    ("max_tokens -2", _body(max_tokens=-2)),
    ("max_tokens 2**31", _body(max_tokens=2**31)),
    ("max_tokens of 400 digits", _raw(f'"max_tokens": {_DIGITS_400}')),
    ("max_tokens of 5000 digits", _raw(f'"max_tokens": {_DIGITS_5000}')),
    ("max_tokens is a string", _body(max_tokens="7")),
    ("max_tokens is a fraction", _body(max_tokens=7.5)),
    ("max_tokens is true", _body(max_tokens=True)),
    ("max_completion_tokens 0", _body(max_completion_tokens=0)),
    ("max_tokens twice, differently", _body(max_tokens=1, max_completion_tokens=2)),
    ("n 0", _body(n=0)),
    ("n 129", _body(n=129)),
    ("n 1e9", _raw('"n": 1e9')),
    ("n of 400 digits", _raw(f'"n": {_DIGITS_400}')),
    ("temperature negative", _body(temperature=-0.1)),
    ("temperature 2.1", _body(temperature=2.1)),
    ("temperature 1e999", _raw('"temperature": 1e999')),
    ("temperature of 400 digits", _raw(f'"temperature": {_DIGITS_400}')),
    ("temperature is a string", _body(temperature="NaN")),
    ("top_p negative", _body(top_p=-0.1)),
    ("top_p 1.1", _body(top_p=1.1)),
    ("top_k -2", _body(top_k=-2)),
    ("top_k 2**63", _body(top_k=2**63)),
    ("min_p -0.1", _body(min_p=-0.1)),
    ("min_p 1.1", _body(min_p=1.1)),
    ("repetition_penalty 0", _body(repetition_penalty=0)),
    ("repetition_penalty 1000", _body(repetition_penalty=1000)),
    ("presence_penalty 3", _body(presence_penalty=3)),
    ("frequency_penalty -3", _body(frequency_penalty=-3)),
    ("seed 2**63", _body(seed=2**63)),
    ("seed of 5000 digits", _raw(f'"seed": -{_DIGITS_5000}')),
    ("seed is a string", _body(seed="1")),
    ("1000 stops", _body(stop=["a"] * 1000)),
    ("stop of 10000 characters", _body(stop="a" * 10_000)),
    ("empty stop", _body(stop="")),
    ("empty stop in a list", _body(stop=["a", ""])),
    ("stop is a number", _body(stop=[1])),
    ("negative stop token", _body(stop_token_ids=[-1])),
    ("1000 stop tokens", _body(stop_token_ids=[1] * 1000)),
    ("logit_bias is a list", _body(logit_bias=[1, 2])),
    ("logit_bias for a word", _body(logit_bias={"hello": 1})),
    ("logit_bias for a negative id", _body(logit_bias={"-1": 1})),
    ("logit_bias for an id of 5000 digits", _body(logit_bias={_DIGITS_5000: 1})),
    ("logit_bias 101", _body(logit_bias={"1": 101})),
    ("logit_bias with 2000 ids", _body(logit_bias={str(i): 1 for i in range(2000)})),
    ("top_logprobs 21", _body(logprobs=True, top_logprobs=21)),
    ("top_logprobs without logprobs", _body(top_logprobs=2)),
    ("logprobs is a number", _body(logprobs=5)),
    ("stream is a string", _body(stream="true")),
    ("stream_options is a list", _body(stream=True, stream_options=[])),
    ("stream_interval 0", _body(stream=True, stream_interval=0)),
    ("ignore_eos is a number", _body(ignore_eos=1)),
    ("priority 2**31", _body(priority=2**31)),
    ("priority of another name", _body(priority="urgent")),
    ("metadata with 17 pairs", _body(metadata={str(i): "v" for i in range(17)})),
    ("metadata with a list", _body(metadata={"k": ["v"]})),
    ("user of 10000 characters", _body(user="u" * 10_000)),
)

_UNSUPPORTED: tuple[tuple[str, bytes], ...] = (
    ("function_call of no function", _body(function_call={"name": "f"}, functions=[{"name": "g"}])),
    ("a template", _body(chat_template="{{ cycler.__init__.__globals__ }}")),
    ("template arguments", _body(chat_template_kwargs={"tokenize": True})),
    ("no generation prompt", _body(add_generation_prompt=False)),
    ("audio out", _body(modalities=["text", "audio"], audio={"voice": "alloy"})),
    ("web search", _body(web_search_options={"search_context_size": "low"})),
    ("verbosity of another word", _body(verbosity="none")),
    ("an image from the network", _part(type="image_url", image_url={"url": "http://h/i.png"})),
    ("an image by a path", _part(type="image_url", image_url={"url": "/etc/hostname"})),
    ("a sound", _part(type="input_audio", input_audio={"data": "", "format": "wav"})),
    ("a file", _part(type="file", file={"file_id": "f"})),
)


def _tool(**function: object) -> dict[str, object]:
    return {"type": "function", "function": function}


def _call(**function: object) -> bytes:
    return _message(
        role="assistant", tool_calls=[{"id": "c", "type": "function", "function": function}]
    )


_DEEP_SCHEMA = '{"a":' * 500 + "{}" + "}" * 500
_JSON_SCHEMA = '"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": '

_TOOLS: tuple[tuple[str, bytes], ...] = (
    ("tools are an object", _body(tools={})),
    ("513 tools", _body(tools=[_tool(name=f"f{i}") for i in range(513)])),
    ("a tool of another type", _body(tools=[{"type": "custom", "custom": {"name": "f"}}])),
    ("a tool without a name", _body(tools=[_tool(description="d")])),
    ("a tool's name with a quote", _body(tools=[_tool(name='f"')])),
    ("a tool's name with a line feed at its end", _body(tools=[_tool(name="f\n")])),
    ("a tool's name of 129 characters", _body(tools=[_tool(name="f" * 129)])),
    ("two tools of one name", _body(tools=[_tool(name="f"), _tool(name="f")])),
    ("a tool's parameters are a list", _body(tools=[_tool(name="f", parameters=[])])),
    ("a tool's parameters are a text", _body(tools=[_tool(name="f", parameters="{}")])),
    (
        "a tool's parameters are deep",
        _raw(
            '"tools": [{"type": "function", "function": {"name": "f", "parameters": '
            + _DEEP_SCHEMA
            + "}}]"
        ),
    ),
    (
        "a tool's parameters are long",
        _body(tools=[_tool(name="f", parameters={"description": "x" * 300_000})]),
    ),
    ("tool_choice of another word", _body(tool_choice="any")),
    ("tool_choice names no tool", _body(tools=[_tool(name="f")], tool_choice=_tool(name="g"))),
    ("tool_choice without tools", _body(tool_choice="required")),
    ("a call without an id", _message(role="assistant", tool_calls=[_tool(name="f")])),
    ("a call's arguments are an object", _call(name="f", arguments={})),
    ("a call's arguments are deep", _call(name="f", arguments=_DEEP_SCHEMA)),
    ("a call's arguments are too deep", _call(name="f", arguments="[" * _DEPTH)),
    ("a call's arguments have too many parts", _call(name="f", arguments="[]," * 30_000)),
    ("a tool answers no call", _message(role="tool", tool_call_id="c", content="4")),
)

_SHAPES: tuple[tuple[str, bytes], ...] = (
    ("a format without a type", _body(response_format={"$ref": "#"})),
    ("a format of another type", _body(response_format={"type": "xml"})),
    ("a schema format without a schema", _body(response_format={"type": "json_schema"})),
    ("a schema that is null", _raw(_JSON_SCHEMA + "null}}")),
    ("a schema with 1e999", _raw(_JSON_SCHEMA + '{"const": 1e999}}}')),
    ("a schema with half a surrogate pair", _raw(_JSON_SCHEMA + '{"const": "\\ud800"}}}')),
    ("a deep schema", _raw(_JSON_SCHEMA + _DEEP_SCHEMA + "}}")),
    ("guided_json is a number", _body(guided_json=1)),
    ("guided_json 1e999", _raw('"guided_json": 1e999')),
    ("guided_json is a text that is no JSON", _body(guided_json="{")),
    ("guided_json is long", _body(guided_json={"description": "x" * 300_000})),
    ("guided_regex is long", _body(guided_regex="(a+)+b" * 5000)),
    ("guided_choice is empty", _body(guided_choice=[])),
    ("guided_choice is a text", _body(guided_choice="a")),
    ("guided_grammar is long", _body(guided_grammar="x" * 300_000)),
    ("two constraints", _body(guided_regex="a", guided_choice=["a"])),
    ("two constraints in one field", _body(structured_outputs={"regex": "a", "json": {}})),
    ("a constraint without an end", _body(guided_regex="a", ignore_eos=True)),
    ("reasoning effort of another word", _body(reasoning_effort="maximal")),
    ("a negative thinking budget", _body(thinking_token_budget=-2)),
    ("template arguments that are a list", _body(chat_template_kwargs={"thinking": [True]})),
    ("a switch that is a word", _body(chat_template_kwargs={"enable_thinking": "no"})),
    (
        "continue the user's message",
        _body(continue_final_message=True, add_generation_prompt=False),
    ),
)

_NO_SUCH_MODEL: tuple[tuple[str, bytes], ...] = (
    ("model is a path", _body(model="/etc/passwd")),
    ("model climbs", _body(model="../../../etc/passwd")),
    ("model climbs the other way", _body(model="..\\..\\secret")),
    ("model with a NUL", _body(model="model\x00.safetensors")),
    ("model with a line break", _body(model="model\r\nX-Evil: 1")),
    ("model is an address", _body(model="http://localhost:1/model")),
    ("model in bidirectional text", _body(model="\u202eledom")),
)

_LARGE: tuple[tuple[str, bytes], ...] = (
    ("one message of 10 MiB", _message(role="user", content="x" * (10 * 1024 * 1024))),
    ("10 MiB of white space", b" " * (10 * 1024 * 1024)),
)

HOSTILE_CHAT_BODIES: tuple[HostileBody, ...] = (
    *((name, body, _BAD) for name, body in _NOT_JSON),
    *((name, body, _BAD) for name, body in _WRONG_SHAPE),
    *((name, body, _BAD) for name, body in _OUT_OF_RANGE),
    *((name, body, _BAD) for name, body in _UNSUPPORTED),
    *((name, body, _BAD) for name, body in _TOOLS),
    *((name, body, _BAD) for name, body in _SHAPES),
    *((name, body, _UNKNOWN_MODEL) for name, body in _NO_SUCH_MODEL),
    *((name, body, _TOO_LARGE) for name, body in _LARGE),
)
