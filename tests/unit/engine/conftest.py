"""Fixtures of the engine's tests: a tiny model, and one process for chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S
from support.engines.cpu_layers import computing_as_the_daemon
from unit.engine.tiny_llama import TinyLlama

from machd.engine.loading import inspection, template_abilities
from machd.engine.tokenizer import tokenizer
from machd.engine.tokenizer.template_renderer import RenderBounds, TemplateRenderer


@pytest.fixture(autouse=True, scope="module")
def _without_compilation() -> Iterator[None]:
    """Compute as the daemon does."""
    with computing_as_the_daemon():
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> TinyLlama:
    """A two-layer llama with random weights, saved in mlx-lm layout."""
    return TinyLlama.save(tmp_path / "tiny-llama")


class _KeptRenderer(TemplateRenderer):
    """A renderer whose process outlives the object that asked for it."""

    def close(self) -> None:
        """Keep the process for the next test."""

    def with_bounds(self, bounds: RenderBounds | None = None) -> TemplateRenderer:
        """The same renderer, under other bounds."""
        self._bounds = bounds or RenderBounds()
        return self


@pytest.fixture(scope="module")
def one_template_process() -> Iterator[None]:
    """Render the templates of a module's tests in one process: each takes a second to start."""
    renderer = _KeptRenderer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_abilities, "TemplateRenderer", renderer.with_bounds)
        patch.setattr(tokenizer, "TemplateRenderer", renderer.with_bounds)
        yield
    TemplateRenderer.close(renderer)


@pytest.fixture(scope="module")
def quick_inspections(one_template_process: None) -> Iterator[None]:  # noqa: ARG001 - its effect
    """One process for the templates of all inspections, and limits that no busy machine reaches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_abilities, "_RENDER_LIMIT_S", CEILING_S)
        patch.setattr(template_abilities, "_BUILD_LIMIT_S", CEILING_S)
        patch.setattr(inspection, "_BUILD_LIMIT_S", CEILING_S)
        yield
