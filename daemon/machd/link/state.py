"""The published state of a loaded model: description, probe results and verdicts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from machd.capabilities.bitwise import BitwiseVerdict, Computing, judge_bitwise
from machd.capabilities.evidence import Results
from machd.capabilities.verdict import Support, Verdict
from machd.capabilities.verdicts import ModelVerdicts, judge, not_generating
from machd.engine.protocol.encoder import EncoderTask
from machd.engine.protocol.engine import ModelDescription


@dataclass(frozen=True, slots=True)
class ServedState:
    """State of a loaded model; replaced whole when results or verdicts change.

    Attributes:
        model: The model's description.
        results: Results of its probes.
        verdicts: Verdicts from rules and results.
        bitwise: Whether a row has the same bits however it is computed.
    """

    model: ModelDescription
    results: Results
    verdicts: ModelVerdicts
    bitwise: BitwiseVerdict

    @classmethod
    def of(cls, model: ModelDescription, results: Results) -> ServedState:
        """Make the state of a model from its probe results."""
        computing = Computing(
            backend=model.backend,
            blas=model.blas,
            is_native=model.is_native,
            kv_format=model.kv_format,
        )
        if model.encoder is None:
            verdicts = judge(model.cache, results)
            if model.adapter_obstacle:
                no = Verdict(Support.BLOCKED, model.adapter_obstacle)
                verdicts = replace(verdicts, batched_adapters=no)
        else:
            is_embedding = model.encoder.task is EncoderTask.EMBED
            verdicts = not_generating("vectors" if is_embedding else "labels")
        return cls(model, results, verdicts, judge_bitwise(results, computing))
