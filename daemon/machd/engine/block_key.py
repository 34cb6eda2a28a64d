"""What two daemons must have in common for one to use the other's blocks."""

from __future__ import annotations

from machd.engine.loader import LoadedModel

__all__ = ["block_key"]


def block_key(loaded: LoadedModel) -> bytes:
    """Of the weights, their dtype, how caches are kept, and the versions of what computes."""
    description = loaded.description
    return f"{description.model_id} {description.dtype} {loaded.kv_format.name}".encode()
