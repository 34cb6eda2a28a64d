"""OpenAI's responses."""
