"""The checks of the vision matrix: each compares rows of machd's engine with mlx-vlm's own generation, alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from machd.capabilities.evidence import Evidence, Outcome
from machd.capabilities.rules import prefix_cache
from machd.capabilities.verdict import Support
from machd_probes.checks import window_overflow
from machd_probes.finding import Finding, no_data, unsupported
from machd_probes.prober import loaded_subject
from machd_probes.vision_matrix.catalogue import PREFIX_CHECK, VIDEO_CHECK, WINDOW_CHECK
from machd_probes.vision_matrix.rows import AskedRow
from machd_probes.vision_matrix.subject import VisionSubject, wrong_turns
from machd_probes.vision_matrix.turns import VIDEO_TURNS

_ALONE = ("an image", "another image", "text")
_IMAGES = ("an image", "another image", "two images", "two sizes")
_TEXTS_AND_IMAGES = ("text", "an image", "longer text", "another image")
_SAME_IMAGE = ("an image", "a second question", "a third question")

_NO_DIFFERENCE = "mlx-vlm says the same whatever it is shown"


def image_alone(subject: VisionSubject) -> Finding:
    """One image, another one, and text: whole prompts, and prompts in chunks that cut through images."""
    if not subject.depends_on("an image", "another image"):
        return no_data(_NO_DIFFERENCE)
    return _found(_alone(subject, _ALONE))


def two_images(subject: VisionSubject) -> Finding:
    """Two images in one prompt, of one size and of two."""
    return _found(_alone(subject, ("two images", "two sizes")))


def images_in_batch(subject: VisionSubject) -> Finding:
    """Rows with images in one batch: all at once, and one after the other."""
    return _found(_in_batch(subject, _IMAGES))


def text_beside_images(subject: VisionSubject) -> Finding:
    """Rows of text beside rows with images, in the same two ways."""
    return _found(_in_batch(subject, _TEXTS_AND_IMAGES))


def windows(subject: VisionSubject) -> Finding:
    """Rows of text that are longer than a window: the check of the text matrix, as serving runs it."""
    return window_overflow.probe(loaded_subject(subject.engine, None))


def image_prefix(subject: VisionSubject) -> Finding:
    """Questions about an image that the prefix cache holds, and the same question about another image.

    Where only snapshots can be used again, the first question behind an image makes one, and the next finds it.
    """
    if prefix_cache(subject.description.cache).support is Support.BLOCKED:
        return unsupported("its caches cannot be used again")
    namespace, rows = subject.new_namespace(), subject.rows_with_prefixes()
    names = (*_SAME_IMAGE, "another image")
    asked = [subject.row(name, namespace) for name in names]
    try:
        answers = [rows.answers([one])[0] for one in asked]
    finally:
        rows.forget()
    found = _found(subject.compared(names, answers))
    *same, other = zip(asked, answers, strict=True)
    if other[1].cached_tokens > _image_start(other[0]):
        return Finding(
            Outcome.FAILED, "an image is taken for another one that is cached", found.evidence
        )
    if found.outcome is Outcome.PASSED and not any(
        answer.cached_tokens >= _image_stop(row) for row, answer in same[1:]
    ):
        return no_data("the prefix cache found no image again")
    return found


def video(subject: VisionSubject) -> Finding:
    """A video and another one, alone and together."""
    names = tuple(name for name in VIDEO_TURNS if name in subject.turns)
    if not names:
        return unsupported("the family takes no video")
    if not subject.depends_on(*names):
        return no_data(_NO_DIFFERENCE)
    namespace = subject.new_namespace()
    asked = [subject.row(name, namespace) for name in names]
    together = subject.rows(is_batch=True).answers(asked)
    return _found(
        _alone(subject, names) | _labelled(subject.compared(names, together), "in a batch")
    )


CHECKS: Mapping[str, Callable[[VisionSubject], Finding]] = {
    "image_alone": image_alone,
    "two_images": two_images,
    "images_in_batch": images_in_batch,
    "text_beside_images": text_beside_images,
    WINDOW_CHECK: windows,
    PREFIX_CHECK: image_prefix,
    VIDEO_CHECK: video,
}
"""The checks by the names of :data:`machd_probes.vision_matrix.catalogue.CHECK_NAMES`."""


def _alone(subject: VisionSubject, names: Sequence[str]) -> dict[str, Evidence]:
    """Answer turns one at a time, with images that are not encoded yet; then in chunks."""
    namespace = subject.new_namespace()
    asked = [subject.row(name, namespace) for name in names]
    whole = subject.rows().answers(asked)
    chunked = subject.rows(is_chunked=True).answers(asked)
    return subject.compared(names, whole) | _labelled(
        subject.compared(names, chunked), "prompt in chunks"
    )


def _in_batch(subject: VisionSubject, names: Sequence[str]) -> dict[str, Evidence]:
    """Answer turns together, and joining one after the other with their prompts in chunks."""
    found: dict[str, Evidence] = {}
    for label, steps in (("all at once", 0), ("one after the other", 2)):
        namespace = subject.new_namespace()
        asked = [
            subject.row(name, namespace, at_step=steps * number)
            for number, name in enumerate(names)
        ]
        rows = subject.rows(is_batch=True, is_chunked=steps > 0)
        found |= _labelled(subject.compared(names, rows.answers(asked)), label)
    return found


def _labelled(evidence: Mapping[str, Evidence], label: str) -> dict[str, Evidence]:
    return {f"{name}, {label}": one for name, one in evidence.items()}


def _found(evidence: Mapping[str, Evidence]) -> Finding:
    wrong = wrong_turns(evidence)
    outcome = Outcome.FAILED if wrong else Outcome.PASSED
    return Finding(outcome, "; ".join(wrong), Evidence.together(evidence.values()))


def _image_start(row: AskedRow) -> int:
    return row.prompt.spans[0].start


def _image_stop(row: AskedRow) -> int:
    return row.prompt.spans[0].stop
