"""The step: prefill, forward passes, verification.

Reading order: mlx_engine, row, verification (spans), decode_pass, span_choice, decoder; then prompts (prefill:
one prompt; strategies: the ways to compute chunks; prefills: all prompts; scores), and memory. ports names what the step
asks of proposers, blocks, experts, images and other ranks.
"""
