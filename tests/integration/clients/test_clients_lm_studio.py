"""LM Studio's own package for Python lists, loads, uses and unloads models, and knows no other server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.checkpoints.tiny_encoder import write_tiny_embedder
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.keys import locked_by
from support.daemon.scraping import is_idle
from support.daemon.serve_process import ServeProcess
from support.daemon.supervised_daemon import SupervisedDaemon

lms: Any = pytest.importorskip("lmstudio")

_NAMES = ("alpha", "org/beta", "gamma")
_TABLES = "".join(f'[models."{name}"]\npath = "fake?size=35000000"\n' for name in _NAMES)
_SAY = "say yes"
_KEY = "k-0123456789abcdef"
_TOKEN = "operator-token-0123456789"


def _host(url: str) -> str:
    return url.removeprefix("http://")


def _names(models: Any) -> list[str]:
    return [one.identifier for one in models]


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    (tmp_path / "machd.toml").write_text(f"[models]\nmemory_gb = 1.0\n{_TABLES}")
    return tmp_path


@pytest.fixture(name="host")
def _served_host(directory: Path) -> Iterator[str]:
    """A daemon of three models, none of which is loaded."""
    flags = {"cache.prefix": False}
    with (
        capture_logs(),
        SupervisedDaemon(flags, config_path=directory / "machd.toml") as daemon,
    ):
        yield _host(daemon.url)


def test_lm_studio_lists_loads_uses_and_unloads_models(host: str) -> None:
    """A handle's model is loaded with progress, answers, counts tokens, and leaves when it is told to."""
    progress: list[float] = []
    with lms.Client(host) as client:
        assert [one.model_key for one in client.llm.list_downloaded()] == list(_NAMES)
        assert client.llm.list_loaded() == []
        alpha = client.llm.model("alpha", on_load_progress=progress.append)
        assert progress == [0.0, 1.0]
        assert _names(client.list_loaded_models()) == ["alpha"]
        assert alpha.get_context_length() == alpha.get_info().max_context_length > 0
        answer = alpha.respond(_SAY)
        assert answer.content == "yes"
        assert answer.stats.stop_reason == "eosFound"
        assert answer.stats.predicted_tokens_count == 4
        assert answer.model_info.model_key == "alpha"
        assert alpha.complete(_SAY).content == "yes"
        assert alpha.count_tokens("abc") == len(alpha.tokenize("abc")) == 3
        assert "say yes" in alpha.apply_prompt_template(_chat(_SAY))
        assert client.llm.load_new_instance("org/beta").identifier == "org/beta"
        assert client.llm.model("org/beta").respond(_SAY).content == "yes"
        alpha.unload()
        wait_until(lambda: "alpha" not in _names(client.llm.list_loaded()), "it is unloaded")
        assert client.llm.model().identifier == "org/beta"
        assert alpha.respond(_SAY).content == "yes"  # loads it again, as any request does


def test_lm_studio_reads_errors_and_goes_on(host: str) -> None:
    """Unknown models are the package's own error; what is not served says so."""
    with lms.Client(host) as client:
        for ask in (client.llm.model, client.llm.load_new_instance, client.llm.get_model_info):
            with pytest.raises(lms.LMStudioModelNotFoundError, match=r"alpha"):
                ask("delta")
        with pytest.raises(lms.LMStudioServerError, match="this model generates text"):
            client.embedding.model("alpha")
        with pytest.raises(lms.LMStudioServerError, match="not served here"):
            client.repository.search_models("alpha")
        with pytest.raises(lms.LMStudioServerError, match="temperature"):
            client.llm.model("alpha").respond(_SAY, config={"temperature": 99.0})
        assert client.llm.model("alpha").respond(_SAY).content == "yes"


def test_lm_studio_streams_and_cancels(host: str) -> None:
    """Fragments come as they are made, merged where the client is slow; a cancelled answer ends in the engine, too."""
    with lms.Client(host) as client:
        model = client.llm.model("gamma")
        first: list[bool] = []
        stream = model.respond_stream(_SAY, on_first_token=lambda: first.append(True))
        assert "".join(fragment.content for fragment in stream) == "yes"
        assert first == [True]
        stream = model.respond_stream("say " + "x" * 5_000, config={"maxTokens": 5_000})
        for _ in stream:
            stream.cancel()
        assert stream.result().stats.stop_reason == "userStopped"
        wait_until(lambda: is_idle(f"http://{host}"), "nothing runs and nothing waits")
        assert model.respond(_SAY).content == "yes"


async def test_lm_studio_answers_side_by_side(host: str) -> None:
    """One socket carries several answers at a time, to the package's asynchronous client."""
    async with lms.AsyncClient(host) as client:
        model = await client.llm.model("alpha")
        texts = [f"answer {number}" for number in range(8)]
        answers = await asyncio.gather(*(model.respond(f"say {text}") for text in texts))
        assert [answer.content for answer in answers] == texts


def test_lm_studio_needs_an_operators_key_to_change_models(directory: Path) -> None:
    """An API key, as a URL's password, uses models; loading and unloading takes the admin token."""
    flags = locked_by(directory, api_key=_KEY, admin_token=_TOKEN) | {"cache.prefix": False}
    with ExitStack() as stack:
        stack.enter_context(capture_logs())
        config = directory / "machd.toml"
        daemon = stack.enter_context(SupervisedDaemon(flags, config_path=config))
        host = _host(daemon.url)
        with lms.Client(host) as client, pytest.raises(ValueError):  # noqa: PT011
            # Any refusal makes the package fail so: it takes the text of one for an object.
            client.llm.list_downloaded()
        with lms.Client(f"alice:{_KEY}@{host}") as client:
            alpha = client.llm.model("alpha")
            assert alpha.respond(_SAY).content == "yes"
            for change in (alpha.unload, lambda: client.llm.load_new_instance("gamma")):
                with pytest.raises(lms.LMStudioServerError, match="operator"):
                    change()
        with lms.Client(f"operator:{_TOKEN}@{host}") as client:
            assert client.llm.load_new_instance("gamma").identifier == "gamma"
            client.llm.unload("alpha")
            wait_until(lambda: _names(client.llm.list_loaded()) == ["gamma"], "it is unloaded")


def test_lm_studio_embeds(tmp_path: Path) -> None:
    """A handle of an embedding model loads it, counts its tokens, and makes the vectors that HTTP gives."""
    folder = write_tiny_embedder(tmp_path / "tiny")
    table = f'[models.tiny]\npath = "{folder}"\n[models.alpha]\npath = "fake?size=35000000"\n'
    (tmp_path / "machd.toml").write_text(table)
    with ExitStack() as stack:
        server = stack.enter_context(ServeProcess("--config", str(tmp_path / "machd.toml")))
        client = stack.enter_context(lms.Client(_host(server.url)))
        tiny = client.embedding.model("tiny")
        texts = ["a b", "b c a"]
        body = {"model": "tiny", "input": texts}
        answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=CEILING_S)
        by_http = [one["embedding"] for one in answer.json()["data"]]
        for vector, same in zip(tiny.embed(texts), by_http, strict=True):
            assert vector == pytest.approx(same, abs=1e-5)
        assert tiny.count_tokens("a b") == len(tiny.tokenize("a b")) == 4
        assert _names(client.embedding.list_loaded()) == ["tiny"]
        assert client.embedding.model().identifier == "tiny"
        assert "tiny" not in _names(client.llm.list_loaded())
        assert tiny.get_context_length() == tiny.get_load_config().context_length > 0
        with pytest.raises(lms.LMStudioServerError, match="maximum context length"):
            tiny.embed("a " * 100)
        with pytest.raises(lms.LMStudioServerError, match="generates none"):
            client.llm.model("tiny")
        tiny.unload()
        wait_until(lambda: client.embedding.list_loaded() == [], "it is unloaded")


def test_lm_studio_acts_with_tools(scripted_url: str) -> None:
    """``act`` calls the function that the model asks for, and the model tells what it gave."""
    messages: list[Any] = []

    def weather(city: str) -> str:
        """Tell the weather."""
        return f"sunny in {city}"

    with lms.Client(_host(scripted_url)) as client:
        done = client.llm.model().act("weather?", [weather], on_message=messages.append)
        assert done.rounds == 2
        assert "sunny in Paris" in str(messages[-1])


def test_lm_studio_asks_embedded_model(plain_url: str) -> None:
    """A greedy answer is the same as by HTTP, and a schema is followed."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    }
    with lms.Client(_host(plain_url)) as client:
        model = client.llm.model()
        config = {"temperature": 0.0, "maxTokens": 16}
        answer = model.respond("Hello", config=config)
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "temperature": 0.0,
            "max_tokens": 16,
            "model": model.identifier,
        }
        by_http = httpx.post(
            f"{plain_url}/v1/chat/completions", json=body, timeout=CEILING_S
        ).json()
        assert answer.content == by_http["choices"][0]["message"]["content"]
        assert answer.stats.predicted_tokens_count == by_http["usage"]["completion_tokens"]
        structured = model.respond("A city", response_format=schema, config={"maxTokens": 200})
        assert list(structured.parsed) == ["city"]


def _chat(text: str) -> Any:
    chat = lms.Chat()
    chat.add_user_message(text)
    return chat
