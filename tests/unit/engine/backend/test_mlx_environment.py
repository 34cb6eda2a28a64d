"""mlx finds a private directory and exact float32 in the environment."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from machd.engine.backend.mlx_environment import set_mlx_environment


@pytest.fixture(autouse=True)
def _other_tests_keep_their_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)


def test_compiled_code_lies_in_a_private_directory(tmp_path: Path) -> None:
    """The directory for temporary files is below the user's cache, and ours alone."""
    environ: dict[str, str] = {}
    set_mlx_environment(environ, tmp_path / "cache")
    directory = Path(environ["TMPDIR"])
    assert directory.is_relative_to(tmp_path / "cache")
    assert stat.S_IMODE(directory.stat().st_mode) == stat.S_IRWXU
    assert directory.stat().st_uid == os.geteuid()


@pytest.mark.parametrize(("given", "expected"), [(None, "0"), ("1", "1"), ("0", "0")])
def test_float32_is_float32_unless_the_operator_wants_tf32(
    tmp_path: Path, given: str | None, expected: str
) -> None:
    """A row's answer would depend on its company otherwise; what the operator has set stands."""
    environ = {} if given is None else {"MLX_ENABLE_TF32": given}
    set_mlx_environment(environ, tmp_path)
    assert environ["MLX_ENABLE_TF32"] == expected
