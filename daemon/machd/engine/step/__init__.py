"""The step: prefill, forward passes, sampling, verification.

Reading order: mlx_engine, decoder_row, verification (spans), decode_pass, sampling with filters, proposals,
tokens_ahead, span_choice, decider, decoder; then prompts, memory, draft_sampling. ports names what the step asks of
grammars, proposers and blocks; absent_parts are those that an engine does without.
"""
