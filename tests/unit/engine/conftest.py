"""A tiny model for the engine's tests, made on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from polling import CEILING_S
from unit.engine.tiny_llama import TinyLlama

from machd.engine import inspection, template_abilities
from machd.engine.template_renderer import RenderBounds, TemplateRenderer


@pytest.fixture
def tiny(tmp_path: Path) -> TinyLlama:
    """A two-layer llama with random weights, saved in mlx-lm layout."""
    return TinyLlama.save(tmp_path / "tiny-llama")


@pytest.fixture(scope="module")
def quick_inspections() -> Iterator[None]:
    """One renderer's process for all inspections of a module, and limits that no busy machine reaches."""
    renderer = TemplateRenderer()
    close = renderer.close

    def shared(bounds: RenderBounds) -> TemplateRenderer:
        renderer._bounds = bounds
        return renderer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renderer, "close", lambda: None)
        patch.setattr(template_abilities, "TemplateRenderer", shared)
        patch.setattr(template_abilities, "_RENDER_LIMIT_S", CEILING_S)
        patch.setattr(template_abilities, "_BUILD_LIMIT_S", CEILING_S)
        patch.setattr(inspection, "_BUILD_LIMIT_S", CEILING_S)
        yield
    close()
