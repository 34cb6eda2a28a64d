"""Conversations to prompts, and text to pieces of an answer. Pure: no thread, no clock, no engine that computes."""
