"""The pages for browsers: their files, and how these are served."""
