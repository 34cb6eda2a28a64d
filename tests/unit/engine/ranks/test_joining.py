"""A process that finds out whether it is a rank, and refuses what ranks cannot do."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from machd.engine.ranks.joining import RankPlace, join, rank_place, refuse_with_ranks
from machd.errors import SettingsError, StartupError
from machd.settings.model import Settings


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        ({"MLX_RANK": "0"}, None),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "hosts"}, RankPlace(0, "ring")),
        ({"MLX_RANK": "3", "MLX_HOSTFILE": "hosts"}, RankPlace(3, "ring")),
        ({"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.1"}, RankPlace(1, "nccl")),
        ({"MLX_RANK": "1", "MLX_IBV_DEVICES": "devices"}, RankPlace(1, "jaccl")),
    ],
)
def test_a_rank_is_what_mlx_launch_says(environ: dict[str, str], place: RankPlace | None) -> None:
    """A process without its variables, and a single rank, compute alone."""
    assert rank_place(environ) == place


@pytest.mark.parametrize("environ", [{"MLX_RANK": "1"}, {"MLX_RANK": "x", "MLX_HOSTFILE": "hosts"}])
def test_half_of_the_variables_are_refused(environ: dict[str, str]) -> None:
    """A process that should be a rank and cannot find the others does not serve beside them."""
    with pytest.raises(StartupError, match=r"mlx\.launch"):
        rank_place(environ)


def test_settings_that_ranks_cannot_follow_are_refused_all_at_once() -> None:
    """Each with its reason."""
    settings = Settings.model_validate(
        {
            "cache": {"disk_dir": "/srv/blocks"},
            "experts": {"resident_gb": 1.0},
            "speculation": {"mode": "dflash", "draft_model": "/srv/draft"},
            "model": {"trust_remote_code": True},
        }
    )

    with pytest.raises(SettingsError) as refused:
        refuse_with_ranks(settings)

    assert [one.split(":")[0] for one in refused.value.problems] == [
        "experts.resident_gb",
        "cache.disk_dir",
        "speculation.mode",
        "model.trust_remote_code",
    ]
    refuse_with_ranks(Settings())


class _Alone:
    """A group of one rank."""

    def size(self) -> int:
        """One."""
        return 1


@pytest.mark.parametrize(
    ("backend", "failures", "attempts"),
    [("ring", 0, 1), ("ring", 2, 3), ("ring", 9, 3), ("nccl", 9, 1)],
)
def test_ranks_of_a_ring_try_again_to_join(
    monkeypatch: pytest.MonkeyPatch, backend: str, failures: int, attempts: int
) -> None:
    """A stranger may have taken a neighbour's place; after three attempts the process ends."""
    import mlx.core as mx  # noqa: PLC0415 - after the BLAS is chosen

    tried: list[str] = []

    def init(*, strict: bool, backend: str) -> _Alone:
        assert strict
        tried.append(backend)
        if len(tried) <= failures:
            raise RuntimeError("[ring] Couldn't connect")
        return _Alone()

    monkeypatch.setattr(mx.distributed, "init", init)
    with capture_logs() as lines:
        if failures < attempts:
            assert join(RankPlace(1, backend)) is None
        else:
            with pytest.raises(StartupError, match="nothing but ranks connects to their ports"):
                join(RankPlace(1, backend))
    assert tried == [backend] * attempts
    assert [one["attempt"] for one in lines] == list(range(1, attempts))
