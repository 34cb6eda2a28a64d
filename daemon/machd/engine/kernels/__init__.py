"""What machd computes in place of mlx-lm's layers: fused llama, CPU attention, repairs for batches."""
