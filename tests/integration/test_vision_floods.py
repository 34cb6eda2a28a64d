"""Images that cost much and clients that leave: the daemon lives, and other clients are served meanwhile."""

from __future__ import annotations

import json
import random
import socket
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.checkpoints.kept_family import write_kept_family
from support.clients.generated_images import GENERATED
from support.clients.image_files import encoded, jpeg_of_scans, picture
from support.clocks.polling import CEILING_S
from support.daemon.engine_processes import engine_of
from support.daemon.serve_process import ServeProcess

_CHAT = "/v1/chat/completions"
_PUBLISHED_PIXELS = 12_845_056
"""``max_pixels`` as qwen2_vl's publisher has it."""

_ROOMS_BYTES = (400_000_000, 900_000_000)
"""Memory beyond what an idle engine process takes. A large image's patches do not fit the second; the first is short for
the process that answers HTTP, too."""


@pytest.fixture(name="checkpoint", scope="module")
def _checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floods")
    return write_kept_family("qwen2_vl", folder / "qwen2_vl")


@pytest.fixture(name="daemon", scope="module")
def _daemon(checkpoint: Path) -> Iterator[ServeProcess]:
    with ServeProcess(str(checkpoint), "--model-dtype=float32") as daemon:
        yield daemon
        assert "Traceback" not in "".join(daemon.output)


def _body(content: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{b64encode(content).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": parts}]
    return {"messages": messages, "max_tokens": 2, "temperature": 0}


def _answer(daemon: ServeProcess, content: bytes) -> httpx.Response:
    return httpx.post(daemon.url + _CHAT, json=_body(content), timeout=CEILING_S)


def _leave(daemon: ServeProcess, content: bytes) -> None:
    """Send an image, and close the connection."""
    body = json.dumps(_body(content)).encode()
    host, port = daemon.url.removeprefix("http://").split(":")
    head = f"POST {_CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=CEILING_S) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)


def _assert_served(daemon: ServeProcess, seed: int) -> None:
    """Another client's image, which is not known yet, is answered."""
    answer = _answer(daemon, encoded(picture(seed=seed), "PNG"))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("scans", [64, 400])
def test_slow_images_of_clients_that_left_hold_up_no_other(
    daemon: ServeProcess, scans: int
) -> None:
    """Eight progressive JPEGs of 4096² pixels, closed at once: as many scans as are allowed, or many more."""
    slow = jpeg_of_scans(scans, width=4096, height=4096)
    for _ in range(8):
        _leave(daemon, slow)
    _assert_served(daemon, 1000 + scans)


def test_properties_say_that_images_are_taken(daemon: ServeProcess) -> None:
    """Clients of llama.cpp ask there whether they may offer them."""
    properties = httpx.get(f"{daemon.url}/props", timeout=CEILING_S).json()
    assert properties["modalities"] == {"vision": True, "audio": False}


@pytest.mark.parametrize("kind", GENERATED)
@pytest.mark.parametrize(
    "seeds", [pytest.param(2, id="2"), pytest.param(24, id="24", marks=pytest.mark.long)]
)
def test_generated_images_cost_their_own_requests_alone(
    daemon: ServeProcess, kind: str, seeds: int
) -> None:
    """Each is answered, or refused by name; some of their clients leave; another client's image is answered after them."""
    contents = [GENERATED[kind](random.Random(f"{kind} {seed}")) for seed in range(seeds)]
    for content in contents[1::3]:
        _leave(daemon, content)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda content: _answer(daemon, content), contents))
    outcomes = Counter(answer.status_code for answer in answers)
    assert set(outcomes) <= {200, 400, 503}, outcomes
    refused = [one.json()["error"]["message"] for one in answers if one.status_code == 400]
    assert all(one.startswith("messages[0].content[0].image_url.url: ") for one in refused), refused
    assert daemon.process.poll() is None
    _assert_served(daemon, 2000 + sum(map(ord, kind)) + seeds)


@pytest.mark.long
@pytest.mark.parametrize("room_bytes", _ROOMS_BYTES)
def test_images_beyond_the_memory_end_no_daemon(
    checkpoint: Path, tmp_path: Path, room_bytes: int
) -> None:
    """Of generated large sizes, a few kilobytes each, none fits; each is 400 or 503, and a small one is answered after it."""
    processor = checkpoint / "preprocessor_config.json"
    settings = json.loads(processor.read_text())
    folder = tmp_path / "published"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / processor.name).unlink()
    (folder / processor.name).write_text(json.dumps({**settings, "max_pixels": _PUBLISHED_PIXELS}))
    config = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32_768}))
    with ServeProcess(str(folder), "--model-dtype=float32") as daemon:
        idle_bytes = engine_of(daemon.process.pid).memory_info().vms
    limit_kib = (idle_bytes + room_bytes) // 1024
    arguments = ("--model-dtype=float32", "--vision-max-decode-s=60")
    with ServeProcess(str(folder), *arguments, ulimit=f"-v {limit_kib}") as daemon:
        source = random.Random(3)
        for seed in range(10):
            width, height = source.randint(2600, 4000), source.randint(2600, 4000)
            large = picture(seed=seed, width=width, height=height)
            answer = _answer(daemon, encoded(large, "PNG"))
            assert answer.status_code in {400, 503}, answer.text
            assert daemon.process.poll() is None
            _assert_served(daemon, seed)
