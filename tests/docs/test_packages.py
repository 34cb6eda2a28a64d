"""Contents and dependencies of the source distribution and the wheel."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S

ROOT = Path(__file__).resolve().parents[2]
_FAKES = ("faker", "polyfactory")
"""Litestar asks for them, to make examples for pages that machd does not have."""

_WITHOUT_FAKES = f"""
import sys
sys.modules.update(dict.fromkeys({_FAKES}))
import httpx
from support.daemon.running_daemon import RunningDaemon
from support.engines.fake_engine import FakeEngine
with RunningDaemon(FakeEngine) as daemon:
    assert httpx.get(daemon.url + "/openapi.json").json()["openapi"]
    assert httpx.get(daemon.url + "/v1/models").json()["data"]
"""


def _run(*arguments: str) -> None:
    environ = {"PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both."""
    folder = tmp_path_factory.mktemp("built")
    _run("-m", "hatchling", "build", "-d", str(folder))
    return folder


def test_the_source_distribution_holds_what_it_names(built: Path) -> None:
    """A folder of tests that has the name of one that is included stays out."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        parts = [name.split("/") for name in archive.getnames()]

    folders = {part[1] for part in parts if len(part) > 2}
    assert folders == {"config", "daemon", "docs", "probes", "systemd"}


def test_every_top_level_package_has_the_projects_name(built: Path) -> None:
    """No other distribution installs packages of these names."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}

    assert {name for name in names if not name.startswith("machd")} == set()


def test_the_wheel_brings_the_manual_page(built: Path) -> None:
    """It lies where an installer puts pages that man finds beside programs."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith("data/share/man/man1/machd.1")]
        assert archive.read(name) == (ROOT / "docs" / "man" / "machd.1").read_bytes()


def test_the_extra_for_the_cpu_names_the_kernels_of_this_checkout() -> None:
    """Both are released together; requirements/ leave the kernels to scripts/native, which builds them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    native = tomllib.loads((ROOT / "native" / "pyproject.toml").read_text("utf-8"))["project"]
    (named,) = [one for one in project["optional-dependencies"]["cpu"] if "native" in one]
    assert named.partition(";")[0] == f"{native['name']}=={native['version']}"
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        assert native["name"] not in path.read_text("utf-8"), path.name


def test_serving_needs_nothing_that_makes_data_up() -> None:
    """The pinned dependencies have no faker, and a daemon runs without it."""
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        pinned = {line.partition("==")[0] for line in path.read_text("utf-8").splitlines()}
        assert not pinned & set(_FAKES), path.name
    _run("-c", _WITHOUT_FAKES)
