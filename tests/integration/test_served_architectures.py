"""A daemon that serves an architecture does what the page of architectures says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.architectures import NEED_METAL, ONE_OF_EACH_KIND
from support.engines.probing import without_compilation

from machd.engine.assembly import make_engine
from machd.engine.protocol.engine import Engine
from machd.engine_process.startup_guard import Measures
from machd_probes.catalogue import architecture_names
from machd_probes.prober import tiny_loaded
from machd_probes.scripts import random_prompt
from machd_probes.startup import startup_measures

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "architectures.md"
_WORDS = {"supported": "yes", "blocked": "no", "unknown": "?"}
_COLUMNS = {
    "continuous batching": "continuous_batching",
    "speculation": "speculation",
    "batched specdec": "batched_specdec",
    "quantised KV": "kv_quantization",
    "chunked prefill": "chunked_prefill",
    "adapters": "batched_adapters",
}
_PROMPT_TOKENS = 60
_EVERY_RUN = {*ONE_OF_EACH_KIND, "gemma2"}
"""One of each kind of cache, and one whose layers machd mends."""


class _ArchitectureDaemon(RunningDaemon):
    """A daemon that finds its evidence as ``serve`` does, and may measure nothing."""

    def __init__(self, make_engine: Callable[[], Engine], cache_directory: Path) -> None:
        flags = {
            "continuous_batching.enabled": True,
            "probe.on_start": "facts",
            "cache.memory_mb": 100,
            "cache.block_tokens": 16,
        }
        super().__init__(make_engine, flags)
        self._cache_directory = cache_directory

    def _measures(self) -> Measures:
        return startup_measures(self._cache_directory, model_path="/nowhere")


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    with without_compilation():
        yield
    gc.collect()
    mx.clear_cache()


@cache
def _page_rows() -> dict[str, dict[str, str]]:
    """Cells of the page's main tables by architecture and heading."""
    rows: dict[str, dict[str, str]] = {}
    headings: list[str] = []
    for line in _PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| architecture"):
            headings = cells
        elif line.startswith("| `") and len(cells) == len(headings):
            rows.setdefault(cells[0].strip("`"), dict(zip(headings, cells, strict=True)))
    return rows


def _answer(url: str, model: str) -> httpx.Response:
    prompt = list(random_prompt(_PROMPT_TOKENS, 3, 128))
    body = {"model": model, "prompt": prompt, "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=CEILING_S)
    assert answer.status_code == 200, answer.text
    return answer


def _cached_tokens(answer: httpx.Response) -> int:
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _EVERY_RUN else pytest.mark.long)
        for name in architecture_names()
        if name not in NEED_METAL
    ],
)
def test_the_page_is_what_the_daemon_does(name: str, tmp_path: Path) -> None:
    """Its verdicts stand in ``/v1/capabilities``, and the header and a second prompt show them."""
    row = _page_rows()[name]
    with _ArchitectureDaemon(lambda: make_engine(tiny_loaded(name)), tmp_path) as daemon:
        told: dict[str, Any] = httpx.get(f"{daemon.url}/v1/capabilities").json()
        first, second = (_answer(daemon.url, f"tiny-{name}") for _ in range(2))

    assert row["KV cache"].strip("`") == told["kv_cache_kind"]
    assert {heading: row[heading] for heading in _COLUMNS} == {
        heading: _WORDS[told[feature]["verdict"]] for heading, feature in _COLUMNS.items()
    }
    batching, prefix = told["continuous_batching"], told["prefix_cache"]
    assert batching["source"] == ("measured" if batching["verdict"] == "supported" else "rule")
    mode = "batched" if row["continuous batching"] == "yes" else "single"
    assert told["decode_mode"]["active"] == mode
    assert {one.headers["x-decode-mode"] for one in (first, second)} == {mode}
    assert row["prefix cache"] == (
        prefix["extent"] if prefix["verdict"] == "supported" else _WORDS[prefix["verdict"]]
    )
    is_kept = row["prefix cache"] in {"full", "snapshot"}
    assert prefix["active"] is is_kept
    assert _cached_tokens(first) == 0
    assert (_cached_tokens(second) > 0) is is_kept
    assert first.json()["choices"][0]["text"] == second.json()["choices"][0]["text"]


@pytest.mark.parametrize("name", sorted(NEED_METAL))
def test_what_cannot_be_built_here_is_not_promised(name: str) -> None:
    """The page says "unknown"."""
    row = _page_rows()[name]
    assert row["continuous batching"] == "?"
    assert row["prefix cache"] == "-"


def test_every_architecture_has_a_row() -> None:
    """Nothing of mlx-lm's is left out of the comparison."""
    assert set(_page_rows()) == set(architecture_names())
