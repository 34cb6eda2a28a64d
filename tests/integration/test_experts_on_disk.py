"""A real daemon serves a generated mixture-of-experts model with most experts on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clocks.polling import CEILING_S
from support.daemon.engine_processes import engine_of
from support.daemon.serve_process import ServeProcess

from machd.user_directories import user_cache_directory
from machd_bench.generated_checkpoint import MoeShape, write_generated_checkpoint

_SHAPE = MoeShape(hidden=256, inner=128, layers=4, experts=32, chosen=4)
_EXPERT_BYTES = 3 * _SHAPE.hidden * _SHAPE.inner * 4
_BANK_GB = _SHAPE.layers * _SHAPE.experts * _EXPERT_BYTES / 4 / 1e9
"""Memory for a quarter of the experts in float32."""

_FLOAT32 = "--model-dtype=float32"
_BATCHED = ("--continuous-batching", _FLOAT32)
_BANKED = (*_BATCHED, f"--experts-resident-gb={_BANK_GB:.6f}")
_UNMEASURED = "--probe-on-start=off"


@pytest.fixture(name="checkpoint", scope="module")
def _checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 128 experts."""
    path = tmp_path_factory.mktemp("experts") / "moe"
    return write_generated_checkpoint(path, _SHAPE, user_cache_directory(os.environ))


@pytest.fixture(name="copy")
def _copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "moe"))


@pytest.fixture(name="expected", scope="module")
def _expected(checkpoint: Path) -> list[str]:
    """The answers of the model in memory."""
    with ServeProcess(str(checkpoint), *_BATCHED, _UNMEASURED) as daemon:
        return [_text(one) for one in _answers(daemon.url)]


@pytest.fixture(name="daemon", scope="module")
def _daemon(checkpoint: Path) -> Iterator[ServeProcess]:
    """A daemon with room for a quarter of the experts."""
    with ServeProcess(str(checkpoint), *_BANKED) as daemon:
        yield daemon


def _bodies() -> list[dict[str, object]]:
    """Greedy and seeded requests, one with a grammar."""
    bodies: list[dict[str, object]] = [
        {
            "model": "moe",
            "prompt": f"{color} hills and a {animal} that looked for the sea, " * 4,
            "max_tokens": 24,
            "ignore_eos": True,
            "temperature": index % 2,
            "seed": index,
        }
        for index, (color, animal) in enumerate(
            [("Green", "fox"), ("Blue", "dog"), ("Red", "hen"), ("Old", "cat"), ("Wet", "cow")]
        )
    ]
    bodies[4] |= {"structured_outputs": {"regex": "[a-z]{10,20}"}, "ignore_eos": False}
    return bodies


def _answers(url: str) -> list[httpx.Response]:
    """Ask all at once."""
    bodies = _bodies()
    with (
        httpx.Client(base_url=url, timeout=CEILING_S) as client,
        ThreadPoolExecutor(len(bodies)) as pool,
    ):
        return list(pool.map(lambda body: client.post("/v1/completions", json=body), bodies))


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def _bank(url: str) -> dict[str, float]:
    bank: dict[str, float] = httpx.get(f"{url}/v1/cache/stats").json()["expert_bank"]
    return bank


def _check_right_or_failed(responses: Sequence[httpx.Response], expected: Sequence[str]) -> int:
    """Assert that each answer is right or an engine error; return how many are errors."""
    for response, text in zip(responses, expected, strict=True):
        if response.status_code == 200:
            assert _text(response) == text
        else:
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "row_fault"
    return sum(response.status_code != 200 for response in responses)


def test_streamed_model_answers_as_from_memory(daemon: ServeProcess, expected: list[str]) -> None:
    """A batch of greedy, seeded and grammar-bound rows gets the same text, cold and from the prefix cache."""
    assert [_text(one) for one in _answers(daemon.url)] == expected
    again = _answers(daemon.url)
    assert [_text(one) for one in again] == expected
    assert all(one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for one in again)
    bank = _bank(daemon.url)
    assert bank["misses"] > 0
    assert bank["evictions"] > 0
    assert bank["bytes_read"] > 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculation-mode=ngram",),
        pytest.param(("--cache-kv-quantization=affine8",), marks=pytest.mark.long),
        pytest.param((), marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_streamed_model_works_with_each_feature(checkpoint: Path, flags: tuple[str, ...]) -> None:
    """With drafts, quantised KV and in single flight, answers are those of the model in memory."""
    texts = []
    batched = _BANKED[:1] if flags else ()
    for bank in (_BANKED[-1:], ()):
        with ServeProcess(str(checkpoint), *batched, _FLOAT32, *flags, *bank) as daemon:
            texts.append([_text(one) for one in _answers(daemon.url)])
    assert texts[0] == texts[1]


def test_expert_bank_is_shown_on_every_surface(daemon: ServeProcess) -> None:
    """Capabilities, cache statistics, metrics and the log tell the same capacity."""
    capabilities = httpx.get(f"{daemon.url}/v1/capabilities").json()["expert_streaming"]
    assert capabilities["active"] is True
    assert capabilities["verdict"] == "supported"
    assert "look-ahead" in capabilities["reason"]
    bank = _bank(daemon.url)
    assert bank["capacity_bytes"] == 32 * _EXPERT_BYTES
    assert bank["resident_bytes"] == bank["entries"] * _EXPERT_BYTES
    # Read-ahead of the last pass may still be on its way into a quarter of the slots.
    assert 24 <= bank["entries"] <= 32
    page = httpx.get(f"{daemon.url}/metrics").text
    samples = {
        (one.name, one.labels.get("outcome")): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
    }
    assert samples["machd_expert_bank_capacity_bytes", None] == bank["capacity_bytes"]
    assert samples["machd_expert_bank_lookups_total", "hit"] == bank["hits"]
    (event,) = [one for one in daemon.events if one["event"] == "experts.on_disk"]
    assert event["capacity_bytes"] == bank["capacity_bytes"]
    assert (event["in_memory"], event["experts"]) == (32, 128)


@pytest.mark.long
def test_streamed_model_takes_little_more_memory_than_its_bank(
    checkpoint: Path, daemon: ServeProcess
) -> None:
    """The process is smaller than with all experts in memory, by those that are on disk."""
    all_bytes = _SHAPE.layers * _SHAPE.experts * _EXPERT_BYTES
    with ServeProcess(str(checkpoint), *_BATCHED) as whole:
        _answers(whole.url)
        _answers(daemon.url)
        whole_bytes, bytes_ = (
            engine_of(one.process.pid).memory_info().rss for one in (whole, daemon)
        )

    assert whole_bytes - bytes_ > all_bytes * 3 / 4 - 40_000_000


@pytest.mark.long
def test_deleted_checkpoint_is_served_on(copy: Path, expected: list[str]) -> None:
    """Files that are deleted while they are served are read as they were."""
    with ServeProcess(str(copy), *_BANKED) as daemon:
        shutil.rmtree(copy)
        assert [_text(one) for one in _answers(daemon.url)] == expected


@pytest.mark.long  # every run has the failed read and the row that it costs, in unit/engine/experts
@pytest.mark.parametrize("fault", ["truncated", "modified"])
def test_damaged_checkpoint_fails_requests_and_not_the_daemon(
    copy: Path, expected: list[str], fault: str
) -> None:
    """Requests that need an unreadable expert end with an error, no answer is wrong, and the daemon stays up."""
    with ServeProcess(str(copy), *_BANKED, _UNMEASURED) as daemon:
        assert [_text(one) for one in _answers(daemon.url)] == expected
        for path in copy.glob("model-*.safetensors"):
            if fault == "truncated":
                os.truncate(path, path.stat().st_size // 2)
            else:
                with path.open("r+b") as file:
                    file.seek(path.stat().st_size // 2)
                    file.write(bytes(4096))
        assert _check_right_or_failed(_answers(daemon.url), expected) > 0
        assert httpx.get(f"{daemon.url}/health/live").status_code == 200
        assert httpx.get(f"{daemon.url}/health/ready").status_code == 200
        event = daemon.wait_for("experts.unreadable")
        assert "restart machd" in str(event["advice"])


def test_streaming_without_experts_is_a_note(tmp_path: Path) -> None:
    """A model without experts is served from memory, and the log says that the setting has no effect."""
    model = str(write_tiny_llama(tmp_path / "tiny"))
    with ServeProcess(model, "--streaming", _UNMEASURED) as daemon:
        (note,) = [one for one in daemon.events if one["event"] == "model.note"]
        assert "experts.resident_gb has no effect" in str(note["note"])
        assert httpx.get(f"{daemon.url}/v1/cache/stats").json()["expert_bank"] is None
