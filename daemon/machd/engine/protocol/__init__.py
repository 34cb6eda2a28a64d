"""What the scheduler and the serving loop know of an engine: plain data and Protocols, no tensor."""
