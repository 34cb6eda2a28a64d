"""``scripts/formula.py`` writes a Homebrew formula of pinned wheels, as the package index has them."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S
from support.programs.package_index import LoopbackIndex, write_wheel

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://forge.test/machd"

_RESOURCE = re.compile(r'resource "(\S+)" do\s+url "(\S+)", using: :nounzip\s+sha256 "(\w+)"\s+end')
_SYSTEM = re.compile(r"^  on_(\w+)( :or_newer)? do\n(.*?)^  end\n", re.MULTILINE | re.DOTALL)


class _Release:
    """A source archive, a requirements file and the index that has what it pins."""

    def __init__(self, folder: Path, wheels: Path, index: LoopbackIndex) -> None:
        self.index = index
        self._wheels = wheels
        self.folder = folder
        self.sdist = folder / "machd-1.2.0.tar.gz"
        self.sdist.write_bytes(b"the source archive")
        self.requirements = folder / "requirements.txt"
        self._hashes: dict[str, str] = {}

    def pin(self, requirement: str, *wheels: str) -> None:
        """Add a requirement to the file, with the hashes of its wheels, which the index gets."""
        made = {wheel: write_wheel(self._wheels, wheel) for wheel in wheels}
        self._hashes |= made
        hashes = "".join(f" \\\n    --hash=sha256:{one}" for one in made.values())
        with self.requirements.open("a") as file:
            file.write(f"{requirement}{hashes}\n")

    def formula(self) -> subprocess.CompletedProcess[str]:
        """Run the script with the index as the only one."""
        command = [sys.executable, str(ROOT / "scripts" / "formula.py"), "--sdist", str(self.sdist)]
        command += ["--repository", REPOSITORY, "--requirements", str(self.requirements)]
        cleared = {
            name: value for name, value in os.environ.items() if not re.match(r"PIP_|UV_", name)
        }
        variables = {
            "HOME": str(self.folder),
            "XDG_CONFIG_HOME": str(self.folder),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.index.url,
            "UV_CACHE_DIR": str(self.folder / "cache"),
        }
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=CEILING_S, env=cleared | variables,
        )  # fmt: skip

    def resource(self, wheel: str) -> tuple[str, str, str]:
        """Name, address and hash that the formula should have for a wheel."""
        name = wheel.partition("-")[0].replace("_", "-")
        return name, self.index.url.replace("/simple", f"/{wheel}"), self._hashes[wheel]


@pytest.fixture(name="release")
def _release(tmp_path: Path) -> Iterator[_Release]:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with LoopbackIndex(wheels) as index:
        yield _Release(tmp_path, wheels, index)


def test_a_formula_has_the_best_wheel_for_each_macos(release: _Release) -> None:
    """Wheels that depend on the version of macOS stand under that version, all others once, and Linux's are left out."""
    metal = [f"mlx_metal-1.0-py3-none-macosx_{one}_0_arm64.whl" for one in (14, 15, 26)]
    core = [f"mlx-1.0-cp313-cp313-macosx_{one}_0_arm64.whl" for one in (14, 26)]
    release.pin("mlx-metal==1.0 ; sys_platform == 'darwin'", *metal)
    release.pin("mlx==1.0", *core, "mlx-1.0-cp311-cp311-macosx_26_0_arm64.whl")
    release.pin(
        "mlx-cpu==1.0 ; sys_platform == 'linux'", "mlx_cpu-1.0-py3-none-manylinux_2_35_x86_64.whl"
    )
    release.pin("numpy==1.0 ; python_full_version < '3.12'", "numpy-1.0-py3-none-any.whl")
    release.pin("numpy==2.0 ; python_full_version >= '3.12'", "numpy-2.0-py3-none-any.whl")
    release.pin("Rusty==1.0", "rusty-1.0-cp39-abi3-macosx_11_0_arm64.whl", "rusty-1.0-cp39-abi3-macosx_11_0_x86_64.whl")  # fmt: skip

    result = release.formula()

    assert result.returncode == 0, result.stderr
    own = {
        system: (newer, set(_RESOURCE.findall(block)))
        for system, newer, block in _SYSTEM.findall(result.stdout)
    }
    assert own == {
        "sonoma": ("", {release.resource(metal[0]), release.resource(core[0])}),
        "sequoia": ("", {release.resource(metal[1]), release.resource(core[0])}),
        "tahoe": (" :or_newer", {release.resource(metal[2]), release.resource(core[1])}),
    }
    assert set(_RESOURCE.findall(_SYSTEM.sub("", result.stdout))) == {
        release.resource("numpy-2.0-py3-none-any.whl"),
        release.resource("rusty-1.0-cp39-abi3-macosx_11_0_arm64.whl"),
    }


def test_a_formula_is_of_the_releases_archive_and_runs_as_a_service(release: _Release) -> None:
    """Address and hash are those of the archive that is attached to the release; the service runs the installed machd."""
    release.pin("pure==1.0", "pure-1.0-py3-none-any.whl")

    text = release.formula().stdout

    assert f'url "{REPOSITORY}/releases/download/v1.2.0/machd-1.2.0.tar.gz"' in text
    assert f'sha256 "{hashlib.sha256(release.sdist.read_bytes()).hexdigest()}"' in text
    assert 'service do\n    run [opt_bin/"machd", "serve"]\n' in text
    assert _SYSTEM.findall(text) == []
    # Every block is closed: `do` and `def` are the ones that a formula has, beside its class.
    assert len(re.findall(r"^\s*(?:class|def) |\bdo$", text, re.MULTILINE)) == len(
        re.findall(r"^\s*end$", text, re.MULTILINE)
    )


def test_a_formula_is_refused_where_a_package_has_no_wheel_for_a_mac(release: _Release) -> None:
    """One line names the package, and no formula is printed."""
    release.pin("pure==1.0", "pure-1.0-py3-none-any.whl")
    release.pin("other==1.0", "other-1.0-cp313-cp313-manylinux_2_35_x86_64.whl")

    result = release.formula()

    assert (result.returncode, result.stdout) == (2, "")
    assert "other" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_formula_is_refused_where_a_hash_is_not_the_pinned_one(release: _Release) -> None:
    """A wheel that the index has and the requirements do not pin is never named."""
    release.pin("pure==1.0", "pure-1.0-py3-none-any.whl")
    pinned = release.requirements.read_text()
    release.requirements.write_text(re.sub("sha256:.*", f"sha256:{'0' * 64}", pinned))

    result = release.formula()

    assert (result.returncode, result.stdout) == (2, "")
    assert "pure" in result.stderr
    assert result.stderr.count("\n") == 1
