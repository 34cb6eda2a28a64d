"""machd: an OpenAI-compatible inference daemon for MLX."""

__version__ = "0.1.0"
