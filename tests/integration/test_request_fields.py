"""Every request field of the reference page, sent: done, ignored or refused, as the page says."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from anthropic.types import message_create_params as anthropic_messages
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat
from openai.types.responses import response_create_params as openai_responses
from request_fields import DOORS, Door, Fate
from support.checkpoints.served_adapters import write_adapter
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon

_SDK_TYPES: dict[str, type] = {
    "/v1/chat/completions": openai_chat.CompletionCreateParamsBase,
    "/v1/completions": openai_completion.CompletionCreateParamsBase,
    "/v1/responses": openai_responses.ResponseCreateParamsBase,
    "/v1/messages": anthropic_messages.MessageCreateParamsBase,
}

_EXCLUSIVE = {
    "n_predict": {"max_tokens"},
    "max_completion_tokens": {"max_tokens"},
}
"""Fields that say the same as one of the body's; it is left out beside them."""

_COMPANIONS: dict[str, dict[str, object]] = {
    "stream_options": {"stream": True},
    "functions": {},
    "tool_choice": {},
}
"""What a field needs beside it to make sense."""

_SAMPLES = [
    pytest.param(door, name, sample, fate, id=f"{door.path} {name}")
    for door in DOORS
    for name, _, sample, fate in door.rows()
]


@pytest.fixture(name="client", scope="module")
def _client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("adapters")
    write_adapter(directory / "support")  # whose id is 0
    # Names that are not served are accepted as where there are no adapters.
    flags = {"adapters.directory": str(directory), "models.accept_any": True}
    with (
        RunningDaemon(flags=flags) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


@pytest.mark.parametrize(("door", "name", "sample", "fate"), _SAMPLES)
def test_field_meets_the_fate_that_the_page_tells(
    client: httpx.Client, door: Door, name: str, sample: object, fate: Fate
) -> None:
    """A refused field is named in a 400; any other is answered."""
    left_out = _EXCLUSIVE.get(name, set())
    body = {key: value for key, value in door.body.items() if key not in left_out}
    body |= _COMPANIONS.get(name, {}) | {name: sample}
    answer = client.post(door.path, json=body)
    if fate is not Fate.REFUSED:
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.path)
def test_page_lists_every_field_of_the_wire_type(door: Door) -> None:
    """A field that a type has stands on the page."""
    listed = {name for name, *_ in door.rows()}
    assert listed == set(door.type.__struct_encode_fields__)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.path)
def test_page_lists_every_field_of_the_official_client(door: Door) -> None:
    """A field that the official client can send stands on the page."""
    listed = {name for name, *_ in door.rows()}
    types = _SDK_TYPES[door.path].__mro__
    known = {name for one in types for name in getattr(one, "__annotations__", {})}
    assert known <= listed


def test_neutral_value_of_a_refused_field_is_no_wish(client: httpx.Client) -> None:
    """Null, and the value that asks for nothing, pass where any other is refused."""
    door = DOORS[0]
    refused = [name for name, _, _, fate in door.rows() if fate is Fate.REFUSED]
    assert len(refused) > 30
    answer = client.post(door.path, json={**door.body, **dict.fromkeys(refused)})
    assert answer.status_code == 200, answer.text
    off = {"mirostat": 0, "typical_p": 1.0, "use_beam_search": False, "n_cmpl": 1, "tfs_z": 1}
    answer = client.post(door.path, json={**door.body, **off})
    assert answer.status_code == 200, json.dumps(answer.json())
