"""The life of the front process: its state, the settings in force, and what the service manager is told."""
