"""Common words that texts are put together from."""

from __future__ import annotations

WORDS = [
    "river",
    "stone",
    "garden",
    "window",
    "paper",
    "travel",
    "engine",
    "winter",
    "music",
    "letter",
    "doctor",
    "market",
    "silver",
    "forest",
    "bridge",
    "candle",
    "station",
    "kitchen",
    "mountain",
    "teacher",
    "orange",
    "village",
    "morning",
    "picture",
]
