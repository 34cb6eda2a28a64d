"""Questions of System One: how each is put to a model, and how its options' probabilities become an answer.

Each option has a label, and the probability of the label is the option's. Labels of one question are equally long, so
that none is the beginning of another one: letters for options, digits for levels, and words for yes and no.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

from machd.dialects.systemone.answer import Answer, ChoiceAnswer, NoulAnswer, ScoreAnswer
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import UnsupportedParameterError
from machd.generations.continuations import TokenIds, log_sum, softmax

_YES = ("yes", "Yes")
_NO = ("no", "No")


@dataclass(frozen=True, slots=True)
class Option:
    """A possible answer.

    Attributes:
        description: Empty without one.
        labels: Texts that a reply with this option consists of.
    """

    name: str
    description: str = ""
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A question as it is asked.

    Attributes:
        kind: ``noul``, ``choice`` or ``score``.
        text: What the model reads behind the state and the word ``Question:``.
    """

    question_id: str
    kind: str
    options: tuple[Option, ...]
    text: str

    def continuations(self, tokenizer: Tokenizer) -> tuple[tuple[TokenIds, ...], ...]:
        """Return the tokens of each option's labels.

        Raises:
            UnsupportedParameterError: The tokenizer does not tell labels of two options apart.
        """
        by_option = tuple(
            tuple(
                dict.fromkeys(
                    tuple(tokenizer.encode(label, add_special_tokens=False))
                    for label in option.labels
                )
            )
            for option in self.options
        )
        known = sorted(itertools.chain.from_iterable(by_option))
        # In order, a text that begins another one stands right before one that it begins.
        for first, second in itertools.pairwise(known):
            if second[: len(first)] == first:
                raise UnsupportedParameterError.at(
                    "model", "its tokenizer does not tell the labels of the options apart"
                )
        return by_option

    def answer(self, logprobs: Sequence[float], temperature: float) -> Answer:
        """Return the answer from the log-probability of each option."""
        shares = softmax(logprobs, temperature=temperature)
        option_mass = min(1.0, math.exp(log_sum(logprobs)))
        if self.kind == "noul":
            return NoulAnswer(noul=shares[0], temperature=temperature, option_mass=option_mass)
        named = dict(zip((one.name for one in self.options), shares, strict=True))
        confidence = _confidence(shares)
        if self.kind == "choice":
            return ChoiceAnswer(
                choice=max(named, key=named.__getitem__),
                probabilities=named,
                confidence=confidence,
                temperature=temperature,
                option_mass=option_mass,
            )
        return ScoreAnswer(
            score=sum(level * share for level, share in enumerate(shares)),
            legend={one.name: one.description for one in self.options},
            probabilities=named,
            confidence=confidence,
            temperature=temperature,
            option_mass=option_mass,
        )


def noul(question_id: str, instructions: str, *, if_true: str = "", if_false: str = "") -> Question:
    """Return a question of yes or no."""
    options = (Option("yes", if_true, _YES), Option("no", if_false, _NO))
    lines = [f"{one.name}: {one.description}" for one in options if one.description]
    return _question(question_id, "noul", instructions, options, [*lines, "Answer yes or no only."])


def choice(question_id: str, instructions: str, options: Sequence[Option]) -> Question:
    """Return a question for one of 1 to 255 options."""
    width = 1 if len(options) <= len(string.ascii_uppercase) else 2
    letters = map("".join, itertools.product(string.ascii_uppercase, repeat=width))
    labelled = tuple(
        Option(one.name, one.description, (label,))
        for one, label in zip(options, letters, strict=False)
    )
    lines = [
        f"{one.labels[0]}: {one.name}" + (f" - {one.description}" if one.description else "")
        for one in labelled
    ]
    word = "letter" if width == 1 else "letters"
    return _question(
        question_id,
        "choice",
        instructions,
        labelled,
        [*lines, f"Answer with the {word} of one option only."],
    )


def score(question_id: str, instructions: str, levels: Sequence[str]) -> Question:
    """Return a question for one of 1 to 10 levels."""
    options = tuple(Option(str(level), text, (str(level),)) for level, text in enumerate(levels))
    lines = [f"{one.name}: {one.description}" for one in options]
    return _question(
        question_id,
        "score",
        instructions,
        options,
        [*lines, "Answer with the number of one level only."],
    )


def _question(
    question_id: str,
    kind: str,
    instructions: str,
    options: tuple[Option, ...],
    lines: Sequence[str],
) -> Question:
    asked = f" {instructions}" if instructions else ""
    return Question(question_id, kind, options, "\n".join([asked, *lines]))


def _confidence(shares: Sequence[float]) -> float:
    """Return 1 where one option has everything and 0 where all are equally likely."""
    count = len(shares)
    return 1.0 if count == 1 else max(0.0, (count * max(shares) - 1) / (count - 1))
