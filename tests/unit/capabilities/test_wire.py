"""Facts and verdicts on the wire: every one arrives, under the contract's names."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from machd.capabilities.bitwise import BitwiseVerdict
from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.capabilities.verdict import Support
from machd.capabilities.verdicts import judge
from machd.capabilities.versions import Versions
from machd.served.capabilities import ModelCapabilities, wire_capabilities

KV = LayerCacheFacts("KVCache")
ROTATING = LayerCacheFacts("RotatingKVCache", window_tokens=8)
SINKS = LayerCacheFacts("RotatingKVCache", window_tokens=64, keep=4)
MAMBA = LayerCacheFacts("ArraysCache", owner="Mamba", trimmable=False)
CHUNKED = LayerCacheFacts("ChunkedKVCache", mergeable=False)
LIST = LayerCacheFacts("CacheList", trimmable=False, nested=(MAMBA, KV))

_BITWISE = BitwiseVerdict(value=True, reason="measured")
_VERSIONS = Versions(machd="1", mlx="2", mlx_lm="3", backend="cpu", dtype="float32")


def _row(*layers: LayerCacheFacts, results: tuple[ProbeResult, ...] = ()) -> Any:
    facts = CacheFacts(layers, bytes_per_token=24, bytes_per_sequence=7)
    verdicts = judge(facts, results)
    row = wire_capabilities("some", facts, verdicts, _VERSIONS, bitwise=_BITWISE)
    return json.loads(msgspec.json.encode(row))


def test_a_row_has_every_key_of_the_contract() -> None:
    """Nothing that is known is left out, and versions come as they were given."""
    row = _row(KV, KV)

    assert set(row) == {
        "architecture",
        "kv_cache_kind",
        "layers",
        "continuous_batching",
        "batched_specdec",
        "kv_quantization",
        "prefix_cache",
        "chunked_prefill",
        "expert_streaming",
        "batched_adapters",
        "speculation",
        "bitwise",
        "trimmable",
        "cache",
        "versions",
    }
    assert (row["architecture"], row["kv_cache_kind"]) == ("some", "standard")
    assert row["layers"] == {"KVCache": 2}
    assert row["trimmable"] is True
    assert row["bitwise"] == {"value": True, "reason": "measured"}
    assert row["versions"] == {
        "machd": "1", "mlx": "2", "mlx_lm": "3", "backend": "cpu", "dtype": "float32",
    }  # fmt: skip
    assert row["prefix_cache"]["extent"] == "full"
    assert row["speculation"]["batched_specdec"] == row["batched_specdec"]
    assert "mode" not in row["speculation"]


@pytest.mark.parametrize("layers", [[KV], [ROTATING], [MAMBA, KV], [LIST], [CHUNKED], []])
def test_verdicts_arrive_as_they_are(layers: list[LayerCacheFacts]) -> None:
    """Support, reason and source of each feature are those of the judgement."""
    facts = CacheFacts(tuple(layers), 1, 0)
    row = _row(*layers)

    for feature, verdict in judge(facts, ()).by_feature().items():
        assert row[feature]["verdict"] == verdict.support.value
        assert row[feature]["reason"] == verdict.reason
        assert row[feature]["source"] == "rule"
        assert "evidence" not in row[feature]


def test_evidence_arrives_with_what_stands_on_it() -> None:
    """A measured verdict says so and carries its figures; its neighbours do not."""
    passed = ProbeResult("batch_parity", Outcome.PASSED, "", Evidence(0, 1.2e-5, 1.1e-5, 12))
    row = _row(LIST, results=(passed,))

    assert row["continuous_batching"]["verdict"] == Support.SUPPORTED.value
    assert row["continuous_batching"]["source"] == "measured"
    assert row["continuous_batching"]["evidence"] == {
        "token_mismatches": 0, "max_logprob_diff": 1.2e-5, "noise_floor": 1.1e-5, "cases": 12,
    }  # fmt: skip
    assert row["chunked_prefill"]["source"] == "rule"


def test_the_caches_are_told_in_detail() -> None:
    """Sink tokens, windows, merging and bytes; kinds inside lists where there are lists."""
    row = _row(KV, ROTATING, SINKS, LIST)

    assert row["cache"] == {
        "keep_tokens": [0, 4],
        "window_tokens": [8, 64],
        "mergeable": True,
        "bytes_per_token": 24,
        "bytes_per_sequence": 7,
    }
    assert row["nested"] == ["ArraysCache", "KVCache"]
    assert row["trimmable"] is False
    assert _row(CHUNKED)["cache"]["mergeable"] is False


def test_a_row_is_read_back_as_it_was() -> None:
    """What ``machd check --json`` writes, a strict reader of the same shape takes."""
    facts = CacheFacts((LIST,), 1, 0)
    row = wire_capabilities("some", facts, judge(facts), _VERSIONS, bitwise=_BITWISE)

    assert msgspec.json.decode(msgspec.json.encode(row), type=ModelCapabilities) == row
