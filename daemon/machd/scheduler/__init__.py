"""Who runs next. Pure Python: no clock, no thread, no tensor."""
