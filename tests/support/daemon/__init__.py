"""Daemons as tests run them: in the test's process, forked, as a command, as a service."""
