"""The step: prefill, forward passes, verification.

Reading order: mlx_engine; ports (what the step asks of proposers, blocks, experts, images and other ranks); verification
(a span), row, decode_pass, span_choice, decoder; then prompts (prefill: one prompt; strategies: the ways to compute
chunks; prefills: all prompts; scores), and memory. With ranks nothing looks ahead or is packed, and mlx-lm cuts the model.
"""
