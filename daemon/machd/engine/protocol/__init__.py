"""The engine as the scheduler and serving know it: plain data and protocols, no tensor."""
