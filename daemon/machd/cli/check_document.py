"""``machd check MODEL --json``: a row of the matrix, and what holds for this model on this machine."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from machd.capabilities.fit import Fit
from machd.served.capabilities import Device, DistributedVerdict, ModelCapabilities


class MemoryFit(Struct, frozen=True, kw_only=True):
    """The verdict on the model's size: the device's memory, what the model needs of it, and why.

    Attributes:
        working_bytes: An estimate of what computing takes beside weights and KV cache.
        kv_budget_bytes: ``continuous_batching.kv_budget_gb`` as it would be in force here.
        total_bytes: Weights, working memory and the whole KV budget.
        device_memory_bytes: What the device can hold in all.
        available_bytes: What of it could be taken now.
    """

    verdict: Fit
    reason: str
    weights_bytes: int
    working_bytes: int
    kv_budget_bytes: int
    total_bytes: int
    device_memory_bytes: int
    available_bytes: int


class QuantizationReport(Struct, frozen=True, kw_only=True):
    """The format of the weights on disk.

    Attributes:
        mode: ``affine``, ``mxfp4``, ``nvfp4`` or ``mxfp8``.
        group_size: Weights that share a scale.
        native: Whether this backend multiplies with weights packed so.
        kept: Whether they would stay packed in memory; on a CPU machd unpacks what fits.
    """

    mode: str
    bits: int
    group_size: int
    native: bool
    kept: bool


class TensorTypeReport(Struct, frozen=True, kw_only=True):
    """The tensors of one type in a GGUF file.

    Attributes:
        type: ggml's name of it, such as ``Q4_K``.
        stored_bytes: What they take in the file.
        held_as: Their forms in memory: packed, such as "affine 4-bit, group 32", or a number type; empty where the
            model needs none of them.
        held_bytes: What they take in memory.
        exact: Whether every weight in memory is the file's own number.
    """

    type: str
    tensors: int
    stored_bytes: int
    held_as: list[str]
    held_bytes: int
    exact: bool


class ChatTemplateReport(Struct, frozen=True, kw_only=True):
    """The abilities of the model's chat template.

    Attributes:
        system_role: Whether a system message reaches the prompt as one.
        system_messages: Where it does: "anywhere", "first" or "none"; elsewhere a user's turn carries it.
        tools: Whether the template shows tools to the model.
        tool_format: mlx-lm's name for how the model writes calls; null where it knows none.
        reasoning: Whether the model marks its thoughts.
        reasoning_tags: What stands before and after them; null where it does not.
        reasoning_switch: Whether ``enable_thinking`` changes the prompt.
        reason: Why nothing could be found out, or what serving it needs; null otherwise.
    """

    present: bool
    system_role: bool
    system_messages: str
    tools: bool
    tool_format: str | None = None
    reasoning: bool
    reasoning_tags: list[str] | None = None
    reasoning_switch: bool
    reason: str | None = None


class ExpertsReport(Struct, frozen=True, kw_only=True):
    """The experts of a mixture-of-experts model.

    Attributes:
        count: Experts of all layers together.
        bytes: Bytes of all experts in memory.
        other_bytes: Bytes of all other weights in memory.
        on_disk: The settings leave experts on disk (``experts.resident_gb``).
        bank_bytes: Bytes of the experts in memory with these settings; where they leave none on disk,
            with ``--streaming``.
        streaming_bytes: Bytes of all weights in memory with that bank.
    """

    count: int
    bytes: int
    other_bytes: int
    on_disk: bool
    bank_bytes: int
    streaming_bytes: int


class VisionReport(Struct, frozen=True, kw_only=True):
    """The vision of a checkpoint with a vision tower.

    Attributes:
        served: Whether the model is served with it.
        reason: Why not; null if it is.
        processor: Class of the checkpoint's processor; null if it is not served.
        kinds: Kinds of media that messages may hold.
        example_pixels: Side of a square image, as an example.
        example_tokens: Prompt tokens that this image takes; null if it is not served.
    """

    served: bool
    reason: str | None = None
    processor: str | None = None
    kinds: list[str] = []
    example_pixels: int
    example_tokens: int | None = None


class RerankerReport(Struct, frozen=True, kw_only=True):
    """How a model that generates text scores documents.

    Attributes:
        true_token: Text of the token that calls a document relevant; the score is its share of both probabilities.
        false_token: Text of the token that calls it irrelevant.
        instruction: What documents are judged by where a request says nothing.
        prompt: ``chat_template`` where the model's own makes the prompt of a pair, else ``qwen3``: Qwen3-Reranker's.
    """

    true_token: str
    false_token: str
    instruction: str
    prompt: Literal["chat_template", "qwen3"]


class RankShare(Struct, frozen=True, kw_only=True):
    """The model cut for a number of ranks in one way.

    Attributes:
        weights_bytes: Weights of the rank that has most of them; null if the model cannot be cut so.
        memory_bytes: What each rank's machine needs: its weights, working memory and the whole KV budget;
            null likewise.
        reason: Why it cannot be cut so; null if it can.
    """

    mode: Literal["tensor", "pipeline"]
    ranks: int
    weights_bytes: int | None = None
    memory_bytes: int | None = None
    reason: str | None = None


class DistributedCheck(DistributedVerdict, frozen=True, kw_only=True):
    """Several ranks that share the model: the verdict, and what each number of them would need.

    Attributes:
        shares: From 2 to 8 ranks, in each way that the model's code knows.
    """

    shares: list[RankShare]


class QualityReport(Struct, frozen=True, kw_only=True):
    """The quality that ``model.quantize`` costs, as perplexity of a fixed text; lower is better.

    Attributes:
        perplexity: Perplexity of the weights in that format.
        unquantised_perplexity: Perplexity of the weights without ``model.quantize``.
    """

    perplexity: float
    unquantised_perplexity: float


class ModelCheck(ModelCapabilities, frozen=True, kw_only=True):
    """One model on one machine.

    Attributes:
        model: The name that requests would use.
        bytes_per_token: KV cache of one more position in one sequence.
        bytes_per_sequence: What a sequence costs whatever its length.
        context_tokens: Positions that prompt and completion share.
        budget_context_tokens: Those that the KV budget allows one sequence.
        fitting_context_tokens: Those that the budget and the device's memory allow it.
        weights_bytes: What the weights would take in memory.
        stored_bytes: What they take on disk.
        quantization: Null when the weights are plain.
        tensor_types: A GGUF file's tensors by type, the largest first; null for a directory.
        quantised_to: The format that ``model.quantize`` names, in full; null without it.
        quality: The quality that it costs; null without --measure.
        experts: The experts of a mixture-of-experts model; null for another.
        vision: The model's vision; null for a checkpoint without a vision tower.
        reranker: How it scores documents; null for a model that is no reranker.
        distributed: Several ranks that share the model, and the machines that they need.
        native_quantization: Whether this backend multiplies with packed weights, by mode.
        default_sampling: What holds where a request says nothing, of the checkpoint's
            ``generation_config.json``.
        notes: What a person should know.
    """

    model: str
    fit: MemoryFit
    bytes_per_token: int
    bytes_per_sequence: int
    context_tokens: int
    budget_context_tokens: int
    fitting_context_tokens: int
    parameters: int
    weights_bytes: int
    stored_bytes: int
    quantization: QuantizationReport | None = None
    tensor_types: list[TensorTypeReport] | None = None
    quantised_to: str | None = None
    quality: QualityReport | None = None
    experts: ExpertsReport | None = None
    vision: VisionReport | None = None
    reranker: RerankerReport | None = None
    distributed: DistributedCheck
    native_quantization: dict[str, bool]
    chat_template: ChatTemplateReport
    default_sampling: dict[str, float]
    device: Device
    notes: list[str]
