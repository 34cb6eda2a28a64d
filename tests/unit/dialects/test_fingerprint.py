"""The fingerprint changes with whatever could change the text, and with nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.engines.fake_engine import FakeEngine

from machd.capabilities.versions import Versions
from machd.dialects.generation import system_fingerprint

_MODEL = FakeEngine().model
_VERSIONS = Versions(machd="1", mlx="2", mlx_lm="3")


def test_equal_facts_have_equal_fingerprints() -> None:
    """Two daemons of one kind say the same, whenever their weights were written."""
    other = replace(_MODEL, created_unix_s=99)
    assert system_fingerprint(_MODEL, _VERSIONS) == system_fingerprint(other, _VERSIONS)
    assert system_fingerprint(_MODEL, _VERSIONS).startswith("fp_")


@pytest.mark.parametrize("field", ["model_id", "dtype", "quantization", "backend", "blas"])
def test_another_model_has_another_fingerprint(field: str) -> None:
    """Each fact about the weights and what computes them counts."""
    changed: Any = {field: "other"}
    other = replace(_MODEL, **changed)
    assert system_fingerprint(_MODEL, _VERSIONS) != system_fingerprint(other, _VERSIONS)


@pytest.mark.parametrize("field", ["machd", "mlx", "mlx_lm"])
def test_other_software_has_another_fingerprint(field: str) -> None:
    """Each version counts."""
    other = msgspec.structs.replace(_VERSIONS, **{field: "9"})
    assert system_fingerprint(_MODEL, _VERSIONS) != system_fingerprint(_MODEL, other)
