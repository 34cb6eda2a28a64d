"""The calls and channels of each namespace, but for predictions: each is one or two requests to the server itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, Struct

from machd import __version__
from machd.dialects.lm_studio import LmStudioModelFacts
from machd.dialects.lm_studio_socket import messages
from machd.dialects.lm_studio_socket.history import chat_messages
from machd.dialects.lm_studio_socket.models import (
    EMBEDDING,
    LLM,
    ModelKind,
    find,
    instance_info,
    listed,
    model_info,
)
from machd.dialects.lm_studio_socket.prediction import chat_tools, complete_raw_text, predict
from machd.dialects.lm_studio_socket.session import Answer, Call, Channel, Namespace
from machd.dialects.tokens.request import DetokenizeResponse, TokenizeResponse
from machd.dialects.wire.decoding import decode_body
from machd.http.inner_request import AnsweredError, InnerClient

_PROGRESS_S = 1.0
"""Interval of news about a load: the package for Python gives up after a minute without any."""

_MAX_WAITING_TEXTS = 16_384
"""The package for TypeScript makes a call of each text of a list, and all at once."""


class _Loading(Struct, frozen=True):
    """A model of ``GET /v1/models``."""

    progress: float = 0.0


class _Vector(Struct, frozen=True):
    embedding: Raw


class _Vectors(Struct, frozen=True):
    """An answer of ``POST /v1/embeddings``."""

    data: list[_Vector]


async def _list_downloaded(client: InnerClient, _parameter: bytes) -> list[dict[str, object]]:
    return [model_info(one) for one in await listed(client)]


@dataclass(frozen=True, slots=True)
class _Models:
    """Calls and channels about the models of a kind, which both kinds have."""

    kind: ModelKind

    @property
    def calls(self) -> dict[str, Call]:
        return {
            "listLoaded": self._list_loaded,
            "getModelInfo": self._model_info,
            "getLoadConfig": self._load_config,
            "unloadModel": self._unload,
            "tokenize": self._tokenize,
            "countTokens": self._count_tokens,
        }

    @property
    def channels(self) -> dict[str, Answer]:
        return {"loadModel": self._load, "getOrLoad": self._get_or_load}

    async def _list_loaded(self, client: InnerClient, _parameter: bytes) -> list[object]:
        return [
            instance_info(one)
            for one in await listed(client)
            if one.loaded_instances and one.type == self.kind.type
        ]

    async def _model_info(self, client: InnerClient, parameter: bytes) -> dict[str, object] | None:
        wanted = decode_body(parameter, messages.SpecifiedModel)
        try:
            return instance_info(await find(client, wanted.specifier.name, self.kind))
        except AnsweredError:
            if wanted.throw_if_not_found:
                raise
            return None

    async def _load_config(self, client: InnerClient, parameter: bytes) -> dict[str, object]:
        wanted = decode_body(parameter, messages.SpecifiedModel)
        info = instance_info(await find(client, wanted.specifier.name, self.kind))
        key = f"{self.kind.type}.load.contextLength"
        return {"fields": [{"key": key, "value": info["contextLength"]}]}

    async def _unload(self, client: InnerClient, parameter: bytes) -> None:
        wanted = decode_body(parameter, messages.UnloadedModel)
        await client.ask("POST /api/v1/models/unload", {"instance_id": wanted.identifier})

    async def _tokens(self, client: InnerClient, parameter: bytes) -> list[int]:
        wanted = decode_body(parameter, messages.TextOfModel)
        name = (await find(client, wanted.specifier.name, self.kind)).key
        body = {"model": name, "prompt": wanted.input_string}
        return msgspec.json.decode(
            await client.ask("POST /tokenize", body), type=TokenizeResponse
        ).tokens

    async def _tokenize(self, client: InnerClient, parameter: bytes) -> dict[str, object]:
        return {"tokens": await self._tokens(client, parameter)}

    async def _count_tokens(self, client: InnerClient, parameter: bytes) -> dict[str, object]:
        return {"tokenCount": len(await self._tokens(client, parameter))}

    async def _load(self, channel: Channel, parameter: bytes) -> None:
        """Load a model for an operator."""
        name = decode_body(parameter, messages.LoadedModel).model_key
        model = await find(channel.client, name, self.kind)
        await channel.send({"type": "resolved", "info": self._info(model)})
        asking = channel.client.ask("POST /api/v1/models/load", {"model": model.key})
        await _wait(channel, "progress", model.key, asking)
        await self._tell_loaded(channel, "success", model.key)

    async def _get_or_load(self, channel: Channel, parameter: bytes) -> None:
        """Load a model as any request for it does."""
        name = decode_body(parameter, messages.WantedModel).identifier
        model = await find(channel.client, name, self.kind)
        if model.loaded_instances and model.type == self.kind.type:
            await channel.send({"type": "alreadyLoaded", "info": instance_info(model)})
            return
        info = self._info(model)
        await channel.send({"type": "startLoading", "identifier": model.key, "info": info})
        # The request for a load refuses a model of another kind.
        body = {**self.kind.load_body, "model": model.key}
        await _wait(
            channel, "loadProgress", model.key, channel.client.ask(self.kind.load_route, body)
        )
        await self._tell_loaded(channel, "loadSuccess", model.key)

    def _info(self, model: LmStudioModelFacts) -> dict[str, object]:
        """A model that may never have been loaded, so that its kind is taken from the namespace: clients check it."""
        return {**model_info(model), "type": self.kind.type}

    async def _tell_loaded(self, channel: Channel, news: str, name: str) -> None:
        if not channel.client.has_left:
            info = instance_info(await find(channel.client, name, self.kind))
            await channel.send({"type": news, "info": info})


async def _wait(channel: Channel, news: str, name: str, asking: Coroutine[Any, Any, bytes]) -> None:
    """Wait for a load, and tell again and again how far it is."""
    task = asyncio.create_task(asking)
    share = 0.0
    try:
        while not (await asyncio.wait({task}, timeout=_PROGRESS_S))[0]:
            with suppress(AnsweredError):
                told = await channel.client.ask(f"GET /v1/models/{name}")
                share = max(share, msgspec.json.decode(told, type=_Loading).progress)
            await channel.send({"type": news, "progress": share})
        task.result()
    finally:
        task.cancel()


async def _apply_template(client: InnerClient, parameter: bytes) -> dict[str, object]:
    wanted = decode_body(parameter, messages.TemplateParameter)
    name = (await find(client, wanted.specifier.name, LLM)).key
    tools = chat_tools(wanted.opts.tool_definitions)
    body = {"model": name, "messages": chat_messages(wanted.history), "tools": tools or None}
    tokens = msgspec.json.decode(await client.ask("POST /tokenize", body), type=TokenizeResponse)
    text = await client.ask("POST /detokenize", {"model": name, "tokens": tokens.tokens})
    return {"formatted": msgspec.json.decode(text, type=DetokenizeResponse).prompt}


async def _embed(client: InnerClient, parameter: bytes) -> dict[str, object]:
    wanted = decode_body(parameter, messages.EmbeddedText)
    name = (await find(client, wanted.model_specifier.name, EMBEDDING)).key
    body = {"model": name, "input": wanted.input_string}
    answer = msgspec.json.decode(await client.ask("POST /v1/embeddings", body), type=_Vectors)
    return {"embedding": answer.data[0].embedding}


async def _version(_client: InnerClient, _parameter: bytes) -> dict[str, object]:
    return {"version": __version__, "build": 0}


async def _ignore(_client: InnerClient, _parameter: bytes) -> None:
    """Take a notice that LM Studio's window would show."""


def _nothing(what: str) -> Namespace:
    return Namespace({}, {}, f"{what} are not served here")


_LLMS = _Models(LLM)
_EMBEDDERS = _Models(EMBEDDING)

NAMESPACES = {
    "llm": Namespace(
        {**_LLMS.calls, "applyPromptTemplate": _apply_template},
        {**_LLMS.channels, "predict": predict, "completeRawText": complete_raw_text},
        "this is not served here; models are listed, loaded, used and unloaded",
    ),
    "embedding": Namespace(
        {**_EMBEDDERS.calls, "embedString": _embed},
        _EMBEDDERS.channels,
        "this is not served here; models are listed, loaded, used and unloaded",
        max_waiting=_MAX_WAITING_TEXTS,
    ),
    "system": Namespace(
        {"listDownloadedModels": _list_downloaded, "version": _version, "notify": _ignore},
        {},
        "this is not served here; models are listed",
    ),
    "repository": Namespace(
        {}, {}, "downloads are not served here: machd model pull fetches models"
    ),
    "files": _nothing("files and images by LM Studio's protocol"),
    "retrieval": _nothing("files"),
    "plugins": _nothing("plugins"),
    "diagnostics": _nothing("logs"),
    "runtime": _nothing("runtimes"),
}
"""What is served at the path of each of LM Studio's namespaces."""
