"""How this installation is called, and how it is extended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from machd import installed
from machd.installed import command_name, how_to_install


@pytest.fixture(name="environment")
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a checkout, with machd in it, and the checkout as current directory."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("machd", "python"):
        (programs / name).touch(mode=0o755)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "vision.txt").touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup").touch()
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(installed, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(installed, "_SETUP", tmp_path / "scripts" / "setup")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return programs


def test_machd_is_called_by_its_path_unless_it_is_on_the_path(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of the banner can paste the command as it stands."""
    assert command_name() == ".venv/bin/machd"
    monkeypatch.chdir("/")
    assert command_name() == str(environment / "machd")
    monkeypatch.setenv("PATH", str(environment))
    assert command_name() == "machd"


def test_another_machd_on_the_path_is_not_taken_for_this_one(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name alone would start the other one."""
    (tmp_path / "machd").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.is_dir()
    assert command_name() == ".venv/bin/machd"


@pytest.mark.usefixtures("environment")
def test_a_checkout_names_its_own_script_for_what_it_pins() -> None:
    """The extra has a file of pinned versions, which the script installs."""
    assert how_to_install("vision") == "scripts/setup --vision"


def test_an_installed_package_names_the_packages_of_an_extra(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index may not know machd, which may have come from a file; the packages of its extras it knows."""
    monkeypatch.setattr(sys, "prefix", "/opt/machd")
    assert environment.is_dir()
    told = how_to_install("vision")
    assert "machd[" not in told
    assert "pip install" in told
    assert "mlx-vlm==" in told
    assert "'opentelemetry-sdk>=" in how_to_install("otel")
