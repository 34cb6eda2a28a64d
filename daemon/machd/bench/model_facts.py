"""What was measured: enough of the model to know whether two reports can be compared."""

from __future__ import annotations

from msgspec import Struct

from machd.capabilities.document import Capabilities
from machd.capabilities.versions import Versions


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What was served, as the server says; only machd says more than the name.

    Attributes:
        weights_bytes: What the weights take in memory.
        backend: ``cpu``, ``metal`` or ``cuda``.
        blas: The library that multiplies matrices on the CPU.
        versions: Of machd, mlx and mlx-lm.
    """

    id: str
    weights_bytes: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    backend: str | None = None
    blas: str | None = None
    versions: Versions | None = None

    @classmethod
    def of(cls, model_id: str, capabilities: Capabilities | None) -> ModelFacts:
        """Take from machd's capabilities what identifies a measurement."""
        if capabilities is None:
            return cls(id=model_id)
        model = capabilities.model
        return cls(
            id=model_id,
            weights_bytes=model.weights_bytes,
            dtype=model.dtype,
            quantization=model.quantization,
            backend=capabilities.device.backend,
            blas=capabilities.device.blas,
            versions=capabilities.versions,
        )
