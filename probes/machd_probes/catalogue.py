"""The catalogue of probes: mlx-lm's architectures, and the checks in the order in which they run."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

BATCHING_CHECKS = ("batch_parity", "window_overflow", "rope_positions", "sampling_isolation")
"""Checks that decide on continuous batching. They need the engine alone."""

FEATURE_CHECKS = (
    *BATCHING_CHECKS,
    *("state_snapshot", "cache_reuse", "trim", "batched_drafts"),
    *("chunked_prefill", "quantized_kv"),
)
"""Checks that decide on a feature, the most valuable first: after batching the prefix cache and speculation."""

STAND_IN_CHECKS = (*FEATURE_CHECKS, "expert_streaming", "adapters")
"""Checks of a small model of the same code. The last two copy the model, so they never run on a large one."""

CHECK_NAMES = (
    "without_cache",
    "alone",
    *STAND_IN_CHECKS,
    "memory_baseline",
    "mlx_lm_batch",
)
"""Every check: a module of ``machd_probes.checks`` with a function ``probe``."""

_MODEL_CLASSES = re.compile(r"^class (Model|ModelArgs)\b", re.MULTILINE)


def architecture_names() -> list[str]:
    """Every architecture of the installed mlx-lm, sorted: its modules with a class ``Model``.

    The modules are read, not imported: some fail to import, and importing takes seconds.
    """
    # The package alone: to find one inside of it, Python would import mlx-lm and mlx with it.
    spec = find_spec("mlx_lm")
    assert spec is not None, "mlx-lm is a dependency"
    folders = spec.submodule_search_locations or []
    paths = sorted(path for folder in folders for path in Path(folder, "models").glob("*.py"))
    return [path.stem for path in paths if _has_model(path)]


def _has_model(path: Path) -> bool:
    source = path.read_text(encoding="utf-8")
    if "Model" not in source:
        return False
    if len(set(_MODEL_CLASSES.findall(source))) == 2:  # nearly all, and parsing takes 3 ms
        return True
    names = {name for node in ast.parse(source).body for name in _defined(node)}
    return {"Model", "ModelArgs"} <= names


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return []
