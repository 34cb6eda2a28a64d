"""Replacements for mlx-lm's layers: fused llama, CPU attention, repairs for batches."""
