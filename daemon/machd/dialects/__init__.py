"""The languages that clients speak, one folder each, and what they share."""
