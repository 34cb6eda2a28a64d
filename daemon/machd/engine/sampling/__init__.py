"""Sampling: one token for each row, from its logits, its parameters, its history and its grammar's state.

Reading order: sampling_state, sampler, filters, gumbel_noise; then logprobs and draft_sampling.
"""
