"""Code that checkpoints run with other options than a tiny configuration comes with evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from machd.capabilities.evidence import Outcome
from machd.engine.loading.architecture import import_architecture
from machd_probes import prober
from machd_probes.catalogue import architecture_names
from machd_probes.matrix_file import kept_matrix
from machd_probes.prober import probe_switches
from machd_probes.switches import described, options_of, pairs, turned_over
from machd_probes.tiny import TinyConfiguration, tiny_configuration, tiny_variants

FOUND_UNCOVERED = {
    # Found outside: served one at a time on a busy machine, for want of evidence on their code.
    *("falcon_h1", "lfm2", "lfm2_moe", "longcat_flash_ngram", "mamba", "olmoe"),
    *("qwen3_moe", "qwen3_vl_moe", "step3p5"),
}


@dataclass
class _Arguments:
    model_type: str
    tied: bool = True
    written: bool = False


def test_options_are_those_of_the_configuration_and_of_its_defaults() -> None:
    """A nested option counts; one that is written down has the written value."""
    config = {"model_type": "x", "written": True, "text_config": {"norm": False, "size": 3}}
    found = dict(options_of(TinyConfiguration(config), _Arguments))
    assert found == {("written",): True, ("text_config", "norm"): False, ("tied",): True}
    turned = turned_over(TinyConfiguration(config, seed=3), found)
    assert turned.config == {
        "model_type": "x",
        "written": False,
        "tied": False,
        "text_config": {"norm": True, "size": 3},
    }
    assert turned.seed == 3
    assert config["written"] is True, "the original stays"
    assert described(found) == "written=false text_config.norm=true tied=false"
    assert [len(one) for one in pairs(found)] == [2, 2, 2]


@pytest.mark.long
def test_a_switch_is_probed_where_it_runs_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router without norm is other code than one with; whether the head is tied is not."""
    monkeypatch.setattr(prober, "STAND_IN_CHECKS", ("batch_parity",))
    report = probe_switches("qwen3_moe")
    assert [one.switches for one in report.switched] == ["norm_topk_prob=false"]
    assert report.switched[0].results[0].outcome is Outcome.PASSED
    assert report.code is not None
    assert not report.code.covers(report.switched[0].code)


@pytest.mark.parametrize("name", sorted(FOUND_UNCOVERED))
def test_shipped_evidence_covers_switches(name: str) -> None:
    """An architecture with any one option turned over starts without measuring."""
    assert list(_uncovered(name)) == []


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*architecture_names()} - FOUND_UNCOVERED))
def test_shipped_evidence_covers_every_switch(name: str) -> None:
    """The same of the other architectures."""
    assert list(_uncovered(name)) == []


def _uncovered(name: str) -> Iterator[str]:
    """Name the options which turned over run code without evidence on batching."""
    matrix = kept_matrix()
    assert matrix is not None
    report = matrix.reports[name]
    for variant in tiny_variants(name) if report.code is not None else ():
        configuration = tiny_configuration(variant)
        module = import_architecture(str(configuration.config["model_type"]))
        for option, value in options_of(configuration, module.ModelArgs):
            code = prober.code_of(name, turned_over(configuration, {option: value}))
            if code is None:
                continue  # no checkpoint can have this
            found = report.results_for(code, matrix.shared_layers)
            if not any(one.probe == "batch_parity" and one.is_answer for one in found):
                yield described({option: value})


def test_a_report_without_switched_code_covers_less() -> None:
    """The check above can fail: without what switches showed, code is left without evidence."""
    matrix = kept_matrix()
    assert matrix is not None
    report = matrix.reports["qwen3_moe"]
    assert report.switched
    bare = replace(report, switched=())
    assert bare.results_for(report.switched[0].code, matrix.shared_layers) == ()
