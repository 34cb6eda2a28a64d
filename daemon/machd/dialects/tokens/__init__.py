"""Tokenisation, in vLLM's and llama.cpp's words."""
