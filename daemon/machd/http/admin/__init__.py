"""The admin API: another application, on a listener of its own."""
