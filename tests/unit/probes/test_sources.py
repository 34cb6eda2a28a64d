"""Digests of the code that measures and computes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from machd_probes.sources import (
    KeptSources,
    encoder_sources_digest,
    known_sources_digest,
    sources_digest,
)


def test_the_digest_follows_the_code(tmp_path: Path) -> None:
    """Another content, another name and text that moves between files all change it."""
    digests: set[str] = set()
    for files in (
        {"a.py": "1", "b.py": "2"},
        {"a.py": "12", "b.py": ""},
        {"a.py": "1", "c.py": "2"},
        {"a.py": "1", "b.py": "2", "c.toml": ""},
    ):
        root = tmp_path / str(len(digests)) / "root"
        root.mkdir(parents=True)
        for name, text in files.items():
            (root / name).write_text(text, "utf-8")
        (root / "a.pyc").write_text(str(files), "utf-8")
        digests.add(sources_digest((root,)))

    assert len(digests) == 4


def test_the_digest_is_the_same_elsewhere(tmp_path: Path) -> None:
    """Where the code is installed and what was compiled of it have no part in it."""
    for place in ("one", "two"):
        (tmp_path / place / "root").mkdir(parents=True)
        (tmp_path / place / "root" / "a.py").write_text("1", "utf-8")
    (tmp_path / "two" / "root" / "a.pyc").write_bytes(b"compiled")

    assert sources_digest((tmp_path / "one" / "root",)) == sources_digest(
        (tmp_path / "two" / "root",)
    )


@pytest.mark.parametrize(
    ("name", "counts_for_encoders", "counts_for_architectures"),
    [
        ("engine/encoding/pooling.py", True, False),
        ("engine/kernels/native_bert.py", True, False),
        ("engine/protocol/encoder.py", True, False),
        ("engine/loading/placing/whole.py", True, True),
        ("engine/encoding/inspection.py", False, False),
        ("engine/kernels/native_llama.py", False, True),
        ("engine/step/mlx_engine.py", False, True),
        ("engine/loading/reranker.py", False, False),
    ],
)
def test_encoders_and_architectures_are_measured_apart(
    name: str, *, counts_for_encoders: bool, counts_for_architectures: bool, tmp_path: Path
) -> None:
    """A change to encoders alone leaves the figures of architectures that generate as they are, and the other way round."""
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    roots = (tmp_path / "engine",)
    digests = []
    for text in ("1", "2"):
        path.write_text(text, "utf-8")
        digests.append((encoder_sources_digest(roots), sources_digest(roots)))
    (of_encoders, of_architectures), (encoders_then, architectures_then) = digests
    assert (of_encoders != encoders_then) is counts_for_encoders
    assert (of_architectures != architectures_then) is counts_for_architectures


def test_what_another_python_writes_down_has_no_part_in_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that it knows besides, empty or without a value, changes nothing; with a value it is code."""
    (tmp_path / "a.py").write_text("def zero():\n    return 0\n", "utf-8")
    here = sources_digest((tmp_path,))
    monkeypatch.setattr(ast.FunctionDef, "_fields", (*ast.FunctionDef._fields, "parts"))
    for parts, is_same in (([], True), (None, True), (0, True), ([ast.Name("T")], False)):
        monkeypatch.setattr(ast.FunctionDef, "parts", parts, raising=False)
        assert (sources_digest((tmp_path,)) == here) is is_same


@pytest.mark.parametrize("value", ["None", "False", "''", "()", "0.0", "1"])
def test_a_constant_that_says_little_is_code(value: str, tmp_path: Path) -> None:
    """Zero and what else is false are told apart, although fields that say nothing do not count."""
    code = tmp_path / "a.py"
    code.write_text("x = 0", "utf-8")
    zero = sources_digest((tmp_path,))
    code.write_text(f"x = {value}", "utf-8")
    assert sources_digest((tmp_path,)) != zero


def test_a_kept_digest_counts_where_the_files_are_the_same_to_the_byte(tmp_path: Path) -> None:
    """With another comment the digest is worked out and the same; with other code it is another one."""
    code = tmp_path / "a.py"
    code.write_text("x = 1  # one\n", "utf-8")
    first = KeptSources.of((tmp_path,))
    kept = KeptSources(first.bytes_digest, "kept")
    assert first.code_digest == sources_digest((tmp_path,))
    assert known_sources_digest(kept, (tmp_path,)) == "kept"
    assert known_sources_digest(None, (tmp_path,)) == first.code_digest
    for text, is_same in (
        ("x = 1  # uno\n", True),
        ('"""Says."""\nx = 1\n', True),
        ("x = 2  # one\n", False),
    ):
        code.write_text(text, "utf-8")
        found = known_sources_digest(kept, (tmp_path,))
        assert found == sources_digest((tmp_path,))
        assert (found == first.code_digest) is is_same


def test_a_start_need_not_work_its_digest_out() -> None:
    """The digest that comes with machd is of these files; else run `make docs`."""
    assert KeptSources.kept() == KeptSources.of()
