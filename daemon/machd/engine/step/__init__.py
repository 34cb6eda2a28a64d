"""What a step computes: prefill, forward passes, sampling, verification; the part to read first."""
