"""What a model can do here: ``GET /v1/capabilities``, and one row of ``machd check --json``."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

__all__ = [
    "Capabilities",
    "DecodeMode",
    "DecodeModeReport",
    "Device",
    "Evidence",
    "FeatureVerdict",
    "Features",
    "ModelCapabilities",
    "ModelSummary",
    "SpeculationReport",
    "Versions",
]

DecodeMode: TypeAlias = Literal["single", "speculative", "batched"]
"""The values of ``X-Decode-Mode``."""


class Evidence(Struct, frozen=True, kw_only=True):
    """What a probe measured.

    Attributes:
        token_mismatches: Greedy tokens that differ from the reference.
        max_logprob_diff: Largest difference of a log-probability, in nats.
        noise_floor: The same difference between two runs that ought to be equal, in nats.
        cases: Prompts and batch shapes compared.
    """

    token_mismatches: int
    max_logprob_diff: float
    noise_floor: float
    cases: int


class FeatureVerdict(Struct, frozen=True, kw_only=True):
    """Whether a feature works with this model, and why that is the answer.

    Attributes:
        source: Whether facts and a rule say so, or a measurement; left out where only one of
            them is possible.
        evidence: The measurement; left out without one.
    """

    verdict: Literal["supported", "blocked", "unknown"]
    reason: str
    source: Literal["rule", "measured"] | UnsetType = UNSET
    evidence: Evidence | UnsetType = UNSET


class Versions(Struct, frozen=True, kw_only=True):
    """What the verdicts hold for. Null where nothing is loaded that could tell."""

    machd: str
    mlx: str | None = None
    mlx_lm: str | None = None
    backend: str | None = None
    dtype: str | None = None


class ModelCapabilities(Struct, frozen=True, kw_only=True):
    """One model or architecture. What is not known yet is null.

    Attributes:
        architecture: mlx-lm's name of it.
        kv_cache_kind: Such as ``standard`` or ``hybrid_gdn``, from live cache objects.
        layers: Class of cache object to how many there are.
        nested: Classes inside cache lists; left out for other kinds than ``nested``.
        trimmable: Whether every cache can be cut back to an earlier position.
    """

    architecture: str | None = None
    kv_cache_kind: str | None = None
    layers: dict[str, int] | None = None
    nested: list[str] | UnsetType = UNSET
    continuous_batching: FeatureVerdict | None = None
    batched_specdec: FeatureVerdict | None = None
    kv_quantization: FeatureVerdict | None = None
    prefix_cache: FeatureVerdict | None = None
    trimmable: bool | None = None
    versions: Versions


class DecodeModeReport(Struct, frozen=True, kw_only=True):
    """How sequences are decoded: what the settings ask for, what runs, and why that."""

    requested: DecodeMode
    active: DecodeMode
    reason: str


class ModelSummary(Struct, frozen=True, kw_only=True):
    """The loaded model.

    Attributes:
        context_tokens: Positions that prompt and completion share.
        vocabulary_tokens: Width of the logits.
        weights_bytes: What the weights take in memory.
        quantization: Null when the weights are plain.
    """

    id: str
    context_tokens: int
    vocabulary_tokens: int
    parameters: int
    weights_bytes: int
    dtype: str
    quantization: str | None = None


class Features(Struct, frozen=True, kw_only=True):
    """What requests may use with the loaded model.

    Attributes:
        chat: The model has a chat template.
    """

    chat: bool
    logprobs: bool
    tools: bool
    reasoning: bool
    structured_output: bool


class SpeculationReport(Struct, frozen=True, kw_only=True):
    """Speculative decoding: the mode in use, and the verdict on using it in a batch."""

    mode: Literal["off", "ngram", "draft", "dflash"]
    batched_specdec: FeatureVerdict | None = None


class Device(Struct, frozen=True, kw_only=True):
    """What computes.

    Attributes:
        backend: ``cpu``, ``metal`` or ``cuda``.
        name: What the device calls itself.
        memory_bytes: What it can hold.
        blas: The library that multiplies matrices on the CPU; null elsewhere.
    """

    backend: str
    name: str | None = None
    memory_bytes: int | None = None
    blas: str | None = None


class Capabilities(ModelCapabilities, frozen=True, kw_only=True):
    """The running daemon: its model, and how it is served.

    Attributes:
        max_b: Batch width cap, in sequences.
    """

    decode_mode: DecodeModeReport
    max_b: int
    model: ModelSummary
    features: Features
    speculation: SpeculationReport
    device: Device
