"""Models that generate score documents: with the prompt of their kind, and as the plain logits have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from support.checkpoints.thinking_checkpoint import write_thinking_llama
from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess
from support.engines.plain_logits import PlainLogits

from machd.reading.rerank_prompt import QWEN3_PREFIX, QWEN3_SUFFIX

_QUERY = "What is the capital of China?"
_DOCUMENTS = [
    "The capital of China is Beijing.",
    "Gravity attracts two bodies. " * 40,
    "Beijing",
    "",
    "中国的首都是北京。",
    "The capital of China is Beijing.",
]
_WEB = "Given a web search query, retrieve relevant passages that answer the query"
_TEMPLATE = """\
{%- set ns = namespace(by='', query='', document='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% set ns.by = message['content'] %}{% endif %}
    {%- if message['role'] == 'query' %}{% set ns.query = message['content'] %}{% endif %}
    {%- if message['role'] == 'document' %}{% set ns.document = message['content'] %}{% endif %}
{%- endfor %}
{{- ns.by + ' | ' + ns.query + ' | ' + ns.document + '<|im_end|>' }}"""
_TOLERANCE = 1e-4


@dataclass
class _Reranker:
    """A served reranker: its files, a client, and how it writes a pair and its two answers."""

    plain: PlainLogits
    http: httpx.Client
    prompt: str
    answers: tuple[str, str]

    def score(self, document: str, by: str = _WEB) -> float:
        """Return a document's score from plain logits."""
        text = self.prompt.format(by=by, query=_QUERY, document=document)
        yes, no = (self.plain.probability(text, one) for one in self.answers)
        return yes / (yes + no)

    def rerank(self, **fields: object) -> dict[str, Any]:
        """Return the whole answer."""
        body = {"query": _QUERY, "documents": _DOCUMENTS, **fields}
        answer = self.http.post("/v1/rerank", json=body)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told


@pytest.fixture(name="reranker", scope="module", params=["setting", "files"])
def _reranker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Reranker]:
    """One by the operator's word, with Qwen3-Reranker's prompt, and one by its files, with a template of its own."""
    directory = write_thinking_llama(tmp_path_factory.mktemp("reranker") / "tiny")
    plain = PlainLogits(directory)
    arguments = ["--model-path", str(directory), "--continuous-batching", "--limits-max-queue=40"]
    content = "<Instruct>: {by}\n<Query>: {query}\n<Document>: {document}"
    prompt, answers = f"{QWEN3_PREFIX}{content}{QWEN3_SUFFIX}", ("yes", "no")
    if request.param == "setting":
        arguments += ["--model-kind", "reranker"]
    else:
        prompt, answers = "{by} | {query} | {document}<|im_end|>", ("1", "0")
        (directory / "chat_template.jinja").write_text(_TEMPLATE)
        module = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
        modules = [
            {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {"path": "1_LogitScore", "type": module},
        ]
        (directory / "modules.json").write_text(json.dumps(modules))
        (true_token_id,), (false_token_id,) = map(plain.tokens, answers)
        (directory / "1_LogitScore").mkdir()
        (directory / "1_LogitScore" / "config.json").write_text(
            json.dumps({"true_token_id": true_token_id, "false_token_id": false_token_id})
        )
    with (
        ServeProcess(*arguments) as server,
        httpx.Client(base_url=server.url, timeout=CEILING_S) as client,
    ):
        yield _Reranker(plain, client, prompt, answers)


def test_scores_are_those_of_the_plain_logits(reranker: _Reranker) -> None:
    """Each document's share of yes behind its own prompt, best first; equal documents score equally."""
    expected = [reranker.score(one) for one in _DOCUMENTS]
    for _ in range(2):  # computed, and from the prefix cache
        results = reranker.rerank()["results"]
        scores = {one["index"]: one["relevance_score"] for one in results}
        assert [scores[index] for index in range(len(_DOCUMENTS))] == pytest.approx(
            expected, abs=_TOLERANCE
        )
        assert scores[0] == scores[5]
        assert [one["relevance_score"] for one in results] == sorted(scores.values(), reverse=True)
    (best,) = reranker.rerank(top_n=1)["results"]
    assert best["index"] == max(range(len(expected)), key=expected.__getitem__)


def test_instruction_takes_the_place_of_the_models_own(reranker: _Reranker) -> None:
    """It changes scores, and no document's in another way than the prompt has it."""
    results = reranker.rerank(instruction="Find a town")["results"]
    for one in results:
        expected = reranker.score(_DOCUMENTS[one["index"]], "Find a town")
        assert one["relevance_score"] == pytest.approx(expected, abs=_TOLERANCE)


def test_more_documents_than_the_queue_holds_are_ranked(reranker: _Reranker) -> None:
    """Twice as many at once from each of two clients score as alone."""
    documents = [f"{index} is a number." for index in range(80)]
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(lambda _: reranker.rerank(documents=documents), range(2))
    for told in (first, other):
        assert len(told["results"]) == 80
    scores = {one["index"]: one["relevance_score"] for one in first["results"]}
    for index in (0, 40, 79):
        assert scores[index] == pytest.approx(reranker.score(documents[index]), abs=_TOLERANCE)


def test_pairs_are_scored_in_vllms_words(reranker: _Reranker) -> None:
    """``POST /v1/score`` gives the same numbers in the order of the pairs."""
    body = {"text_1": _QUERY, "text_2": _DOCUMENTS[:3]}
    data = reranker.http.post("/v1/score", json=body).json()["data"]
    assert [one["score"] for one in data] == pytest.approx(
        [reranker.score(one) for one in _DOCUMENTS[:3]], abs=_TOLERANCE
    )


def test_reranker_generates_too(reranker: _Reranker) -> None:
    """It is a model of text like any other."""
    answer = reranker.http.post("/v1/completions", json={"prompt": "One", "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_document_beyond_the_context_is_refused_by_name(reranker: _Reranker) -> None:
    """Its prompt would lose its end, where the score is read."""
    answer = reranker.http.post(
        "/v1/rerank", json={"query": _QUERY, "documents": ["short", "word " * 9000]}
    )
    told = answer.json()["error"]
    assert (answer.status_code, told["code"]) == (400, "context_length_exceeded")
    assert told["param"] == "documents"
