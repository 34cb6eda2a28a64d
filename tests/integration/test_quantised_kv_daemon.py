"""Quantised keys and values in a real daemon: sixteen streams at once, cached and not, in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import httpx
import pytest
from mlx.utils import tree_flatten
from support.checkpoints.header_checkpoint import write_header_checkpoint
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clients.cached_answers import Asked, ask, ask_all, stats
from support.clocks.polling import wait_until
from support.daemon.forked_daemons import DaemonParent, ForkedDaemon, daemon_parent

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.errors import SettingsError

_MODEL = "tiny"
_ROWS = 16
_BATCHED = ("--continuous-batching", "--continuous-batching-max-b", str(_ROWS))
_SYSTEM = (
    "A system prompt of some length with which all of these requests begin, word for word. " * 8
)
_TOPICS = ("rivers", "stones", "gardens", "windows", "paper", "travel", "engines", "winter")
_LEAST_SAVED = {"affine8": 2.5, "turboquant": 5.0}
"""How many times fewer bytes; of heads of 16, whose scales weigh more than those of 64."""


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / _MODEL)


@pytest.fixture(name="parent", scope="module")
def _parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonParent]:
    with daemon_parent(tmp_path_factory.mktemp("daemons")) as parent:
        yield parent


@pytest.fixture(name="float_reserved_bytes", scope="module")
def _float_reserved_bytes(parent: DaemonParent, model: Path) -> int:
    """Return what one request reserves in float32."""
    with parent.running(str(model), *_BATCHED) as daemon:
        return _reserved_bytes(daemon)


def _question(topic: str, **fields: object) -> Asked:
    return Asked(
        {
            "model": _MODEL, "prompt": f"{_SYSTEM}Tell me about {topic}.", "max_tokens": 12,
            "temperature": 0, "ignore_eos": True, "logprobs": 2, **fields,
        }
    )  # fmt: skip


_QUESTIONS = [
    *(_question(topic) for topic in _TOPICS),
    *(_question(topic, temperature=1, top_k=20, seed=5) for topic in _TOPICS),
]


def _reserved_bytes(daemon: ForkedDaemon) -> int:
    """Return what a daemon reserves for one and the same request, seen while that runs."""

    def reserved_bytes() -> int:
        return int(stats(daemon.url)["kv"]["reserved_bytes"])

    # Far more tokens than are computed until the client leaves.
    asked = _question("one", max_tokens=6000, logprobs=None, stream=True)
    url = daemon.url + asked.path
    with httpx.stream("POST", url, json=dict(asked.fields)) as answer:
        assert answer.status_code == 200
        wait_until(lambda: reserved_bytes() > 0, "the request has a slot")
        reserved = reserved_bytes()
    wait_until(lambda: reserved_bytes() == 0, "it has left")
    return reserved


@pytest.mark.parametrize(
    "name",
    [
        "affine8",
        *(pytest.param(one, marks=pytest.mark.long) for one in _LEAST_SAVED if one != "affine8"),
    ],
)
@pytest.mark.long
def test_sixteen_streams_in_fewer_bits(
    parent: DaemonParent, model: Path, float_reserved_bytes: int, name: str
) -> None:
    """Batched, as the capabilities say; cached, uncached, alone and together all say the same."""
    flags = (str(model), *_BATCHED, "--cache-kv-quantization", name)
    with (
        parent.running(*flags) as cached,
        parent.running(*flags, "--no-cache-prefix") as plain,
    ):
        told = httpx.get(f"{cached.url}/v1/capabilities").json()
        assert told["kv_quantization"]["active"] == name
        assert told["kv_quantization"]["verdict"] == "supported"
        assert (told["decode_mode"]["active"], told["max_b"]) == ("batched", _ROWS)
        assert told["prefix_cache"]["active"] is True

        expected = [ask(plain.url, one) for one in _QUESTIONS]
        assert len({one.texts for one in expected}) > _ROWS // 2, "answers differ"
        rounds = {
            "without a cache, together": ask_all(plain.url, _QUESTIONS),
            "cold, together": ask_all(cached.url, _QUESTIONS),
            "warm, together": ask_all(cached.url, _QUESTIONS),
            "warm, alone": [ask(cached.url, one) for one in _QUESTIONS],
        }
        for what, answers in rounds.items():
            for one, other in zip(expected, answers, strict=True):
                assert one.said == other.said, what
                assert one.logprob_error(other) < 1e-3, what
        for one in rounds["warm, together"] + rounds["warm, alone"]:
            assert one.cached_tokens == one.prompt_tokens - 1
        assert _reserved_bytes(plain) * _LEAST_SAVED[name] <= float_reserved_bytes
        streams = ask_all(
            cached.url, [_question(f"{topic} again") for topic in _TOPICS * 2], streamed=True
        )
        assert [one.reasons for one in streams] == [("length",)] * _ROWS


def test_what_no_format_fits_is_refused(parent: DaemonParent, tmp_path: Path) -> None:
    """A model of recurrent state alone: exit code, both settings, the reason, and no trace of Python."""
    import_mlx_lm()
    config = {
        "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "vocab_size": 128,
        "hidden_size": 32, "intermediate_size": 64, "state_size": 16, "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 1, "use_bias": False,
        "use_conv_bias": True, "tie_word_embeddings": True, "time_step_limit": [0.001, 0.1],
        "time_step_rank": 2, "eos_token_id": 0,
    }  # fmt: skip
    module = import_module("mlx_lm.models.mamba2")
    parameters = module.Model(module.ModelArgs.from_dict(config)).parameters()
    flat = dict(tree_flatten(parameters))
    tensors = {name: tuple(array.shape) for name, array in flat.items()}
    model = write_header_checkpoint(tmp_path / "mamba2", config=config, tensors=tensors)
    daemon = parent.start(str(model), *_BATCHED, "--cache-kv-quantization", "affine8")
    assert daemon.wait() == SettingsError.exit_code == 2
    said = daemon.log.read_text()
    assert "cache.kv_quantization" in said
    assert "model.path" in said
    assert "recurrent state" in said
    assert "Traceback" not in said
