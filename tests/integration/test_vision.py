"""A real daemon serves a generated vision model to the official clients."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from playwright.sync_api import FilePayload
from support.browser.browser import opened_browser, opened_page
from support.browser.playground import Playground
from support.checkpoints.kept_family import write_kept_family
from support.clients import image_files
from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess

from machd_probes.vision_families.media import block_image
from machd_probes.vision_matrix.mlx_vlm_generation import OwnGeneration
from machd_probes.vision_matrix.turns import ImagePart, Turn

_MAX_TOKENS = 10
_QUESTION: dict[str, Any] = {"type": "text", "text": "What is this?"}


@pytest.fixture(name="checkpoint", scope="module")
def _checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of a family whose images move the positions of what lies behind them."""
    directory = tmp_path_factory.mktemp("vision") / "qwen2_vl"
    return write_kept_family("qwen2_vl", directory)


@pytest.fixture(name="daemon", scope="module")
def _daemon(checkpoint: Path) -> Iterator[ServeProcess]:
    """A daemon that serves it in a batch."""
    # Measuring what no evidence is shipped of takes twice as long as all tests.
    flags = ("--continuous-batching", "--probe-on-start=off", "--model-dtype=float32")
    with ServeProcess(str(checkpoint), *flags) as daemon:
        yield daemon


@pytest.fixture(name="expected", scope="module")
def _expected(checkpoint: Path) -> dict[str, str]:
    """The answers of mlx-vlm's own generation, alone."""
    own = OwnGeneration(checkpoint)
    return {name: own.answer(turn, _MAX_TOKENS) for name, turn in _TURNS.items()}


def _image(seed: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(ImagePart(seed).content()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


_TURNS: Mapping[str, Turn] = {
    "an image": (ImagePart(1), "What is this?"),
    "another image": (ImagePart(2), "What is this?"),
    "two images": (ImagePart(1), "What is this?", ImagePart(2), "And this?"),
    "text": ("What is this?",),
}
_CONVERSATIONS: Mapping[str, list[dict[str, Any]]] = {
    name: [
        _image(one.seed) if isinstance(one, ImagePart) else {"type": "text", "text": one}
        for one in turn
    ]
    for name, turn in _TURNS.items()
}


def _ask(daemon: ServeProcess, parts: Sequence[dict[str, Any]], *, stream: bool = False) -> str:
    request: dict[str, Any] = {
        "model": "qwen2_vl",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:
        if not stream:
            return client.chat.completions.create(**request).choices[0].message.content or ""
        chunks = client.chat.completions.create(**request, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def _cached_tokens(daemon: ServeProcess, parts: Sequence[dict[str, Any]]) -> int:
    body = {
        "model": "qwen2_vl",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 2,
    }
    answer = httpx.post(f"{daemon.url}/v1/chat/completions", json=body).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_answers_equal_those_of_mlx_vlm_alone(
    daemon: ServeProcess, expected: dict[str, str]
) -> None:
    """Alone and one after the other, every answer is that of mlx-vlm's own generation."""
    assert {name: _ask(daemon, parts) for name, parts in _CONVERSATIONS.items()} == expected


def test_a_batch_of_images_and_text_answers_as_alone(
    daemon: ServeProcess, expected: dict[str, str]
) -> None:
    """Four streams at once, of images, two images and text, give the same answers."""
    with ThreadPoolExecutor(len(_CONVERSATIONS)) as pool:
        answers = pool.map(lambda parts: _ask(daemon, parts, stream=True), _CONVERSATIONS.values())
        assert dict(zip(_CONVERSATIONS, answers, strict=True)) == expected


def test_one_changed_pixel_is_another_image(daemon: ServeProcess) -> None:
    """The prefix cache ends before an image of which one pixel differs, and covers the same image."""

    def cached_tokens(image: bytes) -> int:
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "A question of its own."},
        ]
        return _cached_tokens(daemon, parts)

    changed = io.BytesIO()
    picture = block_image(7)
    picture.putpixel((3, 3), (1, 2, 3))
    picture.save(changed, "PNG")
    cached_tokens(ImagePart(7).content())
    same, other = cached_tokens(ImagePart(7).content()), cached_tokens(changed.getvalue())
    assert same > 20
    assert other < 5


def test_the_anthropic_client_sends_images(daemon: ServeProcess, expected: dict[str, str]) -> None:
    """An image block gives the answer that the same image gives in a chat completion."""
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(ImagePart(1).content()).decode(),
    }
    turn: Any = {"role": "user", "content": [{"type": "image", "source": source}, _QUESTION]}
    with anthropic.Anthropic(base_url=daemon.url, api_key="none") as client:
        message = client.messages.create(
            model="qwen2_vl",
            max_tokens=_MAX_TOKENS,
            extra_body={"temperature": 0},
            messages=[turn],
        )
    assert message.content[0].type == "text"
    assert message.content[0].text == expected["an image"]


def _video(seed: int, **fields: object) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(_video_file(seed)).decode()}"
    return {"type": "video_url", "video_url": {"url": url}, **fields}


@functools.cache
def _video_file(seed: int) -> bytes:
    return image_files.video(seed)


def test_the_playground_answers_images(daemon: ServeProcess, expected: dict[str, str]) -> None:
    """An image that is chosen in a browser gives the answer that it gives in a chat completion, and another one its own."""
    with opened_browser() as browser:
        for seed, name in ((1, "an image"), (2, "another image")):
            file = FilePayload(
                name="chosen.png", mimeType="image/png", buffer=ImagePart(seed).content()
            )
            with opened_page(browser) as watched:
                playground = Playground(watched.page, daemon.url)
                watched.page.get_by_label("Temperature").fill("0")
                watched.page.get_by_label("Max tokens").fill(str(_MAX_TOKENS))
                watched.page.get_by_label("Images").set_input_files(file)
                answer = playground.ask("What is this?")
                assert playground.text_of(answer).split() == expected[name].split()
    assert expected["an image"] != expected["another image"]


def test_a_video_is_answered(daemon: ServeProcess) -> None:
    """A video by the openai client is answered, and another one differently."""
    first, second = (_ask(daemon, [_video(seed), _QUESTION]) for seed in (1, 2))
    assert first
    assert first != second


def test_videos_images_and_text_in_one_batch_answer_as_alone(daemon: ServeProcess) -> None:
    """Four streams at once, two of them of videos that differ in their frames alone."""
    conversations = [
        [_video(5, fps=2.0, max_frames=4), _QUESTION],
        [_video(5, fps=4.0), _QUESTION],
        [_image(5), _QUESTION],
        [_QUESTION],
    ]
    with ThreadPoolExecutor(len(conversations)) as pool:
        together = list(pool.map(lambda parts: _ask(daemon, parts, stream=True), conversations))
    assert together == [_ask(daemon, parts) for parts in conversations]
    assert len(set(together)) == len(conversations)


def test_a_video_with_other_frames_is_another_video(daemon: ServeProcess) -> None:
    """The prefix cache covers the same video, and ends before it where fps or max_frames differ."""

    def cached_tokens(**fields: object) -> int:
        parts = [_video(8, **fields), {"type": "text", "text": "A question of its own."}]
        return _cached_tokens(daemon, parts)

    cached_tokens(fps=2.0, max_frames=4)
    assert cached_tokens(fps=2.0, max_frames=4) > 15
    assert cached_tokens(fps=1.0, max_frames=4) < 5
    assert cached_tokens(fps=2.0, max_frames=2) < 5
    assert cached_tokens(fps=1.0, max_frames=4) > 15


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no image at all", "is no PNG, JPEG, WebP or GIF file"),
        (ImagePart(1).content()[:200], "is damaged or cut short"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG, JPEG, WebP or GIF file"),
    ],
    ids=["text", "truncated", "svg"],
)
def test_a_file_that_is_no_image_is_refused(
    daemon: ServeProcess, content: bytes, said: str
) -> None:
    """The answer is 400, names the field and says why; the next request is served."""
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        _ask(daemon, [{"type": "image_url", "image_url": {"url": url}}, _QUESTION])
    assert refused.value.param == "messages[0].content[0].image_url.url"
    assert _ask(daemon, [_QUESTION])


def test_capabilities_tell_what_the_model_sees(daemon: ServeProcess) -> None:
    """Images and videos are features of the model."""
    features = httpx.get(f"{daemon.url}/v1/capabilities").json()["features"]
    assert (features["vision"], features["video"]) == (True, True)


def test_a_text_that_spells_a_placeholder_is_text(daemon: ServeProcess) -> None:
    """A placeholder that a client types takes no image's place, and the image has its own."""
    typed = {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|> is a token."}
    assert _ask(daemon, [typed, _image(1), _QUESTION])
    assert _ask(daemon, [typed])


def test_a_model_without_a_chat_template_serves_its_text(checkpoint: Path) -> None:
    """Images come in messages, so it starts without them, says so, and takes prompts."""
    with ServeProcess(str(checkpoint), "--model-chat-template=none") as daemon:
        features = httpx.get(f"{daemon.url}/v1/capabilities").json()["features"]
        body = {"model": "qwen2_vl", "prompt": "What is this?", "max_tokens": 3}
        answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=CEILING_S)
    assert (features["chat"], features["vision"]) == (False, False)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
