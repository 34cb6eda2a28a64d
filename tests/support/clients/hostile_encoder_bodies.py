"""Bodies that no endpoint of an encoder may answer with a vector, a failure of the server's or silence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

_CANARY = "xyzzycanary"
_EMBED = ("/v1/embeddings", "/embedding")
_NO_TEXTS: tuple[object, ...] = (
    *(
        5,
        -1.5,
        True,
        {},
        {"text": _CANARY},
        [None],
        [[]],
        [{}],
        [True],
        [1.5],
        [[1, _CANARY]],
        [["a"]],
    ),
    *(
        [-1],
        [2**40],
        [[2**31]],
        ["a", 1],
        [1, [1]],
        ["a", None],
        [[1], "a"],
        [99_999],
        [[1, 99_999]],
    ),
)


@dataclass(frozen=True, slots=True)
class Hostile:
    """A body for one path, and the statuses that are right for it."""

    path: str
    body: bytes
    statuses: tuple[int, ...] = (400,)


def _each(field: str, *values: object) -> Iterator[tuple[str, object]]:
    """The field with each of some values."""
    for value in values:
        yield field, value


def _of(path: str, **fields: object) -> Hostile:
    return Hostile(path, json.dumps(fields).encode())


def _broken() -> Iterator[bytes]:
    """No JSON, or no object."""
    yield from (b"", b"{", b"null", b"[]", b'"a"', b"1e999", b"{}", b'{"model": "short"}')
    yield b'{"model": "short", "input": "\\ud800"}'
    yield b'{"model": "short", "input": ["a", "\\udfff b"]}'
    yield b'{"model": "short", "input": "\xff"}'
    yield b'{"model": "short", "input": NaN}'
    yield b'{"model": "short", "input": 1e999}'
    yield b'{"model": "short", "input": ' + b"[" * 2000 + b"]" * 2000 + b"}"
    yield b'{"model": "short", "input": "a"' + b" " * 10
    yield b"\xef\xbb\xbf[1]"


def _embeddings() -> Iterator[Hostile]:
    for path in _EMBED:
        for body in _broken():
            yield Hostile(path, body)
        for given in _NO_TEXTS:
            yield _of(path, model="short", input=given)
        for field, value in (
            *_each("dimensions", 0, -1, 17, 1.5, "4", 2**70, [], True),  # noqa: FBT003 - a JSON value
            *_each("encoding_format", "int8", "FLOAT", "", 5, ["float"]),
            *_each("truncate", "START", "middle", 5, [], _CANARY),
            *_each("truncate_prompt_tokens", 0, 5, -2, 2**40, "all"),
            *_each("prompt_name", "", _CANARY, 5, ["query"], "q" * 1000),
            *_each("input_type", "", _CANARY, 5, "classification"),
            *_each("instruction", 5, ["a"], {"a": 1}),
            *_each("normalize", False, "yes", 1),  # noqa: FBT003 - a JSON value
            *_each("embd_normalize", 0, 3, "2", True),  # noqa: FBT003 - a JSON value
            *_each("embed_dtype", "float16", 5),
            ("messages", [{"role": "user", "content": _CANARY}]),
            ("add_special_tokens", False),
            ("padding", "max_length"),
            ("user", 5),
        ):
            yield _of(path, **{"model": "short", "input": "a", field: value})
        yield _of(path, model="short", input=["a"] * 10_000)
        yield _of(path, model="short", input=["a", "b " * 10_000])
        yield _of(path, model="short", input="a", prompt_name="query", input_type="query")
        yield Hostile(path, b'{"model": "short", "input": "' + b"a" * 2**21 + b'"}', (413,))
        yield Hostile(path, json.dumps({"model": "", "input": "a"}).encode())
        yield Hostile(path, json.dumps({"model": f"../{_CANARY}", "input": "a"}).encode(), (404,))


def _ollama() -> Iterator[Hostile]:
    for field, value in (
        *_each("input", 5, {}, [1], [None], [["a"]], True),  # noqa: FBT003 - a JSON value
        *_each("dimensions", 0, -1, 17, "4"),
        *_each("truncate", "END?", 5),
        *_each("keep_alive", "soon", [], {}),
    ):
        yield _of("/api/embed", **{"model": "short", "input": "a", field: value})
    yield _of("/api/embed", model="short", input=["a"] * 10_000)
    for field, value in _each("prompt", 5, ["a"], {}):
        yield _of("/api/embeddings", **{"model": "short", field: value})
    yield _of("/api/embeddings", model="chat", prompt="a")
    yield Hostile("/api/embeddings", b'{"model": "short", "prompt": "\\ud800"}')


def _scoring() -> Iterator[Hostile]:
    for path in ("/v1/rerank", "/v2/rerank"):
        yield from (_of(path, model="cross"), _of(path, model="cross", query="a"))
        yield _of(path, model="cross", documents=["a"])
        for field, value in (
            *_each("documents", [], [5], [{}], "a", [{"text": 5}], [None], ["a"] * 10_000),
            *_each("query", 5, None, ["a"], {}),
            *_each("top_n", -1, 1.5, "2", 2**40),
            *_each("max_tokens_per_doc", 0, -1, "2"),
            ("rank_fields", ["title"]),
            ("return_documents", "yes"),
            ("instruction", _CANARY),
        ):
            yield _of(path, **{"model": "cross", "query": "a", "documents": ["a"], field: value})
        yield _of(path, model="cross", query="a " * 50, documents=["a"], truncate=False)
        yield Hostile(path, b'{"model": "cross", "query": "a", "documents": ["\\ud800"]}')
    pairs: tuple[dict[str, object], ...] = (
        {},
        {"text_1": "a"},
        {"text_2": "a"},
        {"text_1": [], "text_2": "a"},
        {"text_1": ["a", "b"], "text_2": ["a"]},
        {"text_1": "a", "queries": "b", "text_2": "c"},
        {"text_1": 5, "text_2": "a"},
        {"text_1": "a", "text_2": [None]},
        {"text_1": "a", "text_2": ["a"] * 10_000},
        {"text_1": "a " * 50, "text_2": "a"},
    )
    for fields in pairs:
        yield _of("/v1/score", model="cross", **fields)
    for field, value in _each("input", 5, None, [], [5], {}, ["a"] * 10_000, "a " * 50):
        yield _of("/v1/classify", **{"model": "mood", field: value})


def _tei() -> Iterator[Hostile]:
    for field, value in (
        *_each("inputs", 5, None, [], [None], {}, [["a"], "b"], "a " * 50),
        *_each("normalize", "yes", 1),
        ("truncation_direction", "Left"),
    ):
        yield _of("/embed", **{"model": "short", "inputs": "a", field: value})
    for field, value in (
        *_each("inputs", 5, None, [], [[]], [["a", "b", "c"]], ["a", ["b"]], [[None]], "a " * 50),
        *_each("raw_scores", "yes", 1),
    ):
        yield _of("/predict", **{"model": "mood", "inputs": "a", field: value})
    for field, value in (
        *_each("texts", [], [5], "a", [{"text": "a"}], None, ["a"] * 10_000),
        *_each("return_text", "yes", 1),
        ("documents", ["a"]),
    ):
        yield _of("/rerank", **{"model": "cross", "query": "a", "texts": ["a"], field: value})


HOSTILE = (*_embeddings(), *_ollama(), *_scoring(), *_tei())
