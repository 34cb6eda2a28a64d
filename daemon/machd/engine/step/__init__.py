"""The step: prefill, forward passes, sampling, verification.

Reading order: mlx_engine, decoder_row, verification (spans), decode_pass, sampling with filters, proposals,
tokens_ahead, span_choice, decider, decoder; then prefill with prompt_scores, memory, draft_sampling. ports names
what the step asks of grammars, proposers and blocks.
"""
