"""Facts turned into metrics and log lines."""
