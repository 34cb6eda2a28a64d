"""The step: prefill, forward passes, sampling, verification. Read mlx_engine.py first, then decoder.py."""
