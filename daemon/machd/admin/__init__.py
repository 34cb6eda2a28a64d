"""The admin API, one file for each subject."""
