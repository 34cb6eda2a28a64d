"""What machd promises in seconds, as a scenario of the bench."""
