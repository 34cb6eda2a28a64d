"""A real daemon answers images of each family as mlx-vlm's own generation does."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess

from machd.engine.vision.families import COMPARED_FAMILIES, VIDEO_FAMILIES
from machd.user_directories import user_cache_directory
from machd_probes.vision_families.checkpoint import write_family
from machd_probes.vision_matrix.mlx_vlm_generation import OwnGeneration
from machd_probes.vision_matrix.turns import ImagePart, Turn, VideoPart

_MAX_TOKENS = 10
_TURNS: Mapping[str, Turn] = {
    "an image": (ImagePart(1), "What is this?"),
    "another image": (ImagePart(2), "What is this?"),
    "two images": (ImagePart(1), "What is this?", ImagePart(2), "And this?"),
    "an image between lines": ("Look:\n", ImagePart(3), "\nWhat is this?"),
    "text": ("What is this?",),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=[pytest.mark.longest] if one == "phi3_v" else [])
        for one in sorted(COMPARED_FAMILIES)
    ],
)
def test_a_family_answers_as_mlx_vlm_does(family: str, tmp_path: Path) -> None:
    """Images, two images and text, each alone and all at once, get the tokens of mlx-vlm's own generation."""
    checkpoint = write_family(family, tmp_path / family, user_cache_directory(os.environ))
    turns = dict(_TURNS)
    if family in VIDEO_FAMILIES:
        turns["a video"] = (VideoPart(5), "What is this?")
    with ServeProcess(str(checkpoint), "--continuous-batching", "--model-dtype=float32") as daemon:
        alone = {name: _answer(daemon, family, turn) for name, turn in turns.items()}
        with ThreadPoolExecutor(len(turns)) as pool:
            answers = pool.map(lambda turn: _answer(daemon, family, turn), turns.values())
            at_once = dict(zip(turns, answers, strict=True))
    own = OwnGeneration(checkpoint)
    expected = {name: own.answer(turn, _MAX_TOKENS) for name, turn in turns.items()}
    assert alone == expected
    assert at_once == expected


def _answer(daemon: ServeProcess, family: str, turn: Turn) -> str:
    body = {
        "model": family,
        "messages": [{"role": "user", "content": [_part(one) for one in turn]}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    answer = httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=CEILING_S).json()
    return str(answer["choices"][0]["message"]["content"]) if "choices" in answer else str(answer)


def _part(one: str | ImagePart | VideoPart) -> dict[str, Any]:
    if isinstance(one, str):
        return {"type": "text", "text": one}
    if isinstance(one, VideoPart):
        return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", one.content())}}
    return {"type": "image_url", "image_url": {"url": _data_url("image/png", one.content())}}


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
