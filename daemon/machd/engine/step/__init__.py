"""The step: prefill, forward passes, sampling, verification.

Reading order: mlx_engine, decoder_row, decoder with decode_pass and verification (spans), sampling with
filters, look_ahead; then prefill with prompt_scores, tokens_ahead with proposals, memory. ports names what
the step asks of grammars, proposers and blocks.
"""
