"""A process finds out that it is a rank, and joins the others. Imports mlx only to join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from machd.errors import SettingsError, StartupError
from machd.settings.model import Settings

if TYPE_CHECKING:
    from machd.engine.ranks.rank_group import RankGroup

_RANK = "MLX_RANK"
"""Set by mlx.launch for every backend, and by whoever starts the ranks of a group alone."""

_RING_ATTEMPTS = 3
"""Attempts to connect the ranks over sockets that anybody can connect to."""

_BACKENDS = {"MLX_IBV_DEVICES": "jaccl", "NCCL_HOST_IP": "nccl", "MLX_HOSTFILE": "ring"}
"""Which variable of mlx.distributed says that which of its backends connects the ranks."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A process's place among ranks, before they are connected."""

    rank: int
    backend: str

    @property
    def leads(self) -> bool:
        """True for the rank that serves."""
        return self.rank == 0


def rank_place(environ: Mapping[str, str]) -> RankPlace | None:
    """Return this process's place; None for a process that computes alone.

    Raises:
        StartupError: The variables of mlx.distributed contradict each other.
    """
    value = environ.get(_RANK)
    if value is None:
        return None
    backend = next((name for variable, name in _BACKENDS.items() if environ.get(variable)), None)
    if backend is None:
        if value == "0":
            return None  # mlx.launch -n 1
        known = ", ".join(_BACKENDS)
        raise StartupError(f"{_RANK} is set and none of {known} is; start ranks with mlx.launch")
    if not value.isdecimal():
        raise StartupError(f"{_RANK} has to be a number; start ranks with mlx.launch")
    return RankPlace(int(value), backend)


def refuse_with_ranks(settings: Settings) -> None:
    """Refuse settings that several ranks cannot follow.

    Raises:
        SettingsError: With a line for each of them.
    """
    has_disk_tier = settings.cache.prefix and settings.cache.disk_dir is not None
    refused = {
        "experts.resident_gb: experts on disk are read as a rank's own router asks": (
            settings.experts.resident_gb is not None
        ),
        "cache.disk_dir: a block that one rank cannot read back would be missing on that rank alone": (
            has_disk_tier
        ),
        "speculation.mode: dflash reads the hidden states of all layers": (
            settings.speculation.mode == "dflash"
        ),
        "model.trust_remote_code: machd knows how to cut mlx-lm's own models alone": (
            settings.model.trust_remote_code
        ),
    }
    problems = [
        f"{problem}; leave it out where ranks share a model"
        for problem, is_asked in refused.items()
        if is_asked
    ]
    if problems:
        raise SettingsError(problems)


def join(place: RankPlace) -> RankGroup | None:
    """Connect to the other ranks, which takes until all are there; None if there is no other.

    The ring takes the first connection for that of its neighbour. If a stranger's comes before, each rank
    gives up after half a minute, and tries again.

    Raises:
        StartupError: They cannot be reached.
    """
    import mlx.core as mx  # noqa: PLC0415 - after the BLAS is chosen

    from machd.engine.ranks.rank_group import RankGroup  # noqa: PLC0415 - imports mlx

    attempts = _RING_ATTEMPTS if place.backend == "ring" else 1
    for attempt in range(1, attempts + 1):
        try:
            group = mx.distributed.init(strict=True, backend=place.backend)
        except RuntimeError as error:
            if attempt == attempts:
                raise StartupError(
                    f"rank {place.rank} cannot reach the others over {place.backend}: {error}; check the "
                    "host file of mlx.launch, that every rank was started, and that nothing but ranks "
                    "connects to their ports"
                ) from error
            structlog.get_logger("machd.engine").warning(
                "ranks.not_joined", rank=place.rank, attempt=attempt, cause=str(error)
            )
        else:
            return RankGroup(group) if group.size() > 1 else None
    raise AssertionError("the last attempt returns or raises")
