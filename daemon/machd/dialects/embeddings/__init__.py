"""Vectors of texts, in OpenAI's and llama.cpp's words."""
