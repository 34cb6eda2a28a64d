"""The document of ``GET /v1/capabilities``, and one row of ``machd check --json``."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import asdict, replace

from machd.capabilities.bitwise import BitwiseVerdict
from machd.capabilities.evidence import Evidence
from machd.capabilities.facts import CacheFacts, KvCacheKind
from machd.capabilities.rules import PrefixVerdict
from machd.capabilities.verdict import Source, Support, Verdict
from machd.capabilities.verdicts import ModelVerdicts
from machd.capabilities.versions import Versions
from machd.engine.protocol.encoder import Activation, EncoderDescription, EncoderTask
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.step import ProposerKind
from machd.link.decode_mode import DecodeModeDecision
from machd.link.state import ServedState
from machd.settings.cache import KvFormatName
from machd.settings.speculation import RequestedSpeculation


class PrefixCacheReport(PrefixVerdict, frozen=True, kw_only=True):
    """Prefix caching: the verdict, and the tiers in use.

    Attributes:
        active: Whether prompts are kept: the model allows it, ``cache.prefix`` asks for it, and the memory
            limit is above 0.
        disk: Whether there is a disk tier, in ``cache.disk_dir``.
    """

    active: bool
    disk: bool


class KvQuantizationReport(Verdict, frozen=True, kw_only=True):
    """The KV format of the daemon.

    Attributes:
        active: The format in force, whatever the decode mode.
    """

    active: KvFormatName


class ExpertStreamingReport(Verdict, frozen=True, kw_only=True):
    """Experts on disk: the verdict, and whether they are on disk now.

    Attributes:
        active: Experts are on disk. No step is then dispatched before the last one's tokens are read, because a
            pass waits for what each layer's router chooses.
    """

    active: bool


class DistributedVerdict(Verdict, frozen=True, kw_only=True):
    """The verdict on several ranks that share the model.

    Attributes:
        modes: Ways in which the model's code can cut it, the better one first; see ``distributed.mode``.
    """

    modes: list[str]


class DistributedReport(DistributedVerdict, frozen=True, kw_only=True):
    """Several ranks: the verdict, and how many there are.

    Attributes:
        ranks: Ranks that compute the model now.
    """

    ranks: int


class SpeculationReport(Struct, frozen=True, kw_only=True):
    """Speculative decoding: verdicts alone and in a batch.

    Attributes:
        mode: The mode in force; left out where no daemon runs.
        verdict: Whether drafts can be verified; left out where that was not judged.
    """

    mode: ProposerKind | UnsetType = UNSET
    # Not a subclass of Verdict: its fields would come before the mode.
    support: Support | UnsetType = field(name="verdict", default=UNSET)
    reason: str | UnsetType = UNSET
    source: Source | UnsetType = UNSET
    evidence: Evidence | UnsetType = UNSET
    batched_specdec: Verdict | None = None


class SpeculationInForce(SpeculationReport, frozen=True, kw_only=True):
    """Speculative decoding in force, with counts since the start.

    Attributes:
        requested: What the settings ask for.
        mode: The proposer.
        mode_reason: Why it is that one, or none.
        max_draft_tokens: Most draft tokens of a row in a step; 0 without a proposer.
        drafted_tokens: Draft tokens that were verified.
        accepted_tokens: Draft tokens that were accepted.
        acceptance: Their share; null before any draft.
    """

    requested: RequestedSpeculation
    mode: ProposerKind
    mode_reason: str
    max_draft_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance: float | None


class CacheDetails(Struct, frozen=True, kw_only=True):
    """The model's caches.

    Attributes:
        keep_tokens: Sink tokens that windows never drop, each number once.
        window_tokens: Sizes of sliding windows, each once; empty without any.
        mergeable: Whether mlx-lm can merge them into a batch; whether answers are then right is in the
            verdict.
        bytes_per_token: Bytes of one position of one sequence.
        bytes_per_sequence: Bytes of a sequence of any length.
    """

    keep_tokens: list[int]
    window_tokens: list[int]
    mergeable: bool
    bytes_per_token: int
    bytes_per_sequence: int


class ModelCapabilities(Struct, frozen=True, kw_only=True):
    """One model or architecture. Null means not known yet.

    Attributes:
        architecture: mlx-lm's name of it.
        kv_cache_kind: Such as ``standard`` or ``hybrid_gdn``, from live cache objects.
        layers: Class of cache object to the number of such layers.
        nested: Classes inside cache lists; left out for other kinds than ``nested``.
        speculation: Left out where it was not judged, like ``chunked_prefill`` and ``cache``.
        trimmable: Whether every cache can be cut back to an earlier position.
    """

    architecture: str | None = None
    kv_cache_kind: str | None = None
    layers: dict[str, int] | None = None
    nested: list[str] | UnsetType = UNSET
    continuous_batching: Verdict | None = None
    batched_specdec: Verdict | None = None
    kv_quantization: Verdict | None = None
    prefix_cache: PrefixVerdict | None = None
    chunked_prefill: Verdict | UnsetType = UNSET
    expert_streaming: Verdict | None = None
    batched_adapters: Verdict | None = None
    speculation: SpeculationReport | UnsetType = UNSET
    bitwise: BitwiseVerdict | None = None
    trimmable: bool | None = None
    cache: CacheDetails | UnsetType = UNSET
    versions: Versions


class ModelSummary(Struct, frozen=True, kw_only=True):
    """The loaded model.

    Attributes:
        context_tokens: Positions that prompt and completion share.
        vocabulary_tokens: Width of the logits.
        weights_bytes: Bytes of the weights in memory.
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
    """Features that requests may use with the loaded model.

    Attributes:
        chat: The model has a chat template.
        tools: Tools can be called; machd describes them where the template does not.
        tool_format: Name of the model's format of calls; null where it has none of its own.
        system_messages: Where the chat template takes system messages: ``anywhere``, ``first`` or
            ``none``; elsewhere a user's turn carries them. Null without a template.
        reasoning: The model's thoughts are separated from its answer.
        vision: Messages may hold images.
        video: Messages may hold videos.
        embeddings: Texts become vectors.
        scores: Pairs of texts get scores, so that documents can be ranked.
        classes: Texts get classes.
    """

    chat: bool
    logprobs: bool
    tools: bool
    tool_format: str | None = None
    system_messages: str | None = None
    reasoning: bool
    structured_output: bool
    vision: bool
    video: bool
    embeddings: bool = False
    scores: bool = False
    classes: bool = False


class Device(Struct, frozen=True, kw_only=True):
    """The device that computes.

    Attributes:
        backend: ``cpu``, ``metal`` or ``cuda``.
        name: Name of the GPU; null on the CPU.
        memory_bytes: Memory of the device.
        blas: The library that multiplies matrices on the CPU; null elsewhere.
        blas_refused: Libraries that were not loaded because they multiply wrongly, each with its reason.
    """

    backend: str
    name: str | None = None
    memory_bytes: int | None = None
    blas: str | None = None
    blas_refused: tuple[str, ...] = ()


class EncoderReport(Struct, frozen=True, kw_only=True):
    """What the model makes of texts, by its own files.

    Attributes:
        task: ``embed`` for vectors, ``classify`` for a score of each label.
        pooling: Which of a text's positions a vector is made of; null for a classifier.
        normalised: Vectors have length 1.
        dimensions: Numbers of a vector, or labels.
        shorter_vectors: ``dimensions`` of a request may cut a vector.
        max_input_tokens: Most tokens of a text, or of a pair.
        labels: Of a classifier.
        activation: What turns a classifier's logits into scores.
        prompts: Names of the texts that can be put before a text.
        default_prompt: The one that is unless a request names another; null for none.
    """

    task: EncoderTask
    pooling: str | None
    normalised: bool
    dimensions: int
    shorter_vectors: bool
    max_input_tokens: int
    labels: tuple[str, ...]
    activation: Activation
    prompts: tuple[str, ...]
    default_prompt: str | None


class AdapterReport(Struct, frozen=True, kw_only=True):
    """An adapter of the model.

    Attributes:
        id: The name by which requests ask for it.
        scale: What it counts for; 1 is as it was trained.
        max_rank: The largest of its layers' ranks.
        layers: How many it changes.
        dtype: Its weights'; several with commas.
        base_model: What its files say of the model that it was trained on; null if nothing.
        size_bytes: Of its files.
    """

    id: str
    scale: float
    format: str
    max_rank: int
    layers: int
    dtype: str
    base_model: str | None
    size_bytes: int


class Capabilities(ModelCapabilities, frozen=True, kw_only=True):
    """The running daemon: its model, and how it is served.

    Attributes:
        max_b: Batch width cap, in sequences.
        encoder: What the model makes of texts; null for one that generates.
        adapters: Those that requests may name; see ``/v1/models`` for those of every model.
    """

    kv_quantization: KvQuantizationReport | None = None
    prefix_cache: PrefixCacheReport | None = None
    expert_streaming: ExpertStreamingReport | None = None
    distributed: DistributedReport | None = None
    speculation: SpeculationInForce
    decode_mode: DecodeModeDecision
    max_b: int
    model: ModelSummary
    features: Features
    device: Device
    encoder: EncoderReport | None = None
    adapters: list[AdapterReport] = []


def device_of(model: ModelDescription) -> Device:
    """Return the device that computes a model."""
    return Device(
        backend=model.backend,
        name=model.device_name,
        memory_bytes=model.device_memory_bytes or None,
        blas=model.blas,
        blas_refused=model.blas_refused,
    )


def encoder_report(encoder: EncoderDescription | None) -> EncoderReport | None:
    """Return what an encoder makes of texts; None for a model that generates."""
    if encoder is None:
        return None
    return EncoderReport(
        task=encoder.task,
        pooling=encoder.pooling or None,
        normalised=encoder.is_normalised,
        dimensions=encoder.dimensions,
        shorter_vectors=encoder.has_shorter_vectors,
        max_input_tokens=encoder.max_input_tokens,
        labels=encoder.labels,
        activation=encoder.activation,
        prompts=tuple(encoder.prompts),
        default_prompt=encoder.default_prompt,
    )


def model_capabilities(state: ServedState, versions: Versions) -> ModelCapabilities:
    """Return what is known of a model as the outside sees it.

    Args:
        state: The model and the verdicts on it.
        versions: The installed versions.
    """
    model = state.model
    return wire_capabilities(
        model.architecture,
        model.cache,
        state.verdicts,
        replace(versions, backend=model.backend, dtype=model.dtype),
        bitwise=state.bitwise,
    )


def wire_capabilities(
    architecture: str,
    facts: CacheFacts,
    verdicts: ModelVerdicts,
    versions: Versions,
    *,
    bitwise: BitwiseVerdict,
) -> ModelCapabilities:
    """One model or architecture as the outside sees it."""
    is_nested = facts.kind is KvCacheKind.NESTED
    return ModelCapabilities(
        architecture=architecture,
        kv_cache_kind=facts.kind.value,
        layers=facts.class_counts,
        nested=list(facts.nested_classes) if is_nested else UNSET,
        continuous_batching=verdicts.continuous_batching,
        batched_specdec=verdicts.batched_specdec,
        kv_quantization=verdicts.kv_quantization,
        prefix_cache=verdicts.prefix_cache,
        chunked_prefill=verdicts.chunked_prefill,
        expert_streaming=verdicts.expert_streaming,
        batched_adapters=verdicts.batched_adapters,
        speculation=SpeculationReport(
            **asdict(verdicts.speculation), batched_specdec=verdicts.batched_specdec
        ),
        bitwise=bitwise,
        trimmable=facts.trimmable,
        cache=CacheDetails(
            keep_tokens=list(facts.keep_tokens),
            window_tokens=list(facts.window_tokens),
            mergeable=facts.mergeable,
            bytes_per_token=facts.bytes_per_token,
            bytes_per_sequence=facts.bytes_per_sequence,
        ),
        versions=versions,
    )
