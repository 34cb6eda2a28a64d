"""What is asked for: prompts of about a given length that share no beginning."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

# Common enough that tokenizers for English take one token for each, the space before it included.
COMMON_WORDS = (
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
        requests: Requests for each level, rounded up to the same number for every client.
        prompt_tokens: About how many tokens a prompt has; the server's count is what is reported.
        max_tokens: Tokens that every answer is to have.
        seed: Another one for each run: a server that keeps running may remember the last one's
            prompts.
    """

    requests: int
    prompt_tokens: int
    max_tokens: int
    seed: int

    def prompt(self, series: str, index: int, *, tokens: int | None = None) -> str:
        """A request's prompt: the same in every mode, unlike any other from its first words on.

        A prompt that began like another would be answered from a server's prefix cache.

        Args:
            series: What it is for; every level and every scenario has prompts of its own.
            index: Which one of the series.
            tokens: About how long; ``prompt_tokens`` unless given.
        """
        words = random.Random(f"{self.seed}/{series}/{index}")  # noqa: S311 - wants to be repeatable, not secret
        return " ".join(words.choice(COMMON_WORDS) for _ in range(tokens or self.prompt_tokens))

    def prompts(self, series: str, count: int) -> list[str]:
        """The first prompts of a series."""
        return [self.prompt(series, index) for index in range(count)]

    def request_count(self, concurrency: int) -> int:
        """How many requests a level sends: every client the same number.

        A last round that keeps only some of the clients busy would not be that concurrency.
        """
        return max(1, math.ceil(self.requests / concurrency)) * concurrency
