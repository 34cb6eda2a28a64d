"""The step: prefill, forward passes, verification.

Reading order: mlx_engine, decoder_row, verification (spans), decode_pass, proposals,
tokens_ahead, span_choice, decider, decoder; then prompts, memory. ports names what the step asks of
grammars, proposers and blocks; absent_parts are those that an engine does without.
"""
