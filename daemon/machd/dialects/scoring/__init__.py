"""Scores, ranks and classes of texts, in the words of Cohere, Jina and vLLM."""
