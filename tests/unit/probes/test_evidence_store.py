"""Evidence is found for the code that it was measured on, and for no other."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machd.capabilities.evidence import Evidence, MeasuredOn, Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport, SwitchedReport
from machd.capabilities.model_code import ModelCode
from machd.engine.loading.source import ModelSource, SourceKind
from machd_probes.evidence_store import EvidenceStore, weights_key
from machd_probes.matrix_file import KeptMatrix
from machd_probes.versions import ProbeBasis

BASIS = ProbeBasis(
    machd="1", mlx="2", mlx_lm="3", backend="cpu", blas="B 4", dtype="float32", sources="5"
)
CODE = ModelCode(
    "mlx_lm.models.qwen3",
    frozenset({"mlx_lm.models.qwen3.Attention", "mlx_lm.models.qwen3.MLP", "mlx.nn.Linear"}),
    frozenset({"KVCache of Attention"}),
    "digest",
)
OTHER = ModelCode(
    "mlx_lm.models.llama",
    frozenset({"mlx_lm.models.llama.Attention", "mlx_lm.models.rope_utils.YarnRoPE"}),
    frozenset({"KVCache of Attention"}),
    "another",
)
PASSED = ProbeResult("batch_parity", Outcome.PASSED, evidence=Evidence(0, 0.0, 0.0, cases=3))
SHIPPED = replace(PASSED, measured_on=MeasuredOn.SHIPPED)
FAILED = replace(PASSED, outcome=Outcome.FAILED)
MATRIX = KeptMatrix(
    BASIS,
    {
        "qwen3": ArchitectureReport("qwen3", results=(PASSED,), code=CODE),
        "llama": ArchitectureReport("llama", results=(PASSED,), code=OTHER),
    },
)


def _store(
    directory: Path, basis: ProbeBasis = BASIS, matrix: KeptMatrix = MATRIX
) -> EvidenceStore:
    return EvidenceStore(directory, basis, matrix=matrix)


def _on(result: ProbeResult, where: MeasuredOn) -> ProbeResult:
    return replace(result, measured_on=where)


def test_an_architecture_comes_with_its_evidence(tmp_path: Path) -> None:
    """A model that is made of what was measured, or of less, needs no measurement."""
    less = replace(CODE, layers=CODE.layers - {"mlx_lm.models.qwen3.MLP"})
    assert _store(tmp_path).find("qwen3", CODE) == (SHIPPED,)
    assert _store(tmp_path).find("qwen3", less) == (SHIPPED,)


@pytest.mark.parametrize(
    "code",
    [
        replace(CODE, digest="edited"),
        replace(CODE, layers=CODE.layers | {"mlx_lm.models.qwen3.SparseMLP"}),
        replace(CODE, layers=CODE.layers | {"mlx_lm.models.qwen3.Attention use_sliding"}),
        replace(CODE, layers=CODE.layers | {"machd.engine.kernels.batchable.BatchableAttention"}),
        replace(CODE, caches=frozenset({"RotatingKVCache of Attention window"})),
    ],
    ids=["edited", "another class", "a switch", "a repair", "another cache"],
)
def test_other_code_has_no_evidence(tmp_path: Path, code: ModelCode) -> None:
    """A further class, switch or cache, or a changed file, has no evidence."""
    assert _store(tmp_path).find("qwen3", code) == ()


def test_layers_for_many_are_covered_by_any_architecture(tmp_path: Path) -> None:
    """A rotation that another architecture was measured with needs no measurement of its own."""
    code = replace(CODE, layers=CODE.layers | {"mlx_lm.models.rope_utils.YarnRoPE"})
    foreign = replace(CODE, layers=CODE.layers | {"mlx_lm.models.llama.Attention"})
    assert _store(tmp_path).find("qwen3", code) == (SHIPPED,)
    assert _store(tmp_path).find("qwen3", foreign) == (), "which is an architecture's own"


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"machd": "2"}, True),
        ({"blas": "B 4.1"}, True),
        ({"blas": "MKL"}, True),
        ({"blas": None}, True),
        ({"mlx": "3"}, False),
        ({"mlx_lm": "4"}, False),
        ({"backend": "metal"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"sources": "6"}, False),
    ],
    ids=str,
)
def test_the_matrix_holds_for_what_computes(
    tmp_path: Path, changes: dict[str, Any], *, holds: bool
) -> None:
    """Another mlx, mlx-lm, backend, dtype or kernel has to be measured; another BLAS may be later."""
    store = _store(tmp_path, replace(BASIS, **changes))
    assert bool(store.find("qwen3", CODE)) == holds


@pytest.mark.parametrize(
    ("blas", "where"),
    [
        ("B 4.1", MeasuredOn.SHIPPED),
        (None, MeasuredOn.SHIPPED),
        ("MKL", MeasuredOn.SHIPPED_OTHER_BLAS),
    ],
)
def test_shipped_evidence_says_whether_it_was_measured_with_this_blas(
    tmp_path: Path, blas: str | None, where: MeasuredOn
) -> None:
    """A reader of a verdict's reason learns that this machine has measured nothing."""
    found = _store(tmp_path, replace(BASIS, blas=blas)).find("qwen3", CODE)
    assert [one.measured_on for one in found] == [where]


_NATIVE = "machd-native 0.1.0, OpenBLAS 0.3.21"


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ("machd-native 0.2.0, OpenBLAS 0.3.29", True),
        ("machd-native 0.1.0, BLIS 0.9.0", False),
        ("OpenBLAS 0.3.21", False),
    ],
)
def test_a_blas_behind_machds_kernels_is_compared_without_versions(
    other: str, *, is_same: bool
) -> None:
    """Both the kernels and the library round a row in their own way, whatever their versions."""
    assert replace(BASIS, blas=_NATIVE).has_blas_of(replace(BASIS, blas=other)) is is_same


@pytest.mark.parametrize("outcome", [Outcome.PASSED, Outcome.FAILED])
def test_what_this_machine_measured_replaces_shipped_evidence(
    tmp_path: Path, outcome: Outcome
) -> None:
    """With another BLAS shipped evidence decides until a stand-in was measured, right or wrong."""
    store = _store(tmp_path, replace(BASIS, blas="MKL"))
    here = ProbeResult("batch_parity", outcome, measured_on=MeasuredOn.STAND_IN)
    store.keep_stand_in("qwen3", CODE, [here])
    assert store.find("qwen3", CODE) == (here,)


def test_switched_code_has_the_evidence_of_the_switched_model(tmp_path: Path) -> None:
    """The worse result counts of all models that ran a part of the code."""
    attention, mlp = "mlx_lm.models.qwen3.Attention", "mlx_lm.models.qwen3.MLP"
    switched = [
        SwitchedReport(
            "qk_norm=true", _switched(attention, f"{attention} qk_norm"), results=(PASSED,)
        ),
        SwitchedReport("gated=true", _switched(mlp, f"{mlp} gated"), results=(FAILED,)),
    ]
    report = replace(MATRIX.reports["qwen3"], switched=tuple(switched))
    store = _store(tmp_path, matrix=KeptMatrix(BASIS, {"qwen3": report}))

    assert _outcome(store, CODE) is Outcome.PASSED
    assert _outcome(store, switched[0].code) is Outcome.PASSED
    assert _outcome(store, switched[1].code) is Outcome.FAILED
    assert _outcome(store, switched[0].code.joined(switched[1].code)) is Outcome.FAILED
    assert _outcome(store, _switched(mlp, f"{mlp} gated normed")) is None


def _switched(layer: str, other: str) -> ModelCode:
    return replace(CODE, layers=CODE.layers - {layer} | {other})


def _outcome(store: EvidenceStore, code: ModelCode) -> Outcome | None:
    found = store.find("qwen3", code)
    return found[0].outcome if found else None


def test_what_a_stand_in_showed_is_found_by_the_next_start(tmp_path: Path) -> None:
    """Results come one at a time, and are there for all models of the same code."""
    code = replace(CODE, digest="edited")
    trim = ProbeResult("trim", Outcome.PASSED, measured_on=MeasuredOn.STAND_IN)
    parity = _on(PASSED, MeasuredOn.STAND_IN)
    first = _store(tmp_path)
    first.keep_stand_in("qwen3", code, [parity])
    first.keep_stand_in("qwen3", code, [trim])

    assert first.find("qwen3", code) == (parity, trim)
    assert _store(tmp_path).find("qwen3", code) == (parity, trim)
    assert _store(tmp_path).find("qwen2", code) == ()
    assert _store(tmp_path, replace(BASIS, sources="6")).find("qwen3", code) == ()


def test_what_ended_in_an_error_is_for_this_process_alone(tmp_path: Path) -> None:
    """It says as much of the machine as of the model, and is not asked again at once."""
    error = ProbeResult("batch_parity", Outcome.ERRORED, measured_on=MeasuredOn.STAND_IN)
    code = replace(CODE, digest="edited")
    store = _store(tmp_path)
    store.keep_stand_in("qwen3", code, [error])
    assert store.find("qwen3", code) == (error,)
    assert _store(tmp_path).find("qwen3", code) == ()


@pytest.mark.parametrize("where", [MeasuredOn.STAND_IN, MeasuredOn.WEIGHTS])
def test_a_failure_counts_wherever_it_was_seen(tmp_path: Path, where: MeasuredOn) -> None:
    """A model is not batched because one of two measurements passed."""
    store = _store(tmp_path)
    failed = _on(FAILED, where)
    if where is MeasuredOn.WEIGHTS:
        store.keep_weights("key", [failed])
    else:
        store.keep_stand_in("qwen3", CODE, [failed])
    assert store.find("qwen3", CODE, "key") == (failed,)


def test_the_weights_own_answer_comes_first(tmp_path: Path) -> None:
    """An answer of theirs replaces that of a tiny model; what they could not tell does not."""
    passed = _on(PASSED, MeasuredOn.WEIGHTS)
    store = _store(tmp_path)
    store.keep_weights("key", [passed])
    assert store.find("qwen3", CODE, "key") == (passed,)
    store.keep_weights("key", [replace(passed, outcome=Outcome.NO_DATA)])
    assert store.find("qwen3", CODE, "key") == (SHIPPED,)
    assert store.find("qwen3", CODE, "another") == (SHIPPED,)


@pytest.mark.parametrize("outcome", [Outcome.ERRORED, Outcome.FAILED])
def test_what_raised_on_the_weights_is_not_kept(tmp_path: Path, outcome: Outcome) -> None:
    """Without a comparison a failure may be want of memory."""
    raised = ProbeResult("batch_parity", outcome, measured_on=MeasuredOn.WEIGHTS)
    _store(tmp_path).keep_weights("key", [raised])
    assert _store(tmp_path).find("qwen3", CODE, "key") == (SHIPPED,)


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    """Results stay available in the process that measured them."""
    (tmp_path / "machd").write_text("a file in the way")
    code = replace(CODE, digest="edited")
    store = _store(tmp_path)
    store.keep_stand_in("qwen3", code, [PASSED])
    assert store.find("qwen3", code) == (PASSED,)


# Weights


@pytest.fixture(name="checkpoint")
def _checkpoint(tmp_path: Path) -> Path:
    """Files as a model has them; they are never loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def _key(path: Path) -> str:
    return weights_key(ModelSource(SourceKind.DIRECTORY, path, path.name))


def test_other_files_are_another_model(checkpoint: Path) -> None:
    """New weights, another configuration or another place have a key of their own."""
    keys = [_key(checkpoint)]
    assert _key(checkpoint) == keys[0]
    (checkpoint / "model.safetensors").write_bytes(b"other weights")
    keys.append(_key(checkpoint))
    (checkpoint / "config.json").write_text('{"sliding_window": 8}')
    keys.append(_key(checkpoint))
    keys.append(_key(checkpoint.rename(checkpoint.with_name("other"))))
    assert len(set(keys)) == 4


@pytest.mark.parametrize("name", ["model.py", "parts/deep/layers.py", "../elsewhere.py"])
def test_code_of_a_checkpoint_is_part_of_it(checkpoint: Path, name: str) -> None:
    """A model that is built by Python code of its own is another one when that code changes."""
    (checkpoint / "config.json").write_text(json.dumps({"model_file": name}))
    code = checkpoint / name
    code.parent.mkdir(parents=True, exist_ok=True)
    code.write_text("WINDOW = 8")
    before = _key(checkpoint)
    code.write_text("WINDOW = 16")
    assert _key(checkpoint) != before


def test_a_file_that_looks_as_old_as_before_is_another_one(checkpoint: Path) -> None:
    """Weights of the same size whose time of writing was set back are other weights."""
    weights = checkpoint / "model.safetensors"
    before, key = weights.stat(), _key(checkpoint)
    weights.write_bytes(b"other w")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    assert _key(checkpoint) != key


def test_a_folder_without_end_has_no_key(checkpoint: Path, tmp_path: Path) -> None:
    """A link that leads back into the folder ends the search, and nothing is kept of it."""
    (checkpoint / "again").symlink_to(checkpoint)
    (checkpoint / "and again").symlink_to(checkpoint)
    key = _key(checkpoint)
    assert key == ""
    _store(tmp_path / "cache").keep_weights(key, [_on(PASSED, MeasuredOn.WEIGHTS)])
    assert not list(tmp_path.rglob("model-*.json"))
