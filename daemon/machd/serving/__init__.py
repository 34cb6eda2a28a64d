"""The one engine thread, its inbox, and the fan-out to clients."""
