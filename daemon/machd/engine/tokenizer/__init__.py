"""Text to token ids and back, and the chat template that writes a prompt."""
