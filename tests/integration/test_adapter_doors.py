"""Adapters behind the endpoints that score, make vectors and look at images, on real models.

Each answer with an adapter is compared with a model that has it in its weights.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from support.checkpoints.adapters import mlx_lm_config, mlx_lm_tensors, random_adapter, write_mlx_lm
from support.checkpoints.thinking_checkpoint import write_thinking_llama
from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess
from support.engines.plain_logits import PlainLogits

from machd.engine.adapters.low_rank import BaseLayer, LowRank
from machd.reading.rerank_prompt import QWEN3_PREFIX, QWEN3_SUFFIX
from machd.user_directories import user_cache_directory
from machd_probes.vision_families.checkpoint import write_family
from machd_probes.vision_matrix.turns import ImagePart

_QUERY = "What is the capital of China?"
_DOCUMENTS = ["The capital of China is Beijing.", "Gravity attracts two bodies. " * 40, "Beijing"]
_PROMPT = (
    f"{QWEN3_PREFIX}<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    f"<Query>: {_QUERY}\n<Document>: {{document}}{QWEN3_SUFFIX}"
)
_TOLERANCE = 1e-4
_FAMILY = "qwen2_vl"


def _arrays(checkpoint: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(checkpoint / "model.safetensors"))
    assert isinstance(arrays, dict)
    return arrays


def _write_adapter(directory: Path, checkpoint: Path) -> dict[str, LowRank]:
    """Write a random adapter of all projections of a checkpoint's text model."""
    base = {
        name.removesuffix(".weight"): BaseLayer(*array.shape)
        for name, array in _arrays(checkpoint).items()
        if name.startswith(("language_model.", "model.layers.")) and name.endswith("_proj.weight")
    }
    adapter = random_adapter(base, seed=1, scale=0.05)
    write_mlx_lm(directory, mlx_lm_tensors(adapter), mlx_lm_config(adapter))
    return adapter


@pytest.fixture(name="reranker", scope="module")
def _reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    """A generative reranker with the adapter ``judge``, and where its files are."""
    directory = tmp_path_factory.mktemp("reranker")
    write_thinking_llama(directory / "tiny")
    _write_adapter(directory / "adapters" / "judge", directory / "tiny")
    with (
        ServeProcess(
            *("--model-path", str(directory / "tiny"), "--model-kind", "reranker"),
            *("--adapters-directory", str(directory / "adapters"), "--continuous-batching"),
        ) as server,
        httpx.Client(base_url=server.url, timeout=CEILING_S) as client,
    ):
        yield client, directory


def _scores(plain: PlainLogits) -> list[float]:
    """Return the documents' shares of yes behind their prompts."""
    prompts = [_PROMPT.format(document=one) for one in _DOCUMENTS]
    pairs = [(plain.probability(one, "yes"), plain.probability(one, "no")) for one in prompts]
    return [yes / (yes + no) for yes, no in pairs]


def test_reranker_scores_with_the_adapter_that_a_request_names(
    reranker: tuple[httpx.Client, Path],
) -> None:
    """Ranks and pairs of the adapter and of the base, all at once, are those of mlx-lm's own model with and without it."""
    client, directory = reranker
    tiny, judge = directory / "tiny", directory / "adapters" / "judge"
    expected = {
        "default": _scores(PlainLogits(tiny)),
        "default:judge": _scores(PlainLogits(tiny, judge)),
    }
    expected["judge"] = expected["default:judge"]
    differences = [
        abs(one - other) for one, other in zip(*list(expected.values())[:2], strict=True)
    ]
    assert min(differences) > 100 * _TOLERANCE, "the adapter can be seen"

    def ranked(name: str) -> dict[str, Any]:
        body = {"model": name, "query": _QUERY, "documents": _DOCUMENTS}
        answer = client.post("/v1/rerank", json=body)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def scored(name: str) -> dict[str, Any]:
        answer = client.post(
            "/v1/score", json={"model": name, "text_1": _QUERY, "text_2": _DOCUMENTS}
        )
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    names = [*expected] * 2
    with ThreadPoolExecutor(2 * len(names)) as pool:
        ranks, pairs = pool.map(ranked, names), pool.map(scored, names)
        for name, ranking, scoring in zip(names, ranks, pairs, strict=True):
            by_index = {one["index"]: one["relevance_score"] for one in ranking["results"]}
            scores = [by_index[index] for index in range(len(_DOCUMENTS))]
            assert scores == pytest.approx(expected[name], abs=_TOLERANCE), name
            its = [one["score"] for one in scoring["data"]]
            assert its == pytest.approx(expected[name], abs=_TOLERANCE), name
            assert {ranking["model"], scoring["model"]} == {
                "judge" if "judge" in name else "tiny"
            }, name


def test_reranker_refuses_an_adapter_that_it_does_not_have(
    reranker: tuple[httpx.Client, Path],
) -> None:
    """A name of nothing behind the model's is not found, and no other model scores."""
    client, _ = reranker
    body = {"model": "default:jury", "query": _QUERY, "documents": _DOCUMENTS}
    answer = client.post("/v1/rerank", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_generating_model_makes_no_vectors_with_an_adapter_either(
    reranker: tuple[httpx.Client, Path],
) -> None:
    """Vectors of a model of text are refused for the reason that the model without the adapter has."""
    client, _ = reranker
    answers = [
        client.post("/v1/embeddings", json={"model": name, "input": "a"})
        for name in ("default", "judge")
    ]
    assert answers[0].status_code == answers[1].status_code
    assert answers[0].is_client_error
    assert answers[0].json()["error"]["message"] == answers[1].json()["error"]["message"]


@pytest.mark.long
def test_images_are_looked_at_with_the_adapter_that_a_request_names(tmp_path: Path) -> None:
    """An image, two images and text are answered as by the checkpoint with the adapter in its weights."""
    checkpoint = write_family(_FAMILY, tmp_path / "base", user_cache_directory(os.environ))
    adapter = _write_adapter(tmp_path / "adapters" / "look", checkpoint)
    merged = write_family(_FAMILY, tmp_path / "merged", user_cache_directory(os.environ))
    arrays = _arrays(merged)
    for path, one in adapter.items():
        arrays[f"{path}.weight"] += one.scale * (mx.array(one.b) @ mx.array(one.a))
    mx.save_safetensors(str(merged / "model.safetensors"), arrays, {"format": "mlx"})

    images = [_image(1), _image(2)]
    turns: list[list[dict[str, Any]]] = [
        [images[0], _text("What is this?")],
        [images[0], _text("What is this?"), images[1], _text("And this?")],
        [_text("What is this?")],
    ]
    arguments = ("--continuous-batching", "--model-dtype=float32")
    with ServeProcess(
        str(checkpoint), *arguments, "--adapters-directory", str(tmp_path / "adapters")
    ) as daemon:
        asked = [(name, turn) for turn in turns for name in ("default", "look")]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda one: _answer(daemon, *one), asked))
    with ServeProcess(str(merged), *arguments) as daemon:
        expected = [_answer(daemon, "default", turn) for turn in turns]
    assert answers[1::2] == expected
    assert all(one != other for one, other in zip(answers[::2], expected, strict=True))


def _answer(daemon: ServeProcess, name: str, content: list[dict[str, Any]]) -> str:
    body = {
        "model": name,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 10,
        "temperature": 0,
    }
    answer = httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=CEILING_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(number: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(ImagePart(number).content()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
