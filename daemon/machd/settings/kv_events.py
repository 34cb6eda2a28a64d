"""The section ``kv_events``: where the prefix cache tells routers what it has."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from machd.settings.section import Mark, SettingsSection
from machd.settings.texts import Text

_MAX_PORT = 65_535


def _endpoint(text: str) -> str:
    if re.fullmatch(
        r"ipc://[^@*].*", text
    ):  # no abstract and no nameless sockets: they have no mode
        return text
    parts = re.fullmatch(r"tcp://([^\s/]+):([0-9]{1,5})", text)
    if parts is None or int(parts[2]) > _MAX_PORT:
        raise ValueError("is not tcp://ADDRESS:PORT or ipc://PATH")
    return text


Endpoint = Annotated[Text, AfterValidator(_endpoint)]
"""A ZMQ endpoint to bind."""


class KvEventsSettings(SettingsSection):
    """Events of the prefix cache's blocks for routers, in vLLM's format."""

    endpoint: Annotated[Endpoint | None, Mark.RESTART] = Field(
        default=None,
        examples=["tcp://127.0.0.1:5557"],
        description="ZMQ endpoint that publishes them: prompts as token ids, to whoever connects. "
        "Without it nothing is published.",
    )
    replay_endpoint: Annotated[Endpoint | None, Mark.RESTART] = Field(
        default=None,
        examples=["tcp://127.0.0.1:5558"],
        description="ZMQ endpoint that sends the last events again, to a subscriber that missed some. "
        "Whoever connects reads prompts there, too.",
    )
    topic: Annotated[Text | None, Mark.RESTART] = Field(
        default=None,
        examples=["kv-events"],
        description="First frame of each message, which subscribers can filter by. Without it the frame is empty.",
    )
    encoding: Annotated[Literal["map", "array"], Mark.RESTART] = Field(
        default="map",
        description="Form of an event: map as vLLM 0.24 and later has it, array for subscribers made for "
        "earlier versions.",
    )
