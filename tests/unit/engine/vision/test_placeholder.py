"""How a chat template writes images and videos."""

from __future__ import annotations

import pytest

from machd.engine.vision.media_processor import Placeholder, find_placeholder
from machd.errors import InvalidRequestError
from machd.request.media import MediaKind

Parts = list[dict[str, object]]


def _rendered(parts: Parts, image: str) -> str:
    """A template that numbers images where their text has ``{n}``."""
    texts, images = [], 0
    for part in parts:
        images += part["type"] == "image"
        is_text = part["type"] == "text"
        texts.append(str(part["text"]) if is_text else image.replace("{n}", str(images)))
    return f"<user>{''.join(texts)}</user>"


@pytest.mark.parametrize(
    ("image", "found"),
    [
        ("<image>\n", Placeholder("<image>")),
        ("<1>", Placeholder("<1>")),
        ("<|image_{n}|>", Placeholder("<|image_1|>", is_numbered=True)),
    ],
    ids=["plain", "always one", "numbered"],
)
def test_the_text_that_a_template_writes_is_found(image: str, found: Placeholder) -> None:
    """A placeholder is what the template writes for a part, and counts images if it writes numbers."""
    assert find_placeholder(lambda parts: _rendered(parts, image), MediaKind.IMAGE, ["?"]) == found


def test_a_template_without_parts_gets_the_text_of_the_processor() -> None:
    """Where the template refuses parts, machd writes the processor's own text."""

    def refuse(_: Parts) -> str:
        raise InvalidRequestError("text only", param="messages")

    assert find_placeholder(refuse, MediaKind.IMAGE, ["<|image_1|>"]) == Placeholder(
        "<|image_1|>", is_numbered=True, is_part=False
    )


def test_a_numbered_placeholder_counts() -> None:
    """The third image of a prompt has the number three."""
    assert Placeholder("<|image_1|>", is_numbered=True).of(3) == "<|image_3|>"
    assert Placeholder("<image>").of(3) == "<image>"
