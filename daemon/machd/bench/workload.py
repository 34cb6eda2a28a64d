"""What is asked for: prompts of about a given length that share no beginning."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Workload"]

# Common enough that tokenizers for English take one token for each, the space before it included.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are"),
    *("as", "with", "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by"),
    *("word", "but", "not", "what", "all", "were", "we", "when", "your", "can", "said", "there"),
    *("use", "an", "each", "which", "she", "do", "how", "their", "if", "will", "up", "other"),
    *("about", "out", "many", "then", "them", "these", "so", "some", "her", "would", "make"),
    *("like", "him", "into", "time", "has", "look", "two", "more", "write", "go", "see", "number"),
    *("no", "way", "could", "people", "my", "than", "first", "water", "been", "call", "who"),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of every level: the same for every mode and server.

    Attributes:
        requests: Requests for each level; at least as many as its concurrency are sent.
        prompt_tokens: About how many tokens a prompt has; the server's count is what is reported.
        max_tokens: Tokens that every answer is to have.
        seed: Another one for each run: a server that keeps running may remember the last one's
            prompts.
    """

    requests: int
    prompt_tokens: int
    max_tokens: int
    seed: int

    def prompt(self, level: int, index: int) -> str:
        """A request's prompt: the same in every mode, unlike any other from its first words on.

        A prompt that began like another would be answered from a server's prefix cache.
        """
        words = random.Random(f"{self.seed}/{level}/{index}")  # noqa: S311 - wants to be repeatable, not secret
        return " ".join(words.choice(_WORDS) for _ in range(self.prompt_tokens))

    def request_count(self, concurrency: int) -> int:
        """How many requests a level sends."""
        return max(self.requests, concurrency)
