"""The system's Chromium, in which tests open machd's pages."""
