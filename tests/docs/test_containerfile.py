"""The image: its arguments are the extras, its sources exist, and it installs only what is pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from machd.settings.keys import setting_keys

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
# Continued lines are one instruction.
CONTAINERFILE = (ROOT / "Containerfile").read_text("utf-8").replace("\\\n", " ")
INSTRUCTIONS = [line for line in CONTAINERFILE.splitlines() if line and not line.startswith("#")]

_BACKEND = re.compile(r"mlx\[(\w+)\]")


def _backends() -> set[str]:
    """Extras that bring MLX for a backend."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {
        extra
        for extra, requirements in project["optional-dependencies"].items()
        if any(_BACKEND.match(one) for one in requirements)
    }


def test_backends_of_the_image_are_the_extras() -> None:
    """The comment of BACKEND names the extras that bring a backend, each with a file of requirements; cpu is the default."""
    comment = re.search(r"# (.*): a file of requirements/\.\nARG BACKEND=cpu\n", CONTAINERFILE)
    assert comment is not None
    assert set(re.split(r", | or ", comment[1])) == _backends()
    for backend in _backends():
        assert (ROOT / "requirements" / f"{backend}.txt").is_file()
    assert "requirements/${BACKEND}.txt" in CONTAINERFILE


def test_an_image_installs_only_what_is_pinned() -> None:
    """Python packages are checked against hashes or were built in the image; each stage begins at the same base."""
    installs = re.findall(r"pip (?:install|wheel) [^&;]*", CONTAINERFILE)
    assert len(installs) == 5
    assert [
        one for one in installs if "--require-hashes" not in one and "--no-index" not in one
    ] == []
    assert {line.split()[1] for line in INSTRUCTIONS if line.startswith("FROM")} == {
        "${BASE}",
        "dependencies",
    }


def test_sources_of_the_image_reach_the_build() -> None:
    """The sources of the wheels and the image pass .containerignore, which keeps out everything else."""
    lines = (ROOT / ".containerignore").read_text("utf-8").splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    sources = {*wheel["packages"], *wheel.get("shared-data", {}), project["project"]["readme"]}
    sources |= {"LICENSE", "pyproject.toml", "native/CMakeLists.txt", "requirements/cpu.txt"}

    assert "*" in lines
    assert [one for one in sources if not any(one == to or one.startswith(f"{to}/") for to in let_through)] == []  # fmt: skip


def test_settings_of_the_image_exist_and_keep_it_closed_without_keys() -> None:
    """Variables that the image sets are machd's; it listens for other machines and names a key file."""
    variables = dict(re.findall(r"\b(LME_\w+)=(\S+)", CONTAINERFILE))
    assert set(variables) <= {name for key in setting_keys() for name in key.environment_names}
    assert variables["LME_SERVER_HOST"] == "0.0.0.0"
    assert variables["LME_AUTH_API_KEYS_FILE"].startswith("/run/secrets/")
    assert f"EXPOSE {variables['LME_SERVER_PORT']}" in INSTRUCTIONS


def test_user_of_the_image_is_the_pods() -> None:
    """The image runs as the user that the example for Kubernetes asks for, who owns the volume."""
    text = (ROOT / "config" / "scale" / "kubernetes.yaml").read_text("utf-8")
    pod = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Deployment")
    user = pod["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}" in INSTRUCTIONS
    assert f"--uid {user} " in CONTAINERFILE
    assert "chown -R machd:machd /var/cache/machd" in CONTAINERFILE
