"""The page that follows a batch through the engine runs as it stands, and names functions that exist."""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from machd.engine.loading.loader import LoadedModel
from machd.engine.step.mlx_engine import MlxEngine

_PAGE = Path(__file__).parents[2] / "docs" / "internals" / "engine.md"


@pytest.fixture(name="engine")
def _engine(embedded_model: LoadedModel) -> Iterator[MlxEngine]:
    from machd.engine.assembly import make_engine  # noqa: PLC0415 - imports mlx
    from machd.engine.speculation.ngram import NgramProposer  # noqa: PLC0415 - imports mlx

    engine = make_engine(embedded_model, proposer=NgramProposer(), looks_ahead=False)
    yield engine
    engine.close()


def _watch(engine: MlxEngine) -> None:
    """Print the shapes of every forward pass."""
    model, passes = engine._model, engine._batch._passes
    packing = passes._packing

    def told(token_ids: Any, logits: Any) -> Any:
        print(f"forward {token_ids.shape} -> {logits.shape}")  # noqa: T201 - doctest reads it
        return logits

    engine._model = lambda token_ids, cache: told(token_ids, model(token_ids, cache=cache))
    passes._packing = replace(
        packing,
        forward=lambda token_ids, *others: told(token_ids, packing.forward(token_ids, *others)),
    )


def test_page_shows_what_the_engine_computes(engine: MlxEngine) -> None:
    """Every shape, token and outcome on the page is what the embedded model gives."""
    blocks = re.findall(r"```pycon\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"engine": engine, "watch": _watch}
    session = doctest.DocTestParser().get_doctest("\n".join(blocks), names, "engine.md", None, 0)
    report: list[str] = []
    failed, tried = doctest.DocTestRunner(verbose=False).run(session, out=report.append)
    assert tried > 15, "the page has a session"
    assert not failed, "".join(report)


def test_page_names_functions_that_exist() -> None:
    """Each `file.py:name` on the page is a function or method of engine/step/, or of engine/sampling/."""
    named = re.findall(r"`([\w/]+)\.py:([\w.]+)`", _PAGE.read_text(encoding="utf-8"))
    assert len(named) > 20, "the page links its lines to functions"
    for module, path in named:
        room = "sampling" if module == "sampler" else "step"
        found = importlib.import_module(f"machd.engine.{room}.{module.replace('/', '.')}")
        assert callable(reduce(getattr, path.split("."), found)), f"{module}.py:{path}"
