"""LoRA adapters: read from their files, kept in memory, and computed beside the base model, each row with its own."""
