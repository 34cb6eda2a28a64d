"""Requests to a model, whatever the dialect: sampling, options, conversation, constraint."""
