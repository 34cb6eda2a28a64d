"""The release workflow, the notes it publishes, the citation and the forms of issues."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

import machd
from machd.cli.commands import command_line

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))

_PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}")
_COMMAND = re.compile(r"`machd ([^`]+)`")


def _workflow() -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    return loaded


def _jobs() -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = _workflow()["jobs"]
    return jobs


def _commands(job: str) -> str:
    return "\n".join(step.get("run", "") for step in _jobs()[job]["steps"])


def _needed_by(job: str) -> set[str]:
    """The jobs that have to succeed before this one starts."""
    needs = _jobs()[job].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(_needed_by(one) for one in direct))


def test_only_a_tag_of_a_version_starts_a_release() -> None:
    """Nothing else than a pushed tag that begins with v starts the workflow."""
    # YAML reads the key `on` as true.
    assert _workflow()[True] == {"push": {"tags": ["v*"]}}


def test_an_action_is_pinned_by_the_hash_of_its_commit() -> None:
    """Each action is named by a whole commit hash, which nobody can move as they can a tag."""
    used = [step["uses"] for job in _jobs().values() for step in job["steps"] if "uses" in step]
    assert used
    assert [one for one in used if not _PINNED.fullmatch(one)] == []


def test_a_job_may_write_only_what_it_publishes() -> None:
    """Permissions default to none; one job each writes the release, the attestation and asks for the index's trust."""
    assert _workflow()["permissions"] == {}
    written = {
        name: {key for key, value in job["permissions"].items() if value == "write"}
        for name, job in _jobs().items()
    }
    assert {name: keys for name, keys in written.items() if keys} == {
        "provenance": {"attestations", "id-token"},
        "publish": {"id-token"},
        "release": {"contents"},
    }


def test_a_job_that_may_write_runs_no_code_of_the_checkout() -> None:
    """Jobs that can publish get files of earlier jobs; they check out and install nothing."""
    for job in ("provenance", "publish", "release"):
        assert not any("checkout" in step.get("uses", "") for step in _jobs()[job]["steps"])
        assert "pip" not in _commands(job)


def test_the_built_wheels_are_tested_before_they_are_published() -> None:
    """The tests run on the wheels that the build left, and nothing is published unless they pass."""
    assert {"notes", "build", "test", "sbom", "provenance"} <= _needed_by("publish")
    assert "publish" in _needed_by("release")
    commands = _commands("test")
    assert "--no-index --find-links dist machd machd-native" in commands
    assert commands.index("--find-links dist") < commands.index("pytest")
    assert "--editable" not in commands


def test_tools_of_a_release_are_pinned_by_hash() -> None:
    """Whatever a job installs comes from a file of requirements with hashes, or from the build."""
    for job in _jobs():
        for line in _commands(job).splitlines():
            if "pip " in line and " install " in line:
                assert "--require-hashes" in line or "--no-index" in line, line
            for file in re.findall(r"requirements/[\w.-]+\.txt", line):
                assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("job", sorted(_jobs()))
def test_commands_of_a_job_are_a_shells(job: str) -> None:
    """Bash can read what a job runs."""
    subprocess.run(["bash", "-n"], input=_commands(job), text=True, check=True)


def test_the_citation_is_of_this_version() -> None:
    """CITATION.cff has the keys that its format asks for, and the version of the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == machd.__version__
    assert citation["license"] == "Apache-2.0"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_asks_for_versions_and_a_report(form: Path) -> None:
    """Each form requires the versions, asks for a report, and names commands and options that exist."""
    fields = {
        field["id"]: field
        for field in yaml.safe_load(form.read_text("utf-8"))["body"]
        if "id" in field
    }
    assert "machd version --json" in fields["version"]["attributes"]["label"]
    assert fields["version"]["validations"] == {"required": True}
    assert "machd bench MODEL --report DIR" in fields["report"]["attributes"]["label"]
    for words in _COMMAND.findall(form.read_text("utf-8")):
        command: click.Command | None = command_line
        context = click.Context(command_line)
        for word in words.split():
            if word.startswith("--"):
                assert command is not None
                assert any(word in option.opts for option in command.params), words
            elif word.islower() and isinstance(command, click.Group):
                command = command.get_command(context, word)
                assert command is not None, words


@pytest.fixture(name="checkout")
def _checkout(tmp_path: Path) -> Path:
    """What scripts/release-notes reads, for version 1.2.0."""
    for folder in ("scripts", "daemon/machd", "native"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy2(ROOT / "scripts" / "release-notes", tmp_path / "scripts")
    (tmp_path / "daemon/machd/__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "native/pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "pyproject.toml").write_text('cpu = [\n  "machd-native==1.2.0; marker",\n]\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.1.0\nversion: 1.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n- Later.\n\n## 1.2.0 - 2026-11-28\n\n### Added\n\n- This.\n\n"
        "## 1.2 - 2025-01-01\n\n- Older.\n"
    )
    return tmp_path


def _notes(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(checkout / "scripts" / "release-notes"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", ["1.2.0", "v1.2.0"])
def test_notes_are_the_versions_section_of_the_changelog(checkout: Path, version: str) -> None:
    """The notes are the lines between the version's heading and the next one."""
    result = _notes(checkout, version)
    assert (result.returncode, result.stdout) == (0, "### Added\n\n- This.\n"), result.stderr


@pytest.mark.parametrize(
    ("file", "text", "arguments", "named"),
    [
        ("CHANGELOG.md", "## Unreleased\n\n- This.\n", ["v1.2.0"], "CHANGELOG.md"),
        ("CHANGELOG.md", "## 1.2.0\n\n## 1.1.0\n\n- This.\n", ["v1.2.0"], "CHANGELOG.md"),
        ("CHANGELOG.md", "## 1.2.00\n\n- This.\n", ["v1.2.0"], "CHANGELOG.md"),
        ("daemon/machd/__init__.py", '__version__ = "1.1.0"\n', ["v1.2.0"], "1.1.0"),
        ("daemon/machd/__init__.py", "", ["v1.2.0"], "no version"),
        ("native/pyproject.toml", 'version = "1.1.0"\n', ["v1.2.0"], "native/pyproject.toml"),
        ("pyproject.toml", 'cpu = ["machd-native==1.1.0"]\n', ["v1.2.0"], "pyproject.toml"),
        ("CITATION.cff", "version: 1.1.0\n", ["v1.2.0"], "CITATION.cff"),
        ("CHANGELOG.md", "", ["v1.2"], "v1.2"),
        ("CHANGELOG.md", "", [], "VERSION"),
    ],
    ids=[
        "unreleased",
        "empty",
        "another",
        "package",
        "no package",
        "kernels",
        "extra",
        "citation",
        "none",
        "no argument",
    ],
)
def test_a_release_is_refused_where_versions_disagree(
    checkout: Path, file: str, text: str, arguments: list[str], named: str
) -> None:
    """One line names what disagrees, nothing is printed as notes, and the exit code is 2."""
    (checkout / file).write_text(text)
    result = _notes(checkout, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert named in result.stderr
