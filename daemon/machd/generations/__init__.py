"""Generations: requests to the engine, events to their readers, limits of clients, what is kept of answers."""
