"""What a model can do here and how that is known. Pure: facts in, verdicts out."""
