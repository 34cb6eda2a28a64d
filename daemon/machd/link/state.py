"""A loaded model as its engine process publishes it: what it is, what was measured of it, what follows."""

from __future__ import annotations

from dataclasses import dataclass

from machd.capabilities.bitwise import BitwiseVerdict, Computing, judge_bitwise
from machd.capabilities.evidence import Results
from machd.capabilities.verdicts import ModelVerdicts, judge
from machd.engine.protocol.engine import ModelDescription


@dataclass(frozen=True, slots=True)
class ServedState:
    """Replaced whole when something else is known of the model.

    Attributes:
        model: Its description.
        results: What its probes found.
        verdicts: Its capabilities, by rules and results.
        bitwise: Whether a row has the same bits however it is computed.
    """

    model: ModelDescription
    results: Results
    verdicts: ModelVerdicts
    bitwise: BitwiseVerdict

    @classmethod
    def of(cls, model: ModelDescription, results: Results) -> ServedState:
        """Judge a model."""
        computing = Computing(
            backend=model.backend,
            blas=model.blas,
            is_native=model.is_native,
            kv_format=model.kv_format,
        )
        return cls(model, results, judge(model.cache, results), judge_bitwise(results, computing))
