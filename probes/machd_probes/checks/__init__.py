"""One probe a file; the file's name is the probe's. Each is a function of a subject."""
