"""Tiny checkpoints of vision-language families, which mlx-vlm loads and runs as it does real ones.

The weights are random. They serve to test loading, processors, embeddings and caches.
"""

from machd_probes.vision_families.checkpoint import write_family
from machd_probes.vision_families.family import FAMILIES, Family, UnsupportedFamily

__all__ = ["FAMILIES", "Family", "UnsupportedFamily", "write_family"]
