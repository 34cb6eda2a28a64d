"""Embeddings, scores and classes over HTTP, of tiny random checkpoints beside a model that chats."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.checkpoints.tiny_encoder import (
    PROMPTS,
    TINY_DIMENSIONS,
    TINY_MAX_TOKENS,
    TINY_VOCABULARY_TOKENS,
    write_tiny_classifier,
    write_tiny_embedder,
)
from support.clients.hostile_encoder_bodies import HOSTILE
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.scraping import scrape
from support.daemon.serve_process import ServeProcess

_CANARY = "xyzzycanary"
_LONG = "word " * 20
_CONFIG = """
[limits]
max_inputs = 64
max_queue_tokens = 3000
[models.chat]
path = "{folder}/chat"
pin = true
[models.short]
path = "{folder}/short"
[models.raw]
path = "{folder}/raw"
[models.cross]
path = "{folder}/cross"
[models.mood]
path = "{folder}/mood"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A daemon of one model that chats, two that embed and two that classify."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_llama(folder / "chat")
    write_tiny_embedder(folder / "short", is_matryoshka=True, prompts=PROMPTS)
    write_tiny_embedder(folder / "raw", is_normalised=False)
    write_tiny_classifier(folder / "cross", ["relevant"])
    write_tiny_classifier(folder / "mood", ["sad", "fine", "glad"])
    config = folder / "machd.toml"
    config.write_text(_CONFIG.format(folder=folder))
    with ServeProcess("--config", str(config)) as running:
        yield running


@pytest.fixture
def http(server: ServeProcess) -> Iterator[httpx.Client]:
    """A client of that daemon."""
    with httpx.Client(base_url=server.url, timeout=CEILING_S) as opened:
        yield opened


def _ask(http: httpx.Client, path: str, **fields: object) -> Any:
    answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _vectors(http: httpx.Client, **fields: object) -> NDArray[np.float64]:
    answer = _ask(http, "/v1/embeddings", **({"model": "short"} | fields))
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return np.array([one["embedding"] for one in answer["data"]])


def _error(http: httpx.Client, path: str, **fields: object) -> Mapping[str, Any]:
    answer = http.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    error: Mapping[str, Any] = answer.json()["error"]
    return error


def test_vectors_in_a_batch_are_those_alone(http: httpx.Client) -> None:
    """Neighbours of other lengths change nothing, and equal texts have equal vectors."""
    texts = ["a", "some words here", "b" * 20, "", "a", "x y z"]
    together = _vectors(http, input=texts)
    alone = np.concatenate([_vectors(http, input=one) for one in texts])
    assert together.shape == (len(texts), TINY_DIMENSIONS)
    assert (together * alone).sum(axis=1) == pytest.approx(1.0, abs=1e-6)
    assert together[0].tolist() == together[4].tolist()


def test_base64_holds_the_numbers_of_the_other_form(http: httpx.Client) -> None:
    """Little-endian float32, bit for bit."""
    answer = _ask(http, "/v1/embeddings", model="short", input=["a", "b"], encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]]
    assert np.array_equal(decoded, _vectors(http, input=["a", "b"]))


def test_usage_counts_the_tokens_of_all_inputs(http: httpx.Client) -> None:
    """Special tokens and equal texts are in it."""
    answer = _ask(http, "/v1/embeddings", model="short", input=["abc", "abc"])
    assert answer["usage"] == {"prompt_tokens": 10, "total_tokens": 10}


def test_token_ids_of_tokenize_give_the_texts_vector(http: httpx.Client) -> None:
    """Ids are taken as they stand, special tokens included."""
    ids = _ask(http, "/tokenize", model="short", prompt="some words")["tokens"]
    of_text = _vectors(http, input="some words")
    assert np.array_equal(_vectors(http, input=ids), of_text)
    assert np.array_equal(_vectors(http, input=[ids, ids])[1], of_text[0])


def test_shorter_vectors_are_cut_and_normalised_where_the_checkpoint_allows_it(
    http: httpx.Client,
) -> None:
    """The others are refused by name."""
    cut = _vectors(http, input="abc", dimensions=4)[0]
    whole = _vectors(http, input="abc")[0, :4]
    assert cut == pytest.approx(whole / np.linalg.norm(whole))
    error = _error(http, "/v1/embeddings", model="raw", input="abc", dimensions=4)
    assert (error["param"], error["code"]) == ("dimensions", "unsupported_parameter")


def test_prompts_stand_before_texts(http: httpx.Client) -> None:
    """By their names, by Cohere's and by an instruction."""
    plain = _vectors(http, input="find abc")
    for asked in (
        {"prompt_name": "query"},
        {"input_type": "search_query"},
        {"instruction": "find "},
    ):
        assert np.array_equal(_vectors(http, input="abc", **asked), plain)


def test_a_text_that_is_too_long_is_refused_or_cut(http: httpx.Client) -> None:
    """OpenAI's code names the input; ``truncate`` gives the vector of its beginning."""
    error = _error(http, "/v1/embeddings", model="short", input=["a", _LONG])
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
    assert f"maximum context length is {TINY_MAX_TOKENS} tokens" in error["message"]
    for truncate in (True, "END"):
        cut = _vectors(http, input=_LONG, truncate=truncate)
        ids = _ask(http, "/tokenize", model="short", prompt=_LONG)["tokens"]
        assert np.array_equal(cut, _vectors(http, input=[*ids[: TINY_MAX_TOKENS - 1], ids[-1]]))


def test_the_setting_cuts_what_requests_leave_unsaid(tmp_path: Path) -> None:
    """``limits.long_input_policy`` is for clients that cannot ask, and a request still has the last word."""
    write_tiny_embedder(tmp_path / "short")
    with (
        ServeProcess(
            "--model-path", str(tmp_path / "short"), "--limits-long-input-policy", "truncate"
        ) as server,
        httpx.Client(base_url=server.url, timeout=CEILING_S) as http,
    ):
        cut = _vectors(http, input=_LONG)
        assert np.array_equal(cut, _vectors(http, input=_LONG, truncate=True))
        assert http.post("/v1/embeddings", json={"input": _LONG, "truncate": False}).is_error


def test_ollama_and_llama_cpp_give_the_same_vectors(http: httpx.Client) -> None:
    """Each in its own shape, and of length 1 where the checkpoint leaves them as they are."""
    whole = _vectors(http, model="raw", input=["a", "b"])
    unit = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    embed = _ask(http, "/api/embed", model="raw", input=["a", "b"], options={"num_ctx": 16})
    assert np.array(embed["embeddings"]) == pytest.approx(unit, abs=1e-6)
    assert (embed["model"], embed["prompt_eval_count"]) == ("raw", 6)
    assert embed["total_duration"] >= embed["load_duration"] >= 0
    old = _ask(http, "/api/embeddings", model="raw", prompt="a")
    assert old["embedding"] == pytest.approx(whole[0], rel=1e-5)
    for path, name in (
        ("/embedding", "content"),
        ("/embedding", "input"),
        ("/embeddings", "content"),
    ):
        listed = _ask(http, path, **{"model": "raw", name: ["a", "b"]})
        assert [one["index"] for one in listed] == [0, 1]
        assert np.array([one["embedding"][0] for one in listed]) == pytest.approx(unit, abs=1e-6)
    assert _ask(http, "/embeddings", model="raw", input="a")["object"] == "list"


def test_ollamas_empty_requests_load_the_model_alone(http: httpx.Client) -> None:
    """A request without a text loads the model and answers with no vector."""
    assert _ask(http, "/api/embed", model="short")["embeddings"] == []
    assert _ask(http, "/api/embed", model="short", input="")["embeddings"] == []
    assert _ask(http, "/api/embed", model="short", input=[])["embeddings"] == []
    assert _ask(http, "/api/embeddings", model="short") == {"embedding": []}


def test_ollama_cuts_long_texts_unless_told_otherwise(http: httpx.Client) -> None:
    """Its endpoints lose the end of a text unless the request forbids it."""
    cut = _ask(http, "/api/embed", model="short", input=_LONG)["embeddings"]
    assert np.array(cut) == pytest.approx(_vectors(http, input=_LONG, truncate=True), abs=1e-6)
    refused = http.post("/api/embed", json={"model": "short", "input": _LONG, "truncate": False})
    assert refused.status_code == 400
    assert "maximum context length" in refused.json()["error"]


def test_documents_are_ranked_by_the_scores_of_pairs(http: httpx.Client) -> None:
    """Results are sorted, hold the scores that /v1/score gives, and their documents where asked for."""
    documents = ["a dog", {"text": "a cat"}, "zzz"]
    scored = _ask(
        http, "/v1/score", model="cross", text_1="a cat", text_2=["a dog", "a cat", "zzz"]
    )
    scores = [one["score"] for one in scored["data"]]
    assert all(0 < one < 1 for one in scores)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        ranked = _ask(
            http, path, model="cross", query="a cat", documents=documents, return_documents=True
        )
        results = ranked["results"]
        assert [one["relevance_score"] for one in results] == sorted(scores, reverse=True)
        assert [scores[one["index"]] for one in results] == sorted(scores, reverse=True)
        texts = ["a dog", "a cat", "zzz"]
        assert [one["document"]["text"] for one in results] == [
            texts[one["index"]] for one in results
        ]
        assert ranked["meta"]["api_version"]["version"] == ("2" if "v2" in path else "1")
        assert ranked["usage"] == scored["usage"]
    top = _ask(http, "/v1/rerank", model="cross", query="a cat", documents=documents, top_n=1)
    best = max(range(3), key=scores.__getitem__)
    assert top["results"] == [{"index": best, "relevance_score": scores[best]}]


def test_tei_clients_get_the_same_vectors_in_lists(http: httpx.Client) -> None:
    """``/embed`` and ``inputs`` give lists of vectors of length 1, unless normalising is turned off."""
    raw = _vectors(http, model="raw", input=["abc", "b"])
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    for path, field in (("/embed", "inputs"), ("/embed", "input"), ("/v1/embeddings", "inputs")):
        given = _ask(http, path, model="raw", **{field: ["abc", "b"]}, truncate=True)
        assert np.array(given) == pytest.approx(unit, abs=1e-6)
    one = _ask(http, "/embed", model="raw", inputs="abc", normalize=False)
    assert np.array(one) == pytest.approx(raw[:1], abs=1e-6)
    error = _error(http, "/embed", model="raw", inputs=[""] * 65)
    assert error["param"] == "inputs"


def test_tei_clients_get_ranks_of_their_texts(http: httpx.Client) -> None:
    """``texts`` in place of ``documents`` gives a list, with the scores that documents get."""
    texts = ["a dog", "a cat", "zzz"]
    ranked = _ask(http, "/rerank", model="cross", query="a cat", documents=texts)["results"]
    given = _ask(http, "/rerank", model="cross", query="a cat", texts=texts)
    assert given == [{"index": one["index"], "score": one["relevance_score"]} for one in ranked]
    raw = _ask(
        http,
        "/rerank",
        model="cross",
        query="a cat",
        texts=texts,
        raw_scores=True,
        return_text=True,
    )
    for one, same in zip(raw, given, strict=True):
        assert one["text"] == texts[one["index"]]
        assert same["score"] == pytest.approx(1 / (1 + math.exp(-one["score"])))
    for fields in ({}, {"texts": texts, "documents": texts}):
        assert _error(http, "/rerank", model="cross", query="a", **fields)["param"] == "documents"
    error = _error(http, "/rerank", model="cross", query="a", texts=["a"] * 65)
    assert error["param"] == "texts"


def test_tei_clients_get_predictions(http: httpx.Client) -> None:
    """A text has its labels, the likeliest first; several have a list each; a pair is scored as one."""
    (classes,) = _ask(http, "/v1/classify", model="mood", input="abc")["data"]
    labels = ["sad", "fine", "glad"]
    by_label = dict(zip(labels, classes["probs"], strict=True))
    one = _ask(http, "/predict", model="mood", inputs="abc")
    assert {row["label"]: row["score"] for row in one} == pytest.approx(by_label)
    assert [row["score"] for row in one] == sorted(by_label.values(), reverse=True)
    several = _ask(http, "/predict", model="mood", inputs=[["abc"], ["xyz"]])
    assert [row["label"] for row in several[0]] == [row["label"] for row in one]
    assert len(several) == 2
    (score,) = _ask(http, "/v1/score", model="cross", text_1="a", text_2="b")["data"]
    assert _ask(http, "/predict", model="cross", inputs=["a", "b"]) == [
        {"score": pytest.approx(score["score"]), "label": "relevant"}
    ]
    for wrong in (["a", "b", "c"], ["a", ["b"]], [["a"], ["b", "c"]]):
        assert _error(http, "/predict", model="mood", inputs=wrong)["param"] == "inputs"


def test_documents_are_cut_to_their_tokens(http: httpx.Client) -> None:
    """``max_tokens_per_doc`` scores the beginning; what is longer than the model takes is cut anyway."""
    short, cut = (
        _ask(http, "/v1/rerank", model="cross", query="q", documents=documents, **fields)["results"]
        for documents, fields in ((["ab"], {}), (["abcdef"], {"max_tokens_per_doc": 2}))
    )
    assert short == cut
    assert (
        len(_ask(http, "/v1/rerank", model="cross", query="q", documents=[_LONG])["results"]) == 1
    )
    refused = _error(
        http, "/v1/rerank", model="cross", query="q", documents=[_LONG], truncate=False
    )
    assert refused["code"] == "context_length_exceeded"


def test_scores_without_activation_are_logits(http: httpx.Client) -> None:
    """The sigmoid of the one is the other."""
    fields: dict[str, object] = {"model": "cross", "queries": "a", "documents": "b"}
    (score,) = _ask(http, "/score", **fields)["data"]
    (logit,) = _ask(http, "/score", **fields, use_activation=False)["data"]
    assert score["score"] == pytest.approx(1 / (1 + math.exp(-logit["score"])))


def test_classes_have_labels_and_probabilities(http: httpx.Client) -> None:
    """The label is the likeliest one's, and the probabilities add up to 1."""
    answer = _ask(http, "/v1/classify", model="mood", input=["abc", "xyz", "abc"])
    labels = ["sad", "fine", "glad"]
    for one in answer["data"]:
        assert sum(one["probs"]) == pytest.approx(1.0)
        assert one["label"] == labels[int(np.argmax(one["probs"]))]
        assert one["num_classes"] == 3
    assert answer["data"][0]["probs"] == answer["data"][2]["probs"]


_WRONG_KINDS = [
    ("chat", "/v1/embeddings", {"input": "a"}),
    ("chat", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("chat", "/embed", {"inputs": "a"}),
    ("short", "/predict", {"inputs": "a"}),
    ("chat", "/v1/score", {"text_1": "a", "text_2": "b"}),
    ("chat", "/v1/classify", {"input": "a"}),
    ("cross", "/v1/embeddings", {"input": "a"}),
    ("short", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("short", "/v1/classify", {"input": "a"}),
    ("mood", "/v1/score", {"text_1": "a", "text_2": "b"}),
    ("short", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("short", "/v1/completions", {"prompt": "a"}),
    ("short", "/v1/responses", {"input": "a"}),
    ("short", "/infill", {"input_prefix": "a", "input_suffix": "b"}),
]


@pytest.mark.parametrize(("model", "path", "fields"), _WRONG_KINDS)
def test_a_model_of_another_kind_is_refused_by_name(
    http: httpx.Client, model: str, path: str, fields: dict[str, object]
) -> None:
    """The error is about ``model``, and says what this one does and which ones to ask."""
    error = _error(http, path, model=model, **fields)
    assert (error["param"], error["code"]) == ("model", "unsupported_parameter")
    assert "this model" in error["message"]


def test_a_chat_goes_on_beside_embeddings(http: httpx.Client) -> None:
    """One address serves both kinds."""
    chat = {"model": "chat", "prompt": "a", "max_tokens": 4, "temperature": 0}
    before = _ask(http, "/v1/completions", **chat)["choices"]
    _vectors(http, input=["a", "b"])
    assert _ask(http, "/v1/completions", **chat)["choices"] == before


def test_lists_say_which_models_embed_and_classify(http: httpx.Client) -> None:
    """In OpenAI's list, Ollama's facts and LM Studio's types."""
    listed = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
    assert {name: one.get("kind") for name, one in listed.items()} == {
        "chat": None,
        "short": "embed",
        "raw": "embed",
        "cross": "classify",
        "mood": "classify",
    }
    assert listed["short"]["capabilities"] == ["embeddings"]
    assert listed["cross"]["capabilities"] == ["scores", "classes"]
    assert listed["mood"]["capabilities"] == ["classes"]
    shown = _ask(http, "/api/show", model="short")
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"]["bert.embedding_length"] == TINY_DIMENSIONS
    types = {one["id"]: one["type"] for one in http.get("/api/v0/models").json()["data"]}
    assert (types["short"], types["chat"]) == ("embeddings", "llm")


def test_metrics_and_log_count_inputs_and_tell_no_text(
    http: httpx.Client, server: ServeProcess
) -> None:
    """One line and one count a request, with the endpoint, the inputs and the tokens."""
    labels = {"model": "short", "endpoint": "embeddings", "finish_reason": "stop"}
    before = scrape(server.url, "machd_requests_total", **labels)
    inputs = scrape(server.url, "machd_encoder_inputs_total", model="short")
    _vectors(http, input=[_CANARY, "b"])
    wait_until(
        lambda: scrape(server.url, "machd_requests_total", **labels) == before + 1, "it is counted"
    )
    assert scrape(server.url, "machd_encoder_inputs_total", model="short") == inputs + 2
    told = ("endpoint", "inputs", "prompt_tokens", "model")
    lines = [tuple(one.get(name) for name in told) for one in list(server.events)]
    assert ("embeddings", 2, 16, "short") in lines
    assert not any(_CANARY in json.dumps(one) for one in server.events)


def test_limits_are_named(http: httpx.Client) -> None:
    """More inputs or tokens than a request may have are refused with the setting's name."""
    error = _error(http, "/v1/embeddings", model="short", input=["a"] * 65)
    assert error["param"] == "input"
    assert "limits.max_inputs is 64" in error["message"]
    error = _error(http, "/v1/rerank", model="cross", query="a", documents=["a"] * 65)
    assert error["param"] == "documents"
    assert "limits.max_inputs is 64" in error["message"]


def test_there_are_two_hundred_hostile_bodies() -> None:
    """The list has not shrunk."""
    assert len(HOSTILE) >= 200


@pytest.mark.parametrize("path", sorted({one.path for one in HOSTILE}))
def test_hostile_bodies_are_answered_by_name(http: httpx.Client, path: str) -> None:
    """Each gets a status of the client's errors and a message; the next request is answered as ever."""
    expected = _vectors(http, input="abc")
    for one in (one for one in HOSTILE if one.path == path):
        answer = http.post(path, content=one.body, headers={"Content-Type": "application/json"})
        assert answer.status_code in one.statuses, (one, answer.text[:500])
        error = answer.json()["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert len(message) > 10
        assert _CANARY not in message
    assert np.array_equal(_vectors(http, input="abc"), expected)


def test_damaged_weights_are_refused_by_name(tmp_path: Path) -> None:
    """A checkpoint of NaN gives no vectors of NaN: it is not served, and the log says why."""
    write_tiny_embedder(tmp_path / "nan", fill=math.nan)
    write_tiny_embedder(tmp_path / "well")
    config = tmp_path / "machd.toml"
    config.write_text(
        f'[models.well]\npath = "{tmp_path}/well"\n[models.nan]\npath = "{tmp_path}/nan"\n'
    )
    with (
        ServeProcess("--config", str(config)) as server,
        httpx.Client(base_url=server.url, timeout=CEILING_S) as http,
    ):
        answer = http.post("/v1/embeddings", json={"model": "nan", "input": "a"})
        assert answer.status_code == 503
        assert "NaN" not in answer.text
        assert _vectors(http, model="well", input="a").shape == (1, TINY_DIMENSIONS)


def test_ids_of_another_tokenizer_are_refused(http: httpx.Client) -> None:
    """OpenAI's clients send ids of its own tokenizer unless told not to: unknown ones, or without this one's special tokens."""
    error = _error(http, "/v1/embeddings", model="short", input=[[15339, 1917]])
    assert error["param"] == "input[0]"
    assert f"(0 to {TINY_VOCABULARY_TOKENS - 1})" in error["message"]
    first, *words, last = _ask(http, "/tokenize", model="short", prompt="some words")["tokens"]
    for ids in (words, [first, *words], [*words, last], [first]):
        error = _error(http, "/v1/embeddings", model="short", input=[[first, last], ids])
        assert error["param"] == "input[1]"
        assert f"begin with [{first}] and end with [{last}]" in error["message"]


def test_token_ids_that_are_too_many_keep_the_last_special_token(http: httpx.Client) -> None:
    """They are refused, or cut as their text is."""
    ids = _ask(http, "/tokenize", model="short", prompt=_LONG)["tokens"]
    assert (
        _error(http, "/v1/embeddings", model="short", input=ids)["code"]
        == "context_length_exceeded"
    )
    cut = _vectors(http, input=ids, truncate=True)
    assert np.array_equal(cut, _vectors(http, input=_LONG, truncate=True))
