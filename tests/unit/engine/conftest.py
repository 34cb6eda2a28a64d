"""What the engine's tests share: a tiny model, and one process for chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.engine.tiny_llama import TinyLlama

from machd.engine.template_renderer import RenderBounds, TemplateRenderer


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
    """Render the templates of all tests of a module in one process: each one takes a second to start."""
    renderer = _KeptRenderer()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("template_abilities", "tokenizer"):
            patch.setattr(f"machd.engine.{module}.TemplateRenderer", renderer.with_bounds)
        yield
    TemplateRenderer.close(renderer)
