"""The calls and channels of each namespace, but for predictions: each is one or two requests to the server itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from machd import __version__
from machd.dialects.lm_studio_socket import messages
from machd.dialects.lm_studio_socket.history import chat_messages
from machd.dialects.lm_studio_socket.models import find, instance_info, listed, model_info
from machd.dialects.lm_studio_socket.prediction import chat_tools, complete_raw_text, predict
from machd.dialects.lm_studio_socket.session import Channel, Namespace
from machd.dialects.tokens.request import DetokenizeResponse, TokenizeResponse
from machd.dialects.wire.decoding import decode_body
from machd.http.inner_request import AnsweredError, InnerClient

_PROGRESS_S = 1.0
"""Interval of news about a load: the package for Python gives up after a minute without any."""


class _Loading(Struct, frozen=True):
    """A model of ``GET /v1/models``."""

    progress: float = 0.0


async def _list_downloaded(client: InnerClient, _parameter: bytes) -> list[dict[str, object]]:
    return [model_info(one) for one in await listed(client)]


async def _list_loaded(client: InnerClient, _parameter: bytes) -> list[dict[str, object]]:
    return [instance_info(one) for one in await listed(client) if one.loaded_instances]


async def _list_none(_client: InnerClient, _parameter: bytes) -> list[object]:
    return []


async def _model_info(client: InnerClient, parameter: bytes) -> dict[str, object] | None:
    wanted = decode_body(parameter, messages.SpecifiedModel)
    try:
        return instance_info(await find(client, wanted.specifier.name))
    except AnsweredError:
        if wanted.throw_if_not_found:
            raise
        return None


async def _load_config(client: InnerClient, parameter: bytes) -> dict[str, object]:
    wanted = decode_body(parameter, messages.SpecifiedModel)
    length = instance_info(await find(client, wanted.specifier.name))["contextLength"]
    return {"fields": [{"key": "llm.load.contextLength", "value": length}]}


async def _unload(client: InnerClient, parameter: bytes) -> None:
    wanted = decode_body(parameter, messages.UnloadedModel)
    await client.ask("POST /api/v1/models/unload", {"instance_id": wanted.identifier})


async def _tokens(client: InnerClient, parameter: bytes) -> list[int]:
    wanted = decode_body(parameter, messages.TextOfModel)
    name = (await find(client, wanted.specifier.name)).key
    body = {"model": name, "prompt": wanted.input_string}
    return msgspec.json.decode(
        await client.ask("POST /tokenize", body), type=TokenizeResponse
    ).tokens


async def _tokenize(client: InnerClient, parameter: bytes) -> dict[str, object]:
    return {"tokens": await _tokens(client, parameter)}


async def _count_tokens(client: InnerClient, parameter: bytes) -> dict[str, object]:
    return {"tokenCount": len(await _tokens(client, parameter))}


async def _apply_template(client: InnerClient, parameter: bytes) -> dict[str, object]:
    wanted = decode_body(parameter, messages.TemplateParameter)
    name = (await find(client, wanted.specifier.name)).key
    tools = chat_tools(wanted.opts.tool_definitions)
    body = {"model": name, "messages": chat_messages(wanted.history), "tools": tools or None}
    tokens = msgspec.json.decode(await client.ask("POST /tokenize", body), type=TokenizeResponse)
    text = await client.ask("POST /detokenize", {"model": name, "tokens": tokens.tokens})
    return {"formatted": msgspec.json.decode(text, type=DetokenizeResponse).prompt}


async def _load(channel: Channel, parameter: bytes) -> None:
    """Load a model for an operator."""
    name = decode_body(parameter, messages.LoadedModel).model_key
    model = await find(channel.client, name)
    await channel.send({"type": "resolved", "info": model_info(model)})
    asking = channel.client.ask("POST /api/v1/models/load", {"model": model.key})
    await _wait(channel, "progress", model.key, asking)
    await _tell_loaded(channel, "success", model.key)


async def _get_or_load(channel: Channel, parameter: bytes) -> None:
    """Load a model as any request for it does."""
    name = decode_body(parameter, messages.WantedModel).identifier
    model = await find(channel.client, name)
    if model.loaded_instances:
        await channel.send({"type": "alreadyLoaded", "info": instance_info(model)})
        return
    info = model_info(model)
    await channel.send({"type": "startLoading", "identifier": model.key, "info": info})
    asking = channel.client.ask("POST /api/generate", {"model": model.key, "stream": False})
    await _wait(channel, "loadProgress", model.key, asking)
    await _tell_loaded(channel, "loadSuccess", model.key)


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


async def _tell_loaded(channel: Channel, news: str, name: str) -> None:
    if not channel.client.has_left:
        info = instance_info(await find(channel.client, name))
        await channel.send({"type": news, "info": info})


async def _version(_client: InnerClient, _parameter: bytes) -> dict[str, object]:
    return {"version": __version__, "build": 0}


async def _ignore(_client: InnerClient, _parameter: bytes) -> None:
    """Take a notice that LM Studio's window would show."""


def _nothing(what: str) -> Namespace:
    return Namespace({}, {}, f"{what} are not served here")


NAMESPACES = {
    "llm": Namespace(
        {
            "listLoaded": _list_loaded,
            "getModelInfo": _model_info,
            "getLoadConfig": _load_config,
            "unloadModel": _unload,
            "tokenize": _tokenize,
            "countTokens": _count_tokens,
            "applyPromptTemplate": _apply_template,
        },
        {
            "loadModel": _load,
            "getOrLoad": _get_or_load,
            "predict": predict,
            "completeRawText": complete_raw_text,
        },
        "this is not served here; models are listed, loaded, used and unloaded",
    ),
    "system": Namespace(
        {"listDownloadedModels": _list_downloaded, "version": _version, "notify": _ignore},
        {},
        "this is not served here; models are listed",
    ),
    "embedding": Namespace(
        {"listLoaded": _list_none},
        {},
        "embeddings are not served here; ask POST /v1/embeddings over HTTP",
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
