"""``machd check --fits``: several models in one memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from unit.engine.tiny_llama import TinyLlama

from machd.cli.check import check


@pytest.fixture(name="tiny")
def _tiny(tmp_path: Path) -> str:
    TinyLlama.save(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(check, ["--fits", *arguments])


def _fit(tiny: str, tmp_path: Path, memory_gb: str) -> tuple[dict[str, Any], int]:
    path = tmp_path / "machd.toml"
    path.write_text(
        f'[models]\nmemory_gb = {memory_gb}\n[models.a]\npath = "{tiny}"\n'
        f'[models.b]\npath = "{tiny}"\nmodel.max_context_tokens = 16\n'
    )
    result = _run("a", "b", tiny, "--json", "--config", str(path))
    return dict(json.loads(result.stdout)), result.exit_code


def test_models_that_fit_together_exit_with_0(tiny: str, tmp_path: Path) -> None:
    """The sum of the shares is compared with models.memory_gb; a table's own context counts for its KV cache."""
    fit, code = _fit(tiny, tmp_path, "1.0")
    assert (fit["verdict"], code) == ("fits", 0)
    assert [one["model"] for one in fit["models"]] == ["a", "b", tiny]
    assert fit["total_bytes"] == sum(one["total_bytes"] for one in fit["models"])
    assert fit["budget_bytes"] == 1_000_000_000
    for one in fit["models"]:
        parts = one["weights_bytes"] + one["working_bytes"] + one["kv_bytes"]
        assert one["total_bytes"] == parts


def test_what_a_table_sets_of_keys_and_values_is_counted_as_it_is_reserved(
    tiny: str, tmp_path: Path
) -> None:
    """A KV budget of the table's is more than one context; a prefix cache of a set size is working memory."""
    path = tmp_path / "machd.toml"
    path.write_text(
        f'[continuous_batching]\nkv_budget_gb = 0.02\n[models.a]\npath = "{tiny}"\n[models.b]\npath = "{tiny}"\n'
        "continuous_batching.kv_budget_gb = 0.02\ncache.memory_mb = 7\n"
    )
    result = _run("a", "b", "--json", "--config", str(path))
    a, b = json.loads(result.stdout)["models"]
    assert a["kv_bytes"] < b["kv_bytes"] == 20_000_000
    assert b["working_bytes"] == a["working_bytes"] + 7_000_000
    assert b["total_bytes"] == b["weights_bytes"] + b["working_bytes"] + b["kv_bytes"]


def test_models_that_take_turns_exit_with_1(tiny: str, tmp_path: Path) -> None:
    """Each fits alone, all do not."""
    fit, _ = _fit(tiny, tmp_path, "1.0")
    largest = max(one["total_bytes"] for one in fit["models"])
    fit, code = _fit(tiny, tmp_path, str(max(0.001, largest * 1.5 / 1e9)))
    assert (fit["verdict"], code) == ("tight", 1)


def test_a_model_that_can_never_be_loaded_is_named(tiny: str, tmp_path: Path) -> None:
    """With what it needs, and what there is."""
    fit, code = _fit(tiny, tmp_path, "0.001")
    if fit["models"][0]["total_bytes"] > 1_000_000:
        assert (fit["verdict"], code) == ("wont_fit", 1)
        assert fit["reason"].startswith("a alone needs")


def test_a_table_is_printed_with_a_sum(tiny: str) -> None:
    """One line for each model, one for all, and the verdict."""
    result = _run(tiny, tiny)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0].split() == ["model", "weights", "working", "memory", "KV", "cache", "together"]
    assert any(line.startswith("sum") for line in lines)
    assert "fits: together they need" in lines[-1]


def test_settings_without_models_are_bad_usage(tmp_path: Path) -> None:
    """There is nothing to add up."""
    path = tmp_path / "machd.toml"
    path.write_text("")
    result = _run("--config", str(path))
    assert result.exit_code == 2
    assert "name some behind --fits" in result.output


def test_several_models_go_with_fits_alone(tiny: str) -> None:
    """A check of one model takes one."""
    result = CliRunner().invoke(check, [tiny, tiny])
    assert result.exit_code == 2
    assert "several go with --fits" in result.output
