"""``scripts/setup`` refuses what it does not know, and installs as pip is configured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.programs.checkout import Checkout

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(name="checkout")
def _checkout(tmp_path: Path) -> Checkout:
    """A fresh checkout; its system packages are taken for installed."""
    return Checkout(ROOT, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "variables", "known"),
    [
        (["--visoin"], {}, ["--vision", "--dev", "--clients"]),
        (["--vision", "dev"], {}, ["--vision", "--dev", "--clients"]),
        (["--clients", "--dev"], {}, ["--clients"]),
        ([], {"BACKEND": "cuda"}, ["cpu", "cuda12", "cuda13"]),
        ([], {"PYTHON": "no-such-python"}, ["3.11", "no-such-python"]),
    ],
    ids=["a misspelt argument", "a second one", "clients and more", "a backend", "an interpreter"],
)
def test_what_is_unknown_is_refused_with_what_is_known(
    checkout: Checkout, arguments: list[str], variables: dict[str, str], known: list[str]
) -> None:
    """One line, exit code 2, and nothing is made."""
    result = checkout.setup(*arguments, **variables)

    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert all(one in result.stderr for one in known), result.stderr
    assert not (checkout.folder / ".venv").exists()


def test_another_interpreter_or_backend_than_the_environments_is_refused(
    checkout: Checkout, tmp_path: Path
) -> None:
    """Neither is changed in an environment that is there; the line says how to make it anew."""
    assert checkout.setup().returncode == 0
    another = tmp_path / "another-python"
    another.write_text("#!/bin/sh\ncase \"$2\" in *print*) echo '3.99.0 /another';; esac\n")
    another.chmod(0o755)

    for variables in ({"PYTHON": str(another)}, {"BACKEND": "cuda12"}):
        result = checkout.setup(**variables)
        assert result.returncode == 2
        assert "rm -r .venv" in result.stderr
    assert checkout.setup(PYTHON=sys.executable).returncode == 0


def test_pips_settings_reach_uv(checkout: Checkout, tmp_path: Path) -> None:
    """Uv reads none of pip's files and variables by itself."""
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://mirror.test/simple\nextra-index-url =\n  https://a.test/simple\n"
        "  https://b.test/simple\ncert = /etc/mirror.pem\nproxy = http://proxy.test:3128\n"
        "trusted-host = a.test\n  b.test\n"
    )
    result = checkout.setup(PIP_CONFIG_FILE=str(config), PIP_FIND_LINKS="/wheels")

    assert result.returncode == 0, result.stderr
    expected = {
        "UV_DEFAULT_INDEX": "https://mirror.test/simple",
        "UV_INDEX": "https://a.test/simple https://b.test/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/etc/mirror.pem",
        "ALL_PROXY": "http://proxy.test:3128",
        "UV_INSECURE_HOST": "a.test,b.test",
        "UV_FIND_LINKS": "/wheels",
    }
    assert expected.items() <= checkout.variables_of_uv().items()


def test_uvs_own_settings_are_kept(checkout: Checkout, tmp_path: Path) -> None:
    """A variable of uv's wins over pip's, and a file of uv's keeps all of pip's out."""
    pip = {"PIP_INDEX_URL": "https://mirror.test/simple"}
    own = "https://own.test/simple"
    assert checkout.setup(UV_DEFAULT_INDEX=own, **pip).returncode == 0
    assert checkout.variables_of_uv()["UV_DEFAULT_INDEX"] == own

    (tmp_path / ".config" / "uv").mkdir(parents=True)
    (tmp_path / ".config" / "uv" / "uv.toml").touch()
    (tmp_path / "record").unlink()
    assert checkout.setup("--vision", **pip).returncode == 0
    assert "UV_DEFAULT_INDEX" not in checkout.variables_of_uv()


@pytest.mark.parametrize(
    "said",
    [
        "error: Request failed\n  cause: dns error\n  cause: failed to lookup: Temporary failure in name resolution",
        "error: Request failed\n  cause: invalid peer certificate: UnknownIssuer",
    ],
)
def test_no_network_is_one_line(checkout: Checkout, said: str) -> None:
    """The script replaces uv's five lines of error, which name no remedy, with one line."""
    result = checkout.setup(UV_FAILS=said)

    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if not line.startswith("Installing")]
    assert len(lines) == 1
    assert "cannot reach the package index" in lines[0]
    assert said.rpartition(": ")[2] in lines[0]


def test_progress_is_shown_and_the_list_of_packages_is_not(checkout: Checkout) -> None:
    """A download of 442 MB says how far it is, on a terminal and in a pipe."""
    result = checkout.setup()

    assert "Prepared 63 packages" in result.stderr
    assert "numpy==" not in result.stderr


def test_several_parts_are_installed_together(checkout: Checkout) -> None:
    """Each argument counts, and each set of them is remembered by itself."""
    assert checkout.setup("--vision", "--dev").returncode == 0
    assert (checkout.folder / ".venv" / ".machd-cpu--vision--dev").is_file()
    assert "Installing" not in checkout.setup("--vision", "--dev").stderr


def test_make_help_names_every_target() -> None:
    """Each target that a person may call has a line."""
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    phony = makefile.partition(".PHONY:")[2].partition("\n")[0].split()

    shown = {line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ")}
    assert set(phony) <= shown
