"""Capabilities, cache numbers and health have the contract's shape."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from machd.capabilities.evidence import Evidence
from machd.capabilities.verdict import Source, Support, Verdict
from machd.capabilities.versions import Versions
from machd.dialects.health import Health
from machd.engine.protocol.step import ProposerKind
from machd.link.decode_mode import DecodeModeDecision
from machd.link.kv_memory import KvMemory
from machd.scheduler.events import DecodeMode
from machd.scheduler.prefix_limits import PrefixReading
from machd.served.cache_stats import CacheStats
from machd.served.capabilities import (
    Capabilities,
    Device,
    Features,
    ModelCapabilities,
    ModelSummary,
    SpeculationInForce,
)


def _wire(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


def test_cache_stats_have_the_contract_s_keys() -> None:
    """Numbers that are not kept are null, not missing."""
    stats = CacheStats(
        status="stale_generation_in_flight",
        as_of="2030-01-01T00:00:00Z",
        kv=KvMemory(budget_bytes=3, reserved_bytes=2, used_bytes=1),
    )
    assert _wire(stats) == {
        "status": "stale_generation_in_flight",
        "as_of": "2030-01-01T00:00:00Z",
        "kv": {"budget_bytes": 3, "reserved_bytes": 2, "used_bytes": 1},
        "prefix": None,
        "disk": None,
        "expert_bank": None,
        "encoder": None,
        "vectors": None,
    }


def test_prefix_stats_have_the_contract_s_keys() -> None:
    """The ten numbers of the contract, under their names; and what is told besides."""
    promised = {
        "queries",
        "hits",
        "prefix_hits",
        "misses",
        "entries",
        "blocks",
        "shared_blocks",
        "bytes",
        "bytes_saved",
        "evictions",
    }
    added = {"pinned_blocks", "pinned_bytes", "limit_bytes", "saved_blocks", "saved_bytes"}
    assert set(PrefixReading.__struct_fields__) == promised | added


def test_a_measured_row_has_the_contract_s_shape() -> None:
    """The row of the contract's example comes out as it stands there."""
    row = ModelCapabilities(
        architecture="qwen3",
        kv_cache_kind="standard",
        layers={"KVCache": 28},
        continuous_batching=Verdict(
            Support.SUPPORTED,
            "measured",
            Source.MEASURED,
            evidence=Evidence(
                token_mismatches=0, max_logprob_diff=1.2e-05, noise_floor=1.1e-05, cases=12
            ),
        ),
        batched_specdec=Verdict(Support.BLOCKED, "no draft model"),
        trimmable=True,
        versions=Versions(machd="1"),
    )
    wire = _wire(row)
    assert list(wire) == [
        "architecture",
        "kv_cache_kind",
        "layers",
        "continuous_batching",
        "batched_specdec",
        "kv_quantization",
        "prefix_cache",
        "expert_streaming",
        "batched_adapters",
        "bitwise",
        "trimmable",
        "versions",
    ]
    assert wire["continuous_batching"]["evidence"]["cases"] == 12
    assert wire["batched_specdec"] == {
        "verdict": "blocked", "reason": "no draft model", "source": "rule",
    }  # fmt: skip
    assert set(wire["versions"]) == {"machd", "mlx", "mlx_lm", "backend", "dtype"}


def test_capabilities_without_verdicts() -> None:
    """Before anything is probed, the answer has every key and null for what is not known."""
    wire = _wire(
        Capabilities(
            versions=Versions(machd="1"),
            decode_mode=DecodeModeDecision(DecodeMode.BATCHED, DecodeMode.SINGLE, "loading"),
            max_b=4,
            model=ModelSummary(
                id="m",
                context_tokens=8,
                vocabulary_tokens=9,
                parameters=1,
                weights_bytes=4,
                dtype="float32",
            ),
            features=Features(
                chat=False,
                logprobs=True,
                tools=False,
                reasoning=False,
                structured_output=False,
                vision=False,
                video=False,
            ),
            speculation=SpeculationInForce(
                requested="auto",
                mode=ProposerKind.OFF,
                mode_reason="no proposer",
                max_draft_tokens=0,
                drafted_tokens=0,
                accepted_tokens=0,
                acceptance=None,
            ),
            device=Device(backend="cpu"),
        )
    )
    assert wire["architecture"] is None
    assert wire["model"]["id"] == "m"
    assert wire["continuous_batching"] is None
    assert wire["distributed"] is None
    assert wire["decode_mode"] == {"requested": "batched", "active": "single", "reason": "loading"}
    assert {"max_b", "features", "speculation", "device"} <= set(wire)
    assert wire["speculation"]["acceptance"] is None
    assert "verdict" not in wire["speculation"]


def test_health_is_three_fields() -> None:
    """A probe reads a status, a state and a reason."""
    assert _wire(Health(status="ok", state="ready")) == {
        "status": "ok",
        "state": "ready",
        "reason": None,
    }
