"""The clients of OpenAI and Ollama with models that embed: what their packages make of the answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ollama import Client, ResponseError
from openai import BadRequestError, OpenAI
from support.checkpoints.tiny_encoder import TINY_DIMENSIONS, write_tiny_embedder
from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess

_LONG = "word " * 20


@pytest.fixture(scope="module")
def embedding_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon of one model that embeds."""
    folder = write_tiny_embedder(tmp_path_factory.mktemp("models") / "tiny", is_matryoshka=True)
    with ServeProcess("--model-path", str(folder)) as server:
        yield server.url


@pytest.fixture
def openai(embedding_url: str) -> Iterator[OpenAI]:
    """OpenAI's client, which never tries again."""
    url = f"{embedding_url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=CEILING_S) as client:
        yield client


@pytest.fixture
def ollama(embedding_url: str) -> Iterator[Client]:
    """Ollama's client."""
    with Client(host=embedding_url, timeout=CEILING_S) as client:
        yield client


def test_openais_default_form_holds_the_numbers(openai: OpenAI) -> None:
    """The package asks for base64 by itself, and reads from it what it reads as numbers."""
    by_default = openai.embeddings.create(model="tiny", input=["a", "b"])
    as_numbers = openai.embeddings.create(model="tiny", input=["a", "b"], encoding_format="float")
    assert [one.embedding for one in by_default.data] == [one.embedding for one in as_numbers.data]
    assert len(by_default.data[0].embedding) == TINY_DIMENSIONS
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens == 6


def test_openais_client_cuts_vectors_and_texts(openai: OpenAI) -> None:
    """``dimensions`` is the package's own argument, ``truncate`` an extra one."""
    short = openai.embeddings.create(model="tiny", input="a", dimensions=4)
    assert len(short.data[0].embedding) == 4
    with pytest.raises(BadRequestError) as refused:
        openai.embeddings.create(model="tiny", input=_LONG)
    assert refused.value.code == "context_length_exceeded"
    cut = openai.embeddings.create(model="tiny", input=_LONG, extra_body={"truncate": True})
    assert len(cut.data[0].embedding) == TINY_DIMENSIONS


def test_openais_client_is_told_that_the_model_does_not_chat(openai: OpenAI) -> None:
    """The error is about the model."""
    with pytest.raises(BadRequestError) as refused:
        openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    assert refused.value.param == "model"


def test_ollamas_client_embeds_in_both_of_its_ways(ollama: Client) -> None:
    """Several texts, one text, and a long one, which is cut unless told otherwise."""
    several = ollama.embed("tiny", ["a", _LONG])
    assert [len(one) for one in several.embeddings] == [TINY_DIMENSIONS] * 2
    assert several.embeddings[0] == pytest.approx(
        ollama.embeddings("tiny", "a").embedding, abs=1e-5
    )
    assert ollama.embed("tiny", "a", dimensions=4).embeddings[0] == pytest.approx(
        ollama.embed("tiny", ["a"], dimensions=4).embeddings[0]
    )
    with pytest.raises(ResponseError, match="maximum context length"):
        ollama.embed("tiny", _LONG, truncate=False)


def test_ollamas_client_sees_that_the_model_embeds(ollama: Client) -> None:
    """``show`` has the capability and no other."""
    assert ollama.show("tiny").capabilities == ["embedding"]
