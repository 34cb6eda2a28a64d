"""Requests of ``POST /v1/systemone``, in the words of TypeSafe's System One API."""

from __future__ import annotations

from typing import Annotated, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.dialects.systemone.questions import Option, Question, choice, noul, score
from machd.dialects.wire import bounds
from machd.dialects.wire.generation_request import GenerationRequest, priority_name
from machd.dialects.wire.raw_json import (
    Allowance,
    Content,
    content_text,
    is_given,
    raw_object,
    text_of,
)
from machd.dialects.wire.refusal import Refused, only, refuse_unsupported
from machd.errors import InvalidRequestError
from machd.request.generation import PriorityName

_QuestionId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
_OptionName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]

# A temperature near 0 would make any likelier option certain, one near infinity all equally likely.
_Temperature: TypeAlias = Annotated[float, Meta(ge=0.01, le=100.0)]

_ThinkingOff: TypeAlias = Annotated[Raw | UnsetType, only({"enable_thinking": False})]
"""Thoughts are always left out: an answer is read where the reply begins."""


class NoulQuestion(Struct, frozen=True, kw_only=True, tag_field="type", tag="noul"):
    """Whether a statement is true.

    Attributes:
        criteria: What true and false mean: an object with ``true``, ``false`` or both; or one text about both.
    """

    instructions: Content = UNSET
    criteria: Content = UNSET

    def question(self, question_id: str, where: str, allowance: Allowance) -> Question:
        """Return the question, once it is checked; see :meth:`SystemOneRequest.asked`."""
        instructions = content_text(
            self.instructions, param=f"{where}.instructions", allowance=allowance
        )
        if not is_given(self.criteria) or not bytes(self.criteria).startswith(b"{"):
            about = content_text(self.criteria, param=f"{where}.criteria", allowance=allowance)
            return noul(question_id, "\n".join(filter(None, (instructions, about))))
        meanings = raw_object(self.criteria, param=f"{where}.criteria", allowance=allowance)
        if not meanings.keys() <= {"true", "false"}:
            raise InvalidRequestError.at(
                f"{where}.criteria", "expected an object with true, false or both"
            )
        return noul(
            question_id,
            instructions,
            if_true=text_of(meanings.get("true"), param=f"{where}.criteria.true"),
            if_false=text_of(meanings.get("false"), param=f"{where}.criteria.false"),
        )


class ChoiceQuestion(Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """Which option fits best.

    Attributes:
        criteria: Options by name, each with a description or null.
    """

    instructions: Content = UNSET
    criteria: Annotated[dict[_OptionName, Content], Meta(min_length=1, max_length=255)]

    def question(self, question_id: str, where: str, allowance: Allowance) -> Question:
        """Return the question, once it is checked; see :meth:`SystemOneRequest.asked`."""
        return choice(
            question_id,
            content_text(self.instructions, param=f"{where}.instructions", allowance=allowance),
            [
                Option(name, content_text(one, param=f"{where}.criteria", allowance=allowance))
                for name, one in self.criteria.items()
            ],
        )


class ScoreQuestion(Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """Where the state falls on an ordered scale.

    Attributes:
        criteria: The levels, lowest first.
    """

    instructions: Content = UNSET
    criteria: Annotated[list[Content], Meta(min_length=1, max_length=10)]

    def question(self, question_id: str, where: str, allowance: Allowance) -> Question:
        """Return the question, once it is checked; see :meth:`SystemOneRequest.asked`."""
        return score(
            question_id,
            content_text(self.instructions, param=f"{where}.instructions", allowance=allowance),
            [
                content_text(one, param=f"{where}.criteria[{level}]", allowance=allowance)
                for level, one in enumerate(self.criteria)
            ],
        )


class SystemOneRequest(GenerationRequest, frozen=True, kw_only=True):
    """A state and questions about it.

    Attributes:
        state: What the questions are about.
        questions: By ids of the client's own, which the answers have too.
        temperature: Divides log-probabilities of options before they are normalised; 1, the default, leaves the
            model's own.
        cache_salt: As of a chat completion.
        priority: As of a chat completion.
    """

    state: Content
    questions: Annotated[
        dict[_QuestionId, NoulQuestion | ChoiceQuestion | ScoreQuestion],
        Meta(min_length=1, max_length=64),
    ]
    temperature: _Temperature | None = None
    cache_salt: bounds.CacheSalt | None = None
    priority: PriorityName | bounds.PriorityNumber | None = None

    images: Refused = UNSET
    instructions: Refused = UNSET
    prefix: Refused = UNSET
    decision_template: Refused = UNSET
    chat_template_kwargs: _ThinkingOff = UNSET

    def checked(self) -> Self:
        """Check that no field asks for what machd does not do, and that state and questions can be read."""
        refuse_unsupported(self)
        self.asked()
        return self

    def asked(self) -> tuple[str, list[Question]]:
        """Return the state's text and the questions.

        Raises:
            InvalidRequestError: A part is of a wrong type or cannot be read, or there is no state.
        """
        allowance = Allowance()
        state = content_text(self.state, param="state", allowance=allowance)
        if not state:
            raise InvalidRequestError.at("state", "expected what the questions are about")
        return state, [
            one.question(question_id, f"questions[{index}]", allowance)
            for index, (question_id, one) in enumerate(self.questions.items())
        ]

    @property
    def priority_name(self) -> PriorityName:
        """The place among the requests that wait."""
        return priority_name(self.priority)
