"""The life of the front process: its state, the settings in force, and reports to the service manager."""
