"""GGUF files: header, tensors, tokenizer, and the families that machd reads."""
