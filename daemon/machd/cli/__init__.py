"""The ``machd`` command: one module for each subcommand."""
