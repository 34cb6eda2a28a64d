"""Generations: requests to the engine, events to their streams, limits of clients, stored responses."""
