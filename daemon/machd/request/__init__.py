"""What is asked of a model, whatever the dialect: sampling, options, conversation, constraint."""
