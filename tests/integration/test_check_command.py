"""``machd check``: what a person, a script and a pipe get from it, and what bad input gets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import msgspec
import pytest
import structlog
from click.testing import CliRunner, Result
from mlx.utils import tree_flatten
from support.checkpoints.header_checkpoint import write_header_checkpoint, write_tokenizer_files
from support.checkpoints.kept_family import write_kept_family
from support.clocks.polling import CEILING_S
from support.engines.fake_engine import FakeEngine
from unit.engine.gguf_writer import tiny_gguf
from unit.engine.tiny_llama import TinyLlama

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.cli import commands
from machd.cli.check import check
from machd.cli.check_document import ModelCheck
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.loading.architecture import import_architecture
from machd.engine.protocol.engine import ModelDescription
from machd.errors import ModelArchitectureError
from machd.settings.sources import process_environ
from machd.user_directories import user_cache_directory
from machd_bench.generated_checkpoint import MoeShape, write_generated_checkpoint
from machd_probes.tiny import tiny_configuration

MACHD = Path(sys.executable).with_name("machd")
LIMIT_BYTES = 500_000_000


@dataclass(frozen=True)
class Run:
    """A finished process.

    Attributes:
        peak_bytes: The most memory that it had resident, where that was measured.
    """

    code: int
    output: str
    errors: str
    peak_bytes: int


@pytest.fixture(autouse=True, scope="module")
def _whole_mlx_lm() -> None:
    """The command alone imports less of it, which other tests of this process need."""
    import_mlx_lm()


@pytest.fixture(name="tiny")
def _tiny(tmp_path: Path) -> TinyLlama:
    return TinyLlama.save(tmp_path / "tiny")


_LAUNCHER = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
with open(sys.argv[1], "w") as file:
    json.dump(usage.ru_maxrss, file)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""A small process between: on Linux a child's peak starts at what its parent has resident."""


def run_measured(*command: str) -> Run:
    """Run a program in a process of its own, with its output in pipes, 80 columns wide."""
    with tempfile.TemporaryDirectory() as directory:
        usage_path = Path(directory) / "usage.json"
        finished = subprocess.run(
            [sys.executable, "-c", _LAUNCHER, str(usage_path), *command],
            env={**process_environ(), "COLUMNS": "80"},
            capture_output=True,
            text=True,
            check=False,
        )
        peak = json.loads(usage_path.read_text("utf-8"))
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return Run(finished.returncode, finished.stdout, finished.stderr, peak * unit_bytes)


def run(*arguments: str) -> Run:
    """Run ``machd check`` in a process of its own."""
    finished = subprocess.run(
        [sys.executable, "-m", "machd", "check", *arguments],
        env={**process_environ(), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    return Run(finished.returncode, finished.stdout, finished.stderr, peak_bytes=0)


class RunsHere(Protocol):
    """Runs ``machd check`` in this process, as the program does but for leaving it."""

    def __call__(self, *arguments: str) -> Run:
        """Run it with these arguments."""
        ...


@pytest.fixture(name="run_here")
def _run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[RunsHere]:
    logging = structlog.get_config()
    # Limits that no busy machine reaches: what is refused is refused for what it is.
    for limit in ("inspection._BUILD", "template_abilities._BUILD", "template_abilities._RENDER"):
        monkeypatch.setattr(f"machd.engine.loading.{limit}_LIMIT_S", CEILING_S)

    def run_here(*arguments: str) -> Run:
        monkeypatch.setattr("sys.argv", ["machd", "check", *arguments])
        code = commands.run()
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err, peak_bytes=0)

    yield run_here
    structlog.configure(**logging)


def write_architecture(directory: Path, name: str) -> Path:
    """A checkpoint of one of the prober's tiny configurations, with mlx-lm's own weights."""
    import_mlx_lm()
    config = {"model_type": name, **tiny_configuration(name).config}
    module = import_architecture(name)
    flat = tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters())
    directory.mkdir()
    mx.save_safetensors(str(directory / "model.safetensors"), dict(flat), {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tokenizer_files(directory)
    return directory


def row_of(result: Run) -> dict[str, Any]:
    """The JSON of a run, which decodes as what it is declared to be."""
    assert result.code == 0, result.errors
    msgspec.json.decode(result.output, type=ModelCheck, strict=True)
    row: dict[str, Any] = json.loads(result.output)
    return row


@pytest.fixture(name="embedded_row", scope="module")
def _embedded_row(embedded_model_path: Path) -> Run:
    """What a script gets of the embedded default, with a budget that holds its whole context."""
    assert embedded_model_path.is_file()
    budget = ("--continuous-batching-kv-budget-gb", "1")
    return run("--json", "--require", "batched", "--model-dtype", "float32", *budget)


@pytest.fixture(name="embedded_table", scope="module")
def _embedded_table(embedded_model_path: Path) -> Run:
    """What a person gets of it."""
    assert embedded_model_path.is_file()
    return run("--continuous-batching-kv-budget-gb", "1")


def test_ranks_and_the_memory_that_each_needs_are_told(
    embedded_row: Run, embedded_table: Run
) -> None:
    """The embedded model has nine heads: three ranks share them, and two cannot."""
    row = row_of(embedded_row)
    shares = {share["ranks"]: share for share in row["distributed"]["shares"]}

    assert row["distributed"]["verdict"] == "supported"
    assert row["weights_bytes"] / 3 < shares[3]["weights_bytes"] < row["weights_bytes"]
    assert shares[3]["memory_bytes"] > shares[3]["weights_bytes"] + 1_000_000_000
    assert "n_heads is 9, which 2 ranks cannot share evenly" in shares[2]["reason"]
    assert "3 machines each needs" in " ".join(embedded_table.output.split())


def test_the_embedded_model(embedded_row: Run) -> None:
    """Without MODEL it is the embedded default, whose figures are known."""
    row = row_of(embedded_row)
    assert row["model"] == "smollm2-135m-instruct"
    assert row["architecture"] == "llama"
    assert row["kv_cache_kind"] == "standard"
    assert row["layers"] == {"KVCache": 30}
    assert row["bytes_per_token"] == 2 * 30 * 3 * 64 * 4
    assert row["bytes_per_sequence"] == 0
    assert row["context_tokens"] == row["fitting_context_tokens"] == 8192
    assert row["quantization"] == {
        "mode": "affine",
        "bits": 4,
        "group_size": 32,
        "native": True,
        "kept": False,
    }
    assert row["continuous_batching"]["verdict"] == "supported"
    assert row["continuous_batching"]["source"] == "measured"
    assert row["chat_template"]["system_role"] is True
    assert row["chat_template"]["system_messages"] == "anywhere"
    assert row["chat_template"]["tools"] is False
    assert row["versions"]["dtype"] == "float32"
    assert embedded_row.errors == ""


def test_the_table_fits_a_narrow_terminal_and_a_pipe(embedded_table: Run) -> None:
    """At 80 columns no line is longer, none ends in spaces, and a pipe gets no escape codes."""
    assert embedded_table.code == 0
    lines = embedded_table.output.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in embedded_table.output
    labels = {line.split("  ")[0] for line in lines if not line.startswith(" ")}
    assert {"model", "memory", "weights", "KV cache", "context", "batching", "chat"} <= labels


def test_generation_config_is_told(tiny: TinyLlama, run_here: RunsHere) -> None:
    """The values that hold where a request says nothing, and by name one that is left out."""
    written = {"temperature": 0.6, "top_k": 20, "top_p": 7}
    (tiny.path / "generation_config.json").write_text(json.dumps(written), encoding="utf-8")
    row = row_of(run_here(str(tiny.path), "--json"))
    assert row["default_sampling"] == {"temperature": 0.6, "top_k": 20}
    assert any("generation_config.json: top_p is no number" in note for note in row["notes"])
    assert "temperature 0.6, top_k 20 where a request" in run_here(str(tiny.path)).output
    unread = row_of(run_here(str(tiny.path), "--json", "--model-generation-config", "none"))
    assert unread["default_sampling"] == {}


@pytest.mark.long
def test_a_70b_checkpoint_takes_little_memory(tmp_path: Path) -> None:
    """Headers of 141 GB of weights and a tokenizer of 128,000 tokens are all that is read."""
    path = write_header_checkpoint(tmp_path / "llama-70b", tokenizer_tokens=128_000)
    result = run_measured(str(MACHD), "check", str(path), "--json")
    row = row_of(result)
    assert row["stored_bytes"] == 141_107_412_992
    assert row["bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    assert row["context_tokens"] == 131_072
    assert row["budget_context_tokens"] == 10_000_000_000 // row["bytes_per_token"]
    assert result.peak_bytes < LIMIT_BYTES


def test_the_limit_of_memory_would_notice_the_weights() -> None:
    """A process that holds 600 MB exceeds what the test above asserts, and one that does not, not."""
    code = "data = bytearray({}); data[::4096] = b'1' * len(data[::4096])"
    assert run_measured(sys.executable, "-c", code.format(600_000_000)).peak_bytes > LIMIT_BYTES
    assert run_measured(sys.executable, "-c", code.format(1_000_000)).peak_bytes < LIMIT_BYTES


def test_settings_are_those_of_serve(tiny: TinyLlama, run_here: RunsHere) -> None:
    """The budget, the context and the number type are what a daemon would be started with."""
    result = run_here(
        str(tiny.path),
        "--json",
        "--model-dtype",
        "float16",
        "--model-max-context-tokens",
        "100",
        "--continuous-batching-kv-budget-gb",
        "0.0001",
    )
    row = row_of(result)
    assert row["versions"]["dtype"] == "float16"
    assert row["bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert row["context_tokens"] == 100
    assert row["fit"]["kv_budget_bytes"] == 100_000
    assert row["fitting_context_tokens"] == 100
    assert row["budget_context_tokens"] == 100


def test_require_holds_or_not(tiny: TinyLlama, tmp_path: Path, run_here: RunsHere) -> None:
    """A model that is not known to batch makes it exit with 1, and the row is printed all the same."""
    assert run_here(str(tiny.path), "--require", "batched").code == 0
    private = write_architecture(tmp_path / "private", "deepseek_v41")
    result = run_here(str(private), "--require", "batched", "--json")
    assert result.code == 1
    assert json.loads(result.output)["continuous_batching"]["verdict"] == "blocked"
    assert run_here(str(private), "--json").code == 0


def test_without_a_chat_template_it_is_a_row(tiny: TinyLlama, run_here: RunsHere) -> None:
    """A model for prompts only is checked like any other; the row says what it lacks."""
    (tiny.path / "chat_template.jinja").unlink()
    row = row_of(run_here(str(tiny.path), "--json"))
    assert row["chat_template"]["present"] is False
    assert "no chat template" in row["chat_template"]["reason"]
    assert "no chat template" in run_here(str(tiny.path)).output
    assert "--model-chat-template none" in row["chat_template"]["reason"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("no model", "config.json"),
        ("truncated header", "header is longer than the file"),
        ("absurd layers", "num_hidden_layers"),
        ("text for a number", "do not fit together"),
        ("unknown type", "no such architecture"),
        ("custom code", "never run"),
        ("escape codes", "model_type ?[2J"),
        ("not there", "is neither a directory nor"),
    ],
)
def test_bad_input_gets_one_line(
    tiny: TinyLlama, damage: str, words: str, run_here: RunsHere
) -> None:
    """Exit 2, a line on standard error that says what is wrong, and no traceback."""
    path = tiny.path
    match damage:
        case "no model":
            path = path.parent
        case "truncated header":
            weights = path / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:50])
        case "absurd layers":
            tiny.change_config(num_hidden_layers=10**9)
        case "text for a number":
            tiny.change_config(hidden_size="64")
        case "unknown type":
            tiny.change_config(model_type="no_such_thing")
        case "escape codes":
            tiny.change_config(model_type="\x1b[2J")
        case "custom code":
            (path / "own.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
            tiny.change_config(model_file="own.py")
        case _:
            path = path / "config.json"
    result = run_here(str(path))
    assert result.code == 2
    # On a busy machine lines of progress come before it, one every 15 s.
    *progress, error = result.errors.splitlines()
    assert all(re.fullmatch(r".+, \d+ s", line) for line in progress)
    assert words in error
    assert error.startswith("machd: ")
    assert "Traceback" not in result.errors
    assert "it ran" not in result.errors
    assert result.output == ""


def test_every_commands_exit_code_leaves_the_process() -> None:
    """The program exits with the command's code, which click hands over in two ways."""
    # The one of these that imports no mlx is started as a shell does.
    broken = run_measured(str(MACHD), "config", "check", "/nowhere.toml", "--json")
    assert run("/no/such/model").code == 2
    assert (broken.code, json.loads(broken.output)["ok"]) == (2, False)
    assert run("--help").code == 0
    assert run("--nothing").code == 2


def invoke(*arguments: str) -> Result:
    """The command in this process, with machd's errors let through."""
    return CliRunner().invoke(check, arguments)


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    """With its output pipe closed, as behind ``| head``, a command ends quietly."""
    with subprocess.Popen(
        [MACHD, "config", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()

    assert (process.returncode, errors) == (1, b"")


@pytest.mark.parametrize(
    "arguments",
    [
        ("somewhere", "--all-archs"),
        ("somewhere", "--arch", "llama"),
        ("--model-path", "somewhere", "--arch", "llama"),
        ("--measure", "--arch", "llama"),
        ("--all-archs", "--arch", "llama"),
        ("--no-cache",),
        ("--vision",),
        ("somewhere", "--vision"),
        ("--require", "something"),
    ],
)
def test_options_that_conflict_are_bad_usage(arguments: tuple[str, ...]) -> None:
    """One model or architectures, not both: exit 2 before anything is read."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Error:" in result.output


def test_an_unknown_architecture_names_the_nearest() -> None:
    """A slip of the pen is answered with the names that mlx-lm has."""
    result = invoke("--arch", "llamma")
    assert isinstance(result.exception, ModelArchitectureError)
    assert result.exception.exit_code == 2
    assert "llama" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "names", "expected"),
    [
        (("--all-archs",), None, (False, True, False)),
        (("--arch", "llama", "--arch", "mamba"), ("llama", "mamba"), (False, True, False)),
        (("--all-archs", "--json", "--no-cache"), None, (True, False, False)),
        (("--all-archs", "--require", "batched"), None, (False, True, True)),
    ],
)
def test_architectures_are_handed_to_the_probes(
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    names: tuple[str, ...] | None,
    expected: tuple[bool, bool, bool],
) -> None:
    """Every option reaches the prober, and its answer is the exit code."""
    calls = []

    def check_architectures(
        wanted: tuple[str, ...] | None,
        *,
        as_json: bool,
        use_cache: bool,
        require_batched: bool,
        blas: str,
    ) -> int:
        assert blas == "off", "the setting, wherever it came from"
        calls.append((wanted, (as_json, use_cache, require_batched)))
        return 1

    monkeypatch.setattr("machd_probes.command.check_architectures", check_architectures)
    assert invoke("--engine-blas", "off", *arguments).exit_code == 1
    assert calls == [(names, expected)]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [(("--all-archs", "--vision"), None), (("--arch", "pixtral", "--vision"), ("pixtral",))],
)
def test_families_are_handed_to_the_vision_matrix(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], names: tuple[str, ...] | None
) -> None:
    """With --vision the names are those of mlx-vlm's families, and the answer is the exit code."""
    calls = []

    def check_families(wanted: tuple[str, ...] | None, **options: object) -> int:
        calls.append((wanted, options["as_json"], options["require_batched"]))
        return 1

    monkeypatch.setattr("machd_probes.vision_matrix.command.check_families", check_families)
    assert invoke(*arguments, "--json").exit_code == 1
    assert calls == [(names, True, False)]


@pytest.fixture(name="vision", scope="module")
def _vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision model that takes images and videos."""
    directory = tmp_path_factory.mktemp("check") / "qwen2_vl"
    return write_kept_family("qwen2_vl", directory)


@pytest.mark.long
def test_vision_is_described_as_serving_finds_it(vision: Path) -> None:
    """Processor, kinds and an image's tokens are told, and the caches are those of mlx-vlm's model."""
    row = row_of(run(str(vision), "--json", "--model-dtype", "float32"))
    assert row["architecture"] == "qwen2_vl"
    assert row["layers"] == {"KVCache": 2}
    assert row["vision"] == {
        "served": True,
        "reason": None,
        "processor": "Qwen2VLProcessor",
        "kinds": ["image", "video"],
        "example_pixels": 448,
        "example_tokens": 18,
    }
    table = run(str(vision))
    lines = [line for line in table.output.splitlines() if line.startswith("vision")]
    assert len(lines) == 1
    assert "yes: image and video, by Qwen2VLProcessor" in lines[0]


def test_weights_without_a_tower_are_text_only(
    vision: Path, tmp_path: Path, run_here: RunsHere
) -> None:
    """A checkpoint that lost its tower is judged as a text model, and the reason is told."""
    path = tmp_path / "text"
    shutil.copytree(vision, path)
    arrays = mx.load(str(path / "model.safetensors"))
    assert isinstance(arrays, dict)
    kept = {name: one for name, one in arrays.items() if "vision" not in name}
    mx.save_safetensors(str(path / "model.safetensors"), kept, {"format": "mlx"})
    config = json.loads((path / "config.json").read_text("utf-8"))
    # mlx-lm's default differs from mlx-vlm's.
    config["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    row = row_of(run_here(str(path), "--json"))
    assert row["vision"]["served"] is False
    assert "the weights hold none" in row["vision"]["reason"]
    assert "no: config.json names a vision tower" in run_here(str(path)).output


def test_a_text_model_has_no_vision(tiny: TinyLlama, run_here: RunsHere) -> None:
    """Nothing is said of a tower that no file names."""
    assert row_of(run_here(str(tiny.path), "--json"))["vision"] is None
    assert "vision" not in run_here(str(tiny.path)).output


def test_types_of_a_gguf_file_are_told_with_their_size_and_rounding(
    tiny: TinyLlama, tmp_path: Path, run_here: RunsHere
) -> None:
    """A line for each type, and for a directory none: how many tensors, what becomes of them, and whether that rounds."""
    path = str(tiny_gguf(tmp_path / "tiny.gguf", "Q8_0"))
    row = row_of(run_here(path, "--json", "--model-dtype", "float16"))
    types = {one["type"]: one for one in row["tensor_types"]}
    assert types.keys() == {"Q8_0", "F32"}
    assert types["Q8_0"]["tensors"] == 15
    assert types["Q8_0"]["held_as"] == ["float16"]
    assert types["Q8_0"]["held_bytes"] * 34 == types["Q8_0"]["stored_bytes"] * 64
    assert not types["Q8_0"]["exact"]
    assert sum(one["stored_bytes"] for one in types.values()) == row["stored_bytes"]
    assert sum(one["held_bytes"] for one in types.values()) == row["weights_bytes"]
    said = run_here(path, "--model-dtype", "float16").output.splitlines()
    assert [line for line in said if line.startswith("  Q8_0 ")] == [
        "  Q8_0             15 tensors, 0.00 GB: float16, 0.00 GB, rounded"
    ]
    exact = run_here(path, "--model-dtype", "float32").output
    assert "15 tensors, 0.00 GB: float32, 0.00 GB\n" in exact
    assert row_of(run_here(str(tiny.path), "--json"))["tensor_types"] is None


def test_measure_loads_the_model_and_prints_evidence(tiny: TinyLlama) -> None:
    """Verdicts are measured ones, with the figures behind them; a later check, as JSON and as a table, says the same.

    machd's own kernels leave no difference at all.
    """
    measured = row_of(run(str(tiny.path), "--measure", "--json", "--require", "batched"))
    verdict, bitwise = measured["continuous_batching"], measured["bitwise"]
    assert (verdict["verdict"], verdict["source"]) == ("supported", "measured")
    assert verdict["evidence"]["token_mismatches"] == 0
    assert verdict["evidence"]["cases"] > 0
    assert verdict["evidence"]["max_logprob_diff"] < 1e-3
    assert bitwise["value"] is (native_kernels() is not None), bitwise["reason"]
    later = row_of(run(str(tiny.path), "--json"))
    assert later["continuous_batching"]["reason"] == verdict["reason"]
    assert "the model itself" in verdict["reason"]
    assert later["bitwise"] == bitwise
    if bitwise["value"]:
        assert bitwise["reason"].startswith("measured on the model itself: batch_parity, ")
        assert "bitwise yes: measured on" in " ".join(run(str(tiny.path)).output.split())


def test_bitwise_is_told_with_its_reason(tiny: TinyLlama, run_here: RunsHere) -> None:
    """JSON has an object, the table a line; shipped evidence says yes where machd's own kernels compute."""
    found = row_of(run_here(str(tiny.path), "--json"))["bitwise"]
    assert found["value"] is (native_kernels() is not None), found["reason"]
    shown = run_here(str(tiny.path)).output
    word = "yes" if found["value"] else "no"
    assert f"bitwise {word}: {found['reason']}"[:60] in " ".join(shown.split())
    named = row_of(run_here(str(tiny.path), "--json", "--model-dtype", "float16"))["bitwise"]
    assert named["value"] is False
    assert "machd's own kernels" in named["reason"]


@pytest.mark.long
def test_quantised_model_is_judged_by_size_and_perplexity(tiny: TinyLlama) -> None:
    """--measure compares the format's perplexity with the plain model's; without it, only the size is known."""
    plain = row_of(run(str(tiny.path), "--json"))
    unmeasured = row_of(run(str(tiny.path), "--json", "--model-quantize", "mxfp4"))
    measured = row_of(run(str(tiny.path), "--json", "--model-quantize", "mxfp4", "--measure"))
    assert plain["quantised_to"] is None
    assert unmeasured["quantised_to"] == measured["quantised_to"] == "mxfp4 4-bit, group 32"
    assert unmeasured["weights_bytes"] == measured["weights_bytes"] < plain["weights_bytes"] / 4
    assert unmeasured["quality"] is None
    assert measured["quality"]["perplexity"] != measured["quality"]["unquantised_perplexity"]
    assert all(value > 1 for value in measured["quality"].values())


@pytest.fixture(name="moe", scope="module")
def _moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture-of-experts model, most of which is experts."""
    shape = MoeShape(hidden=128, inner=512, layers=4, experts=64)
    directory = tmp_path_factory.mktemp("check") / "moe"
    return write_generated_checkpoint(directory, shape, user_cache_directory(process_environ()))


def test_experts_are_reported_in_memory_and_on_disk(moe: Path) -> None:
    """The memory of a model falls by the experts that stay on disk, and without the setting both are told."""
    whole = row_of(run(str(moe), "--json"))
    banked = row_of(run(str(moe), "--json", "--experts-resident-gb", "0.01"))
    experts, of_banked = whole["experts"], banked["experts"]
    assert experts["count"] == of_banked["count"] == 256
    # As they are stored where machd's own kernels compute them, else float32.
    assert experts["bytes"] == 3 * 128 * 512 * 256 * (4 if native_kernels() is None else 2)
    assert whole["weights_bytes"] == experts["bytes"] + experts["other_bytes"]
    assert (experts["on_disk"], of_banked["on_disk"]) == (False, True)
    assert of_banked["bank_bytes"] == 10_000_000
    assert (
        banked["weights_bytes"]
        == of_banked["streaming_bytes"]
        == of_banked["other_bytes"] + 10_000_000
    )
    assert banked["expert_streaming"].keys() >= {"verdict", "reason"}


def test_quantised_experts_on_disk_are_refused(moe: Path, run_here: RunsHere) -> None:
    """``model.quantize`` and experts on disk exclude each other, and the error says what to do instead."""
    result = run_here(str(moe), "--streaming", "--model-quantize", "nvfp4")
    assert result.code == 2
    assert "mlx_lm.convert --quantize" in result.errors


def test_model_that_fits_with_experts_on_disk_only_names_streaming(
    moe: Path, run_here: RunsHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that does not fit names ``--streaming`` and the memory that it then takes."""
    for name in ("available_memory_bytes", "device_memory_bytes"):
        monkeypatch.setattr(f"machd.engine.loading.inspection.{name}", lambda: 100_000_000)
    fit = json.loads(run_here(str(moe), "--json").output)["fit"]
    assert fit["verdict"] == "wont_fit"
    assert "`--streaming`: weights then take" in fit["reason"]


class _Loaded(FakeEngine):
    """An engine whose caches are not those that the files show."""

    @property
    def model(self) -> ModelDescription:
        layers = (LayerCacheFacts("ChunkedKVCache", mergeable=False),)
        return replace(super().model, cache=CacheFacts(layers, 4321, 0))


def test_what_is_measured_is_judged_with_the_loaded_models_caches(
    tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of --measure tells of the model that was loaded, and says what serving it decides."""
    passed = (ProbeResult("batch_parity", Outcome.PASSED),)
    monkeypatch.setattr(
        "machd.engine.open.engine_loader", lambda *_, **__: lambda _source: _Loaded()
    )
    monkeypatch.setattr(
        "machd_probes.model_probe.ModelProbe.measure_weights", lambda *_, **__: passed
    )
    monkeypatch.setattr("machd.telemetry.logs.configure_logs", lambda **_: None)
    result = invoke(str(tiny.path), "--measure", "--json")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["layers"] == {"ChunkedKVCache": 1}
    assert row["bytes_per_token"] == 4321
    assert row["continuous_batching"]["verdict"] == "blocked"
