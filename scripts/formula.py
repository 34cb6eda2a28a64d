#!/usr/bin/env python3
"""Print a Homebrew formula for a release of machd, for macOS on Apple silicon.

Every dependency is a wheel: mlx has no source archive, and the others would need Rust and an hour. Which wheels exist, and where, is
asked of the package index that pip is configured for; each one has to have a hash of the requirements file. So the formula names the
index's hosts and is attached to a release, not committed.

    scripts/formula.py --sdist dist/machd-0.1.0.tar.gz --repository https://forge.example.org/machd > machd.rb
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements" / "cpu.txt"
PYTHON = (3, 13)
SYSTEMS = {"sonoma": (14, 0), "sequoia": (15, 0), "tahoe": (26, 0)}
"""Versions of macOS by Homebrew's names, the oldest that mlx has wheels for first."""

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class FormulaError(Exception):
    """The formula cannot be written; the message says why, in one line."""


@dataclass(frozen=True, order=True)
class Wheel:
    """A wheel as a resource of the formula.

    Attributes:
        sha256: In hexadecimal digits.
    """

    name: str
    url: str
    sha256: str

    def resource(self, indent: str) -> str:
        """The block of the formula; ``:nounzip`` keeps the file as it is, under its own name."""
        lines = [
            f'resource "{self.name}" do',
            f'  url "{self.url}", using: :nounzip',
            f'  sha256 "{self.sha256}"',
            "end",
        ]
        return "".join(f"{indent}{line}\n" for line in lines)


def main() -> None:
    """Print the formula, or one line that says why there is none, and exit with 2."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--sdist",
        type=Path,
        required=True,
        help="machd's source archive, as attached to the release",
    )
    parser.add_argument(
        "--repository", required=True, help="URL of the repository, whose releases hold the archive"
    )
    parser.add_argument(
        "--requirements",
        type=Path,
        default=REQUIREMENTS,
        help="pinned dependencies (default: requirements/cpu.txt)",
    )
    arguments = parser.parse_args()
    try:
        packages = packages_of(arguments.requirements)
        pinned = pinned_hashes(arguments.requirements)
        wheels = {
            system: chosen_wheels(packages, tags_of(version), pinned)
            for system, version in SYSTEMS.items()
        }
        print(formula(arguments.sdist, arguments.repository.rstrip("/"), wheels), end="")
    except FormulaError as error:
        print(f"machd: {error}", file=sys.stderr)
        sys.exit(2)


def packages_of(requirements: Path) -> list[dict[str, Any]]:
    """Ask the index for every file of the pinned versions that a Mac needs: ``packages`` of a pylock.toml.

    Raises:
        FormulaError: uv is not here, or the index does not have them all.
    """
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is None:
        raise FormulaError("uv is not here: install it into this environment")
    exports = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "pip_settings.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    settings = dict(word.split("=", 1) for word in shlex.split(exports.stdout) if word != "export")
    with tempfile.TemporaryDirectory(prefix="machd-formula-") as folder:
        lock = Path(folder) / "pylock.toml"
        command = [
            uv,
            "pip",
            "compile",
            "--quiet",
            "--universal",
            "--no-deps",
            "--python-version",
            f"{PYTHON[0]}.{PYTHON[1]}",
        ]
        command += ["--format", "pylock.toml", "--output-file", str(lock), str(requirements)]
        result = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | settings, check=False
        )
        if result.returncode != 0:
            raise FormulaError(
                f"the package index does not have what is pinned: {' '.join(result.stderr.split())}"
            )
        packages: list[dict[str, Any]] = tomllib.loads(lock.read_text("utf-8"))["packages"]
    return [one for one in packages if is_for_a_mac(one.get("marker"))]


def is_for_a_mac(marker: str | None) -> bool:
    """Return True if a requirement with this marker counts on Apple silicon under ``PYTHON``."""
    version = f"{PYTHON[0]}.{PYTHON[1]}"
    environment = {
        "sys_platform": "darwin",
        "platform_system": "Darwin",
        "platform_machine": "arm64",
        "os_name": "posix",
    }
    environment |= {
        "python_version": version,
        "python_full_version": f"{version}.0",
        "implementation_name": "cpython",
    }
    return marker is None or Marker(marker).evaluate(
        environment | {"platform_python_implementation": "CPython"}
    )


def pinned_hashes(requirements: Path) -> frozenset[str]:
    """The SHA-256 hashes of a requirements file."""
    return frozenset(_HASH.findall(requirements.read_text("utf-8")))


def tags_of(macos: tuple[int, int]) -> list[Tag]:
    """The tags of wheels that run on a version of macOS, the best one first."""
    platforms = list(mac_platforms(macos, "arm64"))
    interpreter = f"cp{PYTHON[0]}{PYTHON[1]}"
    return [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, interpreter, platforms),
    ]


def chosen_wheels(
    packages: list[dict[str, Any]], tags: list[Tag], pinned: frozenset[str]
) -> list[Wheel]:
    """Choose the wheel of each package that fits best, in order of names.

    Raises:
        FormulaError: A package has none, or the index offers another file than the pinned one.
    """
    ranks = {tag: rank for rank, tag in enumerate(tags)}
    chosen = []
    for package in packages:
        fitting = []
        for file in package.get("wheels", []):
            name = str(file["url"]).rpartition("/")[2]
            found = [ranks[tag] for tag in parse_wheel_filename(name)[3] if tag in ranks]
            if found:
                fitting.append((min(found), file))
        if not fitting:
            raise FormulaError(
                f"{package['name']} {package.get('version')} has no wheel for Apple silicon and Python {PYTHON[0]}.{PYTHON[1]}"
            )
        file = min(fitting, key=lambda one: one[0])[1]
        wheel = Wheel(
            str(canonicalize_name(package["name"])), file["url"], file["hashes"]["sha256"]
        )
        if wheel.sha256 not in pinned:
            raise FormulaError(
                f"the package index offers {wheel.name} with a hash that is not pinned"
            )
        if not wheel.url.startswith(("https://", "http://")):
            raise FormulaError(
                f"{wheel.name} comes from a folder of this machine: leave it out of pip's settings for the formula"
            )
        chosen.append(wheel)
    return sorted(chosen)


def formula(sdist: Path, repository: str, wheels: dict[str, list[Wheel]]) -> str:
    """The text of ``machd.rb``.

    Args:
        sdist: Attached to the release ``vVERSION`` under its name.
        repository: URL of the repository.
        wheels: For each version of macOS, the oldest first.
    """
    version = parse_sdist_filename(sdist.name)[1]
    everywhere = set.intersection(*(set(some) for some in wheels.values()))
    oldest, *others = wheels
    blocks = []
    for system, some in wheels.items():
        own = "\n".join(wheel.resource("    ") for wheel in some if wheel not in everywhere)
        newest = " :or_newer" if others and system == others[-1] else ""
        if own:
            blocks.append(f"  on_{system}{newest} do\n{own}  end\n")
    blocks += [wheel.resource("  ") for wheel in sorted(everywhere)]
    return _FORMULA.format(
        repository=repository,
        url=f"{repository}/releases/download/v{version}/{sdist.name}",
        sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        oldest=oldest,
        python=f"{PYTHON[0]}.{PYTHON[1]}",
        resources="\n".join(blocks),
    )


_FORMULA = """\
# Written by scripts/formula.py of machd's repository.
class Machd < Formula
  include Language::Python::Virtualenv

  desc "OpenAI-compatible inference daemon for MLX"
  homepage "{repository}"
  url "{url}"
  sha256 "{sha256}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :{oldest}
  depends_on "python@{python}"

  # Wheels bring compiled modules whose headers have no room for the longer names that Homebrew would write.
  preserve_rpath

{resources}
  def install
    virtualenv_create(libexec, "python{python}", system_site_packages: false)
    # machd fetches the default model with pip.
    system libexec/"bin/python", "-m", "ensurepip"
    wheels = buildpath/"wheels"
    resources.each {{ |resource| resource.stage {{ wheels.install Dir["*.whl"] }} }}
    pip = [libexec/"bin/python", "-m", "pip", "install", "--no-index", "--no-deps"]
    system(*pip, *wheels.glob("*.whl"))
    system(*pip, "--no-build-isolation", buildpath)
    bin.install_symlink libexec/"bin/machd"
  end

  service do
    run [opt_bin/"machd", "serve"]
    environment_variables LME_LOGGING_FORMAT: "json"
    keep_alive successful_exit: false
    log_path var/"log/machd.log"
    error_log_path var/"log/machd.log"
    process_type :interactive
    stop_timeout 90
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/machd --version")
    (testpath/"machd.toml").write "[server]\\nport = #{{free_port}}\\n"
    assert_match "OK", shell_output("#{{bin}}/machd config check machd.toml")
  end
end
"""


if __name__ == "__main__":
    main()
