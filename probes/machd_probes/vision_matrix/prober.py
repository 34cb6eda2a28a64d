"""Runs the checks of the vision matrix on a family's tiny checkpoint, in a worker process."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport
from machd.clock import Clock, SystemClock
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.safetensors_header import StoredTensor
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd_probes.finding import Finding
from machd_probes.subject import told
from machd_probes.vision_families import FAMILIES, Family, UnsupportedFamily, write_family
from machd_probes.vision_matrix.catalogue import CHECK_NAMES, SERVED
from machd_probes.vision_matrix.checks import CHECKS
from machd_probes.vision_matrix.subject import VisionSubject

_FIXED_TOWERS = {
    "phi3_v": ("mlx_vlm.models.phi3_v.vision", "VisionModel", "CLIP_VIT_LARGE_PATCH14_336_CONFIG"),
}
"""Module, class and attribute by which mlx-vlm fixes the size of a family's tower."""

_FIXED_TOWER_LAYERS = 3
"""Alike in all but their weights, as the layers of every tiny model."""

_TENSOR = (Path("model.safetensors"), StoredTensor(0, 4))


def probe_family(name: str, cache_directory: Path) -> ArchitectureReport:
    """Run every check on a family that is served with images; of another one, say why it is not.

    Args:
        name: Of the catalogue's.
        cache_directory: The user's, which holds the embedded model.
    """
    reason = text_only_reason(name)
    if reason:
        return ArchitectureReport(name, results=(ProbeResult(SERVED, Outcome.UNSUPPORTED, reason),))
    import_mlx_lm()
    with tempfile.TemporaryDirectory(prefix="machd-vision-") as directory, _few_layers(name):
        try:
            write_family(name, Path(directory), cache_directory)
            subject = VisionSubject(Path(directory))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a family's code does anything
            return _not_built(name, error)
        with subject:
            return probe_subject(name, subject)


@contextmanager
def _few_layers(name: str) -> Iterator[None]:
    """Give a tower whose size mlx-vlm fixes fewer layers, in this process: 24 took one core 8 s for each of 26 images."""
    if name not in _FIXED_TOWERS:
        yield
        return
    module, owner, attribute = _FIXED_TOWERS[name]
    tower = getattr(getattr(importlib.import_module(module), owner), attribute)
    layers, tower.num_hidden_layers = tower.num_hidden_layers, _FIXED_TOWER_LAYERS
    try:
        yield
    finally:
        tower.num_hidden_layers = layers


def text_only_reason(name: str) -> str:
    """Say why a family is served without images, in serving's own words; empty if it is served with them."""
    entry = FAMILIES[name]
    config = dict(entry.config) if isinstance(entry, Family) else {"vision_config": {"depth": 1}}
    checkpoint = Checkpoint(
        path=Path(name),
        config={"model_type": name, **config},
        weight_files=(),
        stored_bytes=4,
        tensors={"vision_tower.weight": _TENSOR},
        code_files=(),
    )
    if not checkpoint.takes_images:
        return checkpoint.vision_reason
    return f"not measured: {entry.reason}" if isinstance(entry, UnsupportedFamily) else ""


def probe_subject(
    name: str, subject: VisionSubject, checks: Iterable[str] = CHECK_NAMES
) -> ArchitectureReport:
    """Run checks on a family that is loaded."""
    clock = SystemClock()
    served = ProbeResult(SERVED, Outcome.PASSED)
    results = tuple(_run_check(subject, check, clock) for check in checks)
    description = subject.description
    return ArchitectureReport(name, description.cache, (served, *results), code=description.code)


def _run_check(subject: VisionSubject, name: str, clock: Clock) -> ProbeResult:
    started_s = clock.monotonic_s()
    try:
        finding = CHECKS[name](subject)
    except MemoryError as error:
        subject.engine.reset()
        finding = Finding(Outcome.ERRORED, told(error))
    except Exception as error:  # noqa: BLE001 - a model raises whatever it likes
        subject.engine.reset()
        finding = Finding(Outcome.FAILED, told(error))
    duration_s = clock.monotonic_s() - started_s
    return ProbeResult(name, finding.outcome, finding.detail, finding.evidence, duration_s)


def _not_built(name: str, error: BaseException) -> ArchitectureReport:
    problem = f"the tiny model {told(error)}"
    return ArchitectureReport(name, results=(ProbeResult(SERVED, Outcome.PASSED),), problem=problem)
