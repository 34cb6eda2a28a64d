"""Images and videos as a bench sends them, to caches that tell them apart and to those that do not."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from support.clients.measured_rows import PLAN, rows_of
from support.clocks.virtual_time import in_virtual_time
from support.programs.caching_openai import SeeingOpenAi
from support.programs.fake_openai import FakeOpenAi

from machd.errors import EngineFaultError
from machd_bench.pictures import image_part
from machd_bench.report import Verdict
from machd_bench.scenarios.image_join import IMAGE_JOIN
from machd_bench.scenarios.vision_prefix import VISION_PREFIX

_SMALL = replace(PLAN, image_side=56)
_STEPS = ["1a", "1b", "1c", "1d", "1e", "1f", "2a", "2b", "2c", "2d", "2e"]


def _pixels(**options: int) -> np.ndarray:
    url = image_part("a seed", 30, **options)["image_url"]
    assert isinstance(url, dict)
    return np.asarray(Image.open(BytesIO(b64decode(url["url"].partition(",")[2]))))


def test_an_image_is_a_png_that_may_differ_in_one_pixel() -> None:
    """The same seed gives the same image, but for the pixels that are changed."""
    assert _pixels().shape == (30, 30, 3)
    assert (_pixels() == _pixels()).all()
    assert (_pixels() != _pixels(changed_pixels=1)).any(axis=2).sum() == 1


@in_virtual_time
async def test_a_cache_that_tells_images_apart_passes_every_step() -> None:
    """A prompt that came before is found, and its first token takes a small share of a new one's."""
    rows = await rows_of(VISION_PREFIX, SeeingOpenAi(word_s=0.01), _SMALL)

    steps, times = rows[: len(_STEPS)], rows[len(_STEPS) :]
    assert [row.case[:2] for row in steps] == _STEPS
    assert [row.figures["actual"] for row in steps] == [
        *("MISS", "HIT", "PREFIX_HIT", "MISS", "MISS", "HIT"),
        *("MISS", "HIT", "PREFIX_HIT", "MISS", "MISS"),
    ]
    assert {row.figures["verdict"] for row in steps} == {"PASS"}
    assert [row.case for row in times] == [
        f"{kind}, {which}"
        for kind in ("image", "video")
        for which in ("first time", "again", "other question")
    ]
    assert times[1].number("ratio") < 0.05
    assert {goal.verdict for row in rows for goal in row.goals} == {Verdict.PASS}


@pytest.mark.parametrize(
    ("server", "missed"),
    [
        (SeeingOpenAi(heeds_pixels=False), ["1a", "1d", "1e"]),
        (SeeingOpenAi(heeds_frames=False), ["2d", "2e"]),
        (SeeingOpenAi(keeps_prompts=False), ["1b", "1c", "1f", "2b", "2c"]),
        (SeeingOpenAi(tells=False, word_s=0.01), []),
    ],
    ids=["images alike", "frames alike", "forgets", "silent"],
)
@in_virtual_time
async def test_what_a_cache_gets_wrong_fails_at_its_step(
    server: SeeingOpenAi, missed: list[str]
) -> None:
    """An answer about another image, or one that is computed again, is told."""
    rows = await rows_of(VISION_PREFIX, server, _SMALL)

    assert [row.case[:2] for row in rows if row.figures.get("verdict") == "MISSED"] == missed


@pytest.mark.parametrize("stalls", [True, False])
@in_virtual_time
async def test_an_image_that_stalls_streams_shows_it(*, stalls: bool) -> None:
    """The p99 of the gaps meanwhile holds the image's whole prefill, or stays what it was."""
    server = FakeOpenAi(step_s=0.01, word_s=0.02, stalls=stalls)
    (row,) = await rows_of(IMAGE_JOIN, server)

    assert row.figures["streams"] == 8
    assert (row.number("p99_ratio") > 5) is stalls
    assert (row.number("longest_ratio") > 10) is stalls
    expected = Verdict.MISSED if stalls else Verdict.PASS
    assert [goal.verdict for goal in row.goals] == [expected, expected]


@in_virtual_time
async def test_streams_that_end_before_the_image_are_no_measurement() -> None:
    """A server that stops at an end of text fails aloud."""
    with pytest.raises(EngineFaultError, match="a stream ended before the image had its answer"):
        await rows_of(IMAGE_JOIN, FakeOpenAi(max_tokens=5))
