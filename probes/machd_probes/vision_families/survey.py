"""Survey of mlx-vlm on each generated checkpoint: do images embedded one at a time give the same answer?

An engine that caches images embeds each alone: it runs the processor on the image's placeholder, asks
the model for the embeddings of the tokens that come back, and puts their rows between the text's. The
survey compares that with mlx-vlm's own way, which embeds the whole prompt at once.

    python -m machd_probes.vision_families.survey [FAMILY ...]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from machd.engine.loading.embedded import user_cache_directory
from machd_probes.vision_families.checkpoint import write_family
from machd_probes.vision_families.family import FAMILIES, Family
from machd_probes.vision_families.media import block_image, block_video

_MAX_TOKENS = 8
_BEFORE, _BETWEEN, _AFTER = "Look at this: ", " and then at that: ", " What is the difference?"

Part = Mapping[str, str]
Untyped = Any


@dataclass
class Subject:
    """A loaded checkpoint."""

    family: Family
    model: Untyped
    processor: Untyped
    calls_processor: bool = False

    @property
    def tokenizer(self) -> Untyped:
        """The processor's tokenizer, or what is both."""
        return getattr(self.processor, "tokenizer", self.processor)

    def render(self, *parts: Part | str) -> str:
        """Render a user's message; ``image`` and ``video`` stand for media, other texts for themselves."""
        content = [_part(part) for part in parts]
        messages = [{"role": "user", "content": content}]
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def inputs(self, text: str, **media: Untyped) -> dict[str, Untyped]:
        """Run mlx-vlm's ``prepare_inputs`` as its generation does."""
        from mlx_vlm.utils import prepare_inputs, should_add_special_tokens  # noqa: PLC0415

        if media and self.calls_processor:
            return self._called(text, media)
        config = self.model.config
        try:
            values: dict[str, Untyped] = prepare_inputs(
                self.processor,
                prompts=text,
                image_token_index=getattr(config, "image_token_index", None),
                add_special_tokens=should_add_special_tokens(config.model_type, self.processor),
                **media,
            )
        except ValueError:
            if not media:
                raise
            values = self._called(text, media)
            self.calls_processor = True
        return values

    def _called(self, text: str, media: Mapping[str, Untyped]) -> dict[str, Untyped]:
        """Call the processor with nothing but the text and the media."""
        values = dict(self.processor(text=[text], **media))
        arrays = {key: _as_mlx(value) for key, value in values.items()}
        arrays.setdefault("attention_mask", mx.ones_like(arrays["input_ids"]))
        return arrays

    def features(self, inputs: Mapping[str, Untyped]) -> dict[str, Untyped]:
        """Return what ``get_input_embeddings`` gives and is not None."""
        others = {
            key: value
            for key, value in inputs.items()
            if key not in ("input_ids", "pixel_values", "attention_mask")
        }
        features = self.model.get_input_embeddings(
            inputs["input_ids"],
            inputs.get("pixel_values"),
            mask=inputs.get("attention_mask"),
            **others,
        )
        found = {key: value for key, value in features.to_dict().items() if value is not None}
        get_positions = getattr(self.model.language_model, "get_rope_index", None)
        if get_positions is not None and "position_ids" not in found:
            found["position_ids"], found["rope_deltas"] = get_positions(
                inputs["input_ids"],
                inputs.get("image_grid_thw"),
                inputs.get("video_grid_thw"),
                inputs.get("attention_mask"),
            )
        return found

    def generate(self, text: str, **media: Untyped) -> tuple[list[int], mx.array]:
        """Generate greedily with mlx-vlm; the tokens and the first one's log-probabilities."""
        from mlx_vlm.generate import stream_generate  # noqa: PLC0415

        tokens: list[int] = []
        first = None
        arguments = media
        if media and self.calls_processor:
            arguments = self.inputs(text, **{f"{kind}s": values for kind, values in media.items()})
            arguments["mask"] = arguments.pop("attention_mask")
        for result in stream_generate(
            self.model, self.processor, text, max_tokens=_MAX_TOKENS, temperature=0.0, **arguments
        ):
            first = result.logprobs if first is None else first
            if result.token is not None:
                tokens.append(int(result.token))
        assert first is not None, "nothing was generated"
        return tokens[:_MAX_TOKENS], first.reshape(-1).astype(mx.float32)


def _as_mlx(value: Untyped) -> Untyped:
    return mx.array(value) if isinstance(value, np.ndarray) else value


def _part(part: Part | str) -> Part:
    if not isinstance(part, str):
        return part
    return {"type": part} if part in ("image", "video") else {"type": "text", "text": part}


def load_subject(name: str, directory: Path) -> Subject:
    """Load a family's checkpoint with mlx-vlm."""
    from mlx_vlm.utils import load  # noqa: PLC0415

    family = FAMILIES[name]
    assert isinstance(family, Family)
    model, processor = load(str(directory))
    return Subject(family, model, processor)


def survey_family(name: str, directory: Path, cache_directory: Path) -> dict[str, object]:
    """Write, load and run one family; the findings by name, an error's text where one failed."""
    findings: dict[str, object] = {}
    write_family(name, directory, cache_directory)
    findings["bytes"] = (directory / "model.safetensors").stat().st_size
    subject = load_subject(name, directory)
    try:
        subject.inputs(subject.render(_BEFORE, "image", _AFTER), images=[block_image(1)])
    except Exception as error:  # noqa: BLE001
        findings["one image"] = f"ERROR {type(error).__name__}: {error}"
    findings["prepare_inputs"] = (
        "fails, the bare call works" if subject.calls_processor else "works"
    )
    for topic, survey in _TOPICS.items():
        try:
            findings[topic] = survey(subject)
        except Exception as error:  # noqa: BLE001 - every failure is a finding
            findings[topic] = f"ERROR {type(error).__name__}: {error}"
            findings[f"{topic} trace"] = "".join(traceback.format_exception(error)[-3:])
    return findings


def _generations(subject: Subject) -> dict[str, object]:
    """Greedy tokens for several prompts, and how far logits depend on the image."""
    one, other = block_image(1), block_image(2)
    prompts: dict[str, tuple[tuple[str, ...], dict[str, Untyped]]] = {
        "one image": ((_BEFORE, "image", _AFTER), {"image": [one]}),
        "another image": ((_BEFORE, "image", _AFTER), {"image": [other]}),
        "two images": ((_BEFORE, "image", _BETWEEN, "image", _AFTER), {"image": [one, other]}),
        "two sizes": (
            (_BEFORE, "image", _BETWEEN, "image", _AFTER),
            {"image": [one, block_image(3, 84, 140)]},
        ),
        "text": ((_BEFORE, _AFTER), {}),
    }
    if subject.family.video:
        prompts["video"] = ((_BEFORE, "video", _AFTER), {"video": [block_video(5)]})
        prompts["another video"] = ((_BEFORE, "video", _AFTER), {"video": [block_video(6)]})
        prompts["image, video"] = (
            (_BEFORE, "image", _BETWEEN, "video", _AFTER),
            {"image": [one], "video": [block_video(5)]},
        )
    results: dict[str, object] = {}
    logits: dict[str, mx.array] = {}
    for label, (parts, media) in prompts.items():
        try:
            tokens, logits[label] = subject.generate(subject.render(*parts), **media)
            results[label] = tokens
        except Exception as error:  # noqa: BLE001
            results[label] = f"ERROR {type(error).__name__}: {error}"
            results[f"{label} trace"] = "".join(traceback.format_exception(error)[-2:])
    for label, (left, right) in {
        "images differ": ("one image", "another image"),
        "videos differ": ("video", "another video"),
    }.items():
        if left in logits and right in logits:
            difference = float(mx.abs(logits[left] - logits[right]).max())
            tokens_differ = results[left] != results[right]
            results[label] = f"tokens {tokens_differ}, logprobs {difference:.2f}"
    return results


def _shape(value: Untyped) -> object:
    if isinstance(value, mx.array | np.ndarray):
        return f"{list(value.shape)} {value.dtype}".replace("mlx.core.", "")
    if isinstance(value, list | tuple):
        return f"list of {len(value)}: {[_shape(inner) for inner in value[:2]]}"
    return repr(value)[:80]


def _keys(subject: Subject) -> dict[str, object]:
    """Arrays of ``prepare_inputs``, and the features of the embeddings."""
    cases: dict[str, tuple[str, dict[str, Untyped]]] = {
        "image": (subject.render(_BEFORE, "image", _AFTER), {"images": [block_image(1)]}),
        "two": (
            subject.render(_BEFORE, "image", _BETWEEN, "image", _AFTER),
            {"images": [block_image(1), block_image(2)]},
        ),
        "text": (subject.render(_BEFORE, _AFTER), {}),
    }
    if subject.family.video:
        cases["video"] = (
            subject.render(_BEFORE, "video", _AFTER),
            {"videos": [block_video(5)]},
        )
    found: dict[str, object] = {}
    for label, (text, media) in cases.items():
        try:
            inputs = subject.inputs(text, **media)
            found[f"inputs, {label}"] = {key: _shape(value) for key, value in inputs.items()}
            features = subject.features(inputs)
            found[f"features, {label}"] = {key: _shape(value) for key, value in features.items()}
        except Exception as error:  # noqa: BLE001
            found[f"inputs, {label}"] = f"ERROR {type(error).__name__}: {error}"
    return found


def _caches(subject: Subject) -> list[str]:
    from mlx_vlm.models.cache import make_prompt_cache  # noqa: PLC0415

    caches = make_prompt_cache(subject.model.language_model)
    has_own = hasattr(subject.model.language_model, "make_cache")
    names = [_cache_name(cache) for cache in caches]
    return [f"make_cache: {has_own}", *names]


def _cache_name(cache: Untyped) -> str:
    kind = type(cache)
    inner = [_cache_name(one) for one in getattr(cache, "caches", ())]
    size = getattr(cache, "max_size", None)
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}{inner or ''}{size or ''}"


@dataclass
class Piece:
    """A run of the prompt: text, or one medium with the processor's arrays."""

    ids: list[int]
    features: dict[str, Untyped]
    is_medium: bool


def placeholder(subject: Subject, kind: str) -> str:
    """Return how the chat template spells one image or video."""
    text = subject.render("\x01", kind, "\x02")
    return text.partition("\x01")[2].partition("\x02")[0]


def split_prompt(
    subject: Subject, texts: Sequence[str], kind: str, media: Sequence[Untyped]
) -> list[Piece]:
    """Embed each run of a prompt alone."""
    parts: list[str] = [texts[0]]
    for text in texts[1:]:
        parts += [kind, text]
    spelling = placeholder(subject, kind)
    rest = subject.render(*parts)
    pieces: list[Piece] = []
    for medium in media:
        before, spelling_here, rest = _partition(rest, subject, spelling, len(pieces) // 2 + 1)
        pieces.append(_text_piece(subject, before))
        inputs = subject.inputs(spelling_here, **{f"{kind}s": [medium]})
        pieces.append(_medium_piece(subject, inputs))
    pieces.append(_text_piece(subject, rest))
    return pieces


def _partition(text: str, subject: Subject, spelling: str, number: int) -> tuple[str, str, str]:
    """Split at a placeholder; one that is numbered is processed alone under the number one."""
    here = (
        subject.family.image.replace("{n}", str(number))
        if "{n}" in subject.family.image
        else spelling
    )
    before, found, after = text.partition(here)
    assert found, f"{here!r} is not in the prompt"
    return before, spelling, after


def _medium_piece(subject: Subject, inputs: Mapping[str, Untyped]) -> Piece:
    """Embed a medium alone, less a token that the processor begins every prompt with."""
    ids = inputs["input_ids"].tolist()[0]
    features = subject.features(inputs)
    if ids[0] == subject.tokenizer.bos_token_id:
        features["inputs_embeds"] = features["inputs_embeds"][:, 1:]
        if "position_ids" in features:
            features["position_ids"] = features["position_ids"][..., 1:] - 1
        ids = ids[1:]
    return Piece(ids, features, is_medium=True)


def _text_piece(subject: Subject, text: str) -> Piece:
    ids = subject.tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        return Piece([], {}, is_medium=False)
    return Piece(ids, _text_features(subject, ids), is_medium=False)


def compose_positions(pieces: Sequence[Piece]) -> mx.array:
    """Positions of the whole prompt from each run's own: int32 [axes, 1, tokens]."""
    start = 0
    positions = []
    for piece in pieces:
        own = piece.features.get("position_ids")
        if not piece.ids:
            continue
        if own is None or not piece.is_medium:
            own = mx.broadcast_to(mx.arange(len(piece.ids)), (3, 1, len(piece.ids)))
        own = mx.broadcast_to(own, (3, 1, len(piece.ids))) if own.ndim == 2 else own
        positions.append(own + start)
        start = int(positions[-1].max()) + 1
    return mx.concatenate(positions, axis=-1)


def _splice(
    subject: Subject, kind: str, media: Sequence[Untyped], texts: Sequence[str]
) -> dict[str, object]:
    parts: list[str] = [texts[0]]
    for text in texts[1:]:
        parts += [kind, text]
    whole_inputs = subject.inputs(subject.render(*parts), **{f"{kind}s": list(media)})
    whole = subject.features(whole_inputs)
    whole_ids = whole_inputs["input_ids"].tolist()[0]
    pieces = split_prompt(subject, texts, kind, media)
    found: dict[str, object] = {"placeholder": placeholder(subject, kind)}
    ids = [token for piece in pieces for token in piece.ids]
    found["tokens per medium"] = [len(piece.ids) for piece in pieces if piece.is_medium]
    found["ids alone are in whole"] = [
        _contains(whole_ids, piece.ids) for piece in pieces if piece.is_medium
    ]
    found["ids joined equal whole"] = ids == whole_ids
    if ids != whole_ids:
        first = next(
            (i for i, (a, b) in enumerate(zip(ids, whole_ids, strict=False)) if a != b), None
        )
        found["ids detail"] = (
            f"joined {len(ids)}, whole {len(whole_ids)}, first difference at {first}"
        )
    embeds = mx.concatenate(
        [piece.features["inputs_embeds"] for piece in pieces if piece.ids], axis=1
    )
    found["inputs_embeds, joined"] = _difference(embeds, whole["inputs_embeds"])
    found["inputs_embeds, by token"] = _by_token(subject, parts, kind, pieces, whole_ids, whole)
    positions = None
    if "position_ids" in whole:
        positions = compose_positions(pieces)
        expected = whole["position_ids"]
        if expected.ndim == 2:
            expected = mx.broadcast_to(expected, (3, *expected.shape))
        found["position_ids"] = _difference(positions, expected)
    for key in whole:
        if key in ("inputs_embeds", "position_ids", "rope_deltas"):
            continue
        found[key] = _joined_difference([piece.features.get(key) for piece in pieces], whole[key])
    found.update(_decodes(subject, whole_inputs, whole))
    return found


def _by_token(
    subject: Subject,
    parts: Sequence[str],
    kind: str,
    pieces: Sequence[Piece],
    whole_ids: list[int],
    whole: Mapping[str, Untyped],
) -> str:
    """Tokenise the prompt with each expansion's text in it, then fill in only the media's tokens."""
    text = subject.render(*parts)
    spelling = placeholder(subject, kind)
    media = [piece for piece in pieces if piece.is_medium]
    expanded = ""
    for number, piece in enumerate(media):
        before, _, text = _partition(text, subject, spelling, number + 1)
        expanded += before + subject.tokenizer.decode(piece.ids, skip_special_tokens=False)
    ids = subject.tokenizer.encode(expanded + text, add_special_tokens=False)
    if ids != whole_ids:
        return f"ids differ: {len(ids)} and {len(whole_ids)}"
    embeds = _text_features(subject, ids)["inputs_embeds"]
    token = _medium_token(media[0])
    rows = [i for i, one in enumerate(ids) if one == token]
    own = mx.concatenate(
        [
            piece.features["inputs_embeds"][
                :, [i for i, one in enumerate(piece.ids) if one == token]
            ]
            for piece in media
        ],
        axis=1,
    )
    if len(rows) != own.shape[1]:
        return f"{len(rows)} tokens and {own.shape[1]} rows"
    embeds[:, rows] = own
    return _difference(embeds, whole["inputs_embeds"])


def _medium_token(piece: Piece) -> int:
    """The token that the expansion has most of."""
    return max(set(piece.ids), key=piece.ids.count)


def _text_features(subject: Subject, ids: list[int]) -> dict[str, Untyped]:
    inputs = {"input_ids": mx.array([ids])}
    return subject.features({**inputs, "attention_mask": mx.ones_like(inputs["input_ids"])})


def _contains(whole: list[int], run: list[int]) -> bool:
    return any(whole[i : i + len(run)] == run for i in range(len(whole) - len(run) + 1))


def _difference(left: mx.array, right: mx.array) -> str:
    if left.shape != right.shape:
        return f"shapes {list(left.shape)} and {list(right.shape)}"
    return f"{float(mx.abs(left.astype(mx.float32) - right.astype(mx.float32)).max()):.2g}"


def _joined_difference(parts: Sequence[Untyped], whole: Untyped) -> object:
    if isinstance(whole, list | tuple):
        return [
            _joined_difference([None if part is None else part[i] for part in parts], inner)
            for i, inner in enumerate(whole)
        ]
    arrays = [part for part in parts if part is not None]
    if not isinstance(whole, mx.array) or not arrays:
        return f"not joined ({len(arrays)} parts)"
    for axis in range(whole.ndim):
        try:
            joined = mx.concatenate(arrays, axis=axis)
        except ValueError:
            continue
        if joined.shape == whole.shape:
            return f"axis {axis}: {_difference(joined, whole)}"
    return f"no axis: parts {[_shape(one) for one in arrays]}, whole {_shape(whole)}"


def _decodes(
    subject: Subject, inputs: Mapping[str, Untyped], features: Mapping[str, Untyped]
) -> dict[str, object]:
    """Greedy tokens through ``language_model`` alone, whole and in chunks, beside mlx-vlm's own."""
    from mlx_vlm.generate import generate_step  # noqa: PLC0415

    others = {
        key: value
        for key, value in inputs.items()
        if key not in ("input_ids", "pixel_values", "attention_mask")
    }
    own = [
        int(token)
        for token, _ in generate_step(
            inputs["input_ids"],
            subject.model,
            inputs.get("pixel_values"),
            inputs.get("attention_mask"),
            max_tokens=_MAX_TOKENS,
            temperature=0.0,
            **others,
        )
    ]
    found: dict[str, object] = {"mlx-vlm's tokens": own}
    for label, chunk in {"whole prefill": None, "chunks of 7": 7}.items():
        try:
            tokens = _decode(subject, inputs["input_ids"], features, chunk)
            found[label] = "same" if tokens == own else f"DIFFERENT {tokens}"
        except Exception as error:  # noqa: BLE001
            found[label] = f"ERROR {type(error).__name__}: {error}"
    return found


_PER_TOKEN_AXES = {"inputs_embeds": 1, "per_layer_inputs": 1, "position_ids": -1}


def _decode(
    subject: Subject, ids: mx.array, features: Mapping[str, Untyped], chunk: int | None
) -> list[int]:
    """Decode with positions computed here, so that nothing is left to the model object's state."""
    from mlx_vlm.models.cache import make_prompt_cache  # noqa: PLC0415

    language_model = subject.model.language_model
    cache = make_prompt_cache(language_model)
    length = ids.shape[1]
    step = chunk or length
    positions = features.get("position_ids")
    output = None
    for begin in range(0, length, step):
        end = min(begin + step, length)
        output = language_model(
            ids[:, begin:end],
            inputs_embeds=features["inputs_embeds"][:, begin:end],
            cache=cache,
            **_sliced(features, begin, end),
        )
        mx.eval(output.logits)
    assert output is not None
    tokens: list[int] = []
    carried = {}
    if output.cross_attention_states is not None:
        carried["cross_attention_states"] = output.cross_attention_states
    next_position = None if positions is None else int(positions.max()) + 1
    while True:
        token = int(output.logits[0, -1].argmax())
        tokens.append(token)
        if len(tokens) == _MAX_TOKENS:
            return tokens
        if next_position is not None:
            assert positions is not None
            shape = (*positions.shape[:-1], 1)
            carried["position_ids"] = mx.full(shape, next_position, dtype=positions.dtype)
            next_position += 1
        output = language_model(mx.array([[token]]), cache=cache, **carried)


def _sliced(features: Mapping[str, Untyped], begin: int, end: int) -> dict[str, Untyped]:
    values = {
        key: value for key, value in features.items() if key not in ("inputs_embeds", "rope_deltas")
    }
    if "position_ids" in values:
        values["position_ids"] = values["position_ids"][..., begin:end]
    if "per_layer_inputs" in values:
        values["per_layer_inputs"] = values["per_layer_inputs"][:, begin:end]
    masks = values.get("visual_pos_masks")
    if masks is not None:
        values["visual_pos_masks"] = masks[:, begin:end]
        first = int(masks[:, :begin].sum())
        last = first + int(masks[:, begin:end].sum())
        deep = values.get("deepstack_visual_embeds")
        if deep is not None:
            values["deepstack_visual_embeds"] = [one[first:last] for one in deep]
    return values


def _splice_images(subject: Subject) -> dict[str, object]:
    media = [block_image(1), block_image(2)]
    return _splice(subject, "image", media, (_BEFORE, _BETWEEN, _AFTER))


def _splice_sizes(subject: Subject) -> dict[str, object]:
    media = [block_image(1), block_image(3, 84, 140)]
    return _splice(subject, "image", media, (_BEFORE, _BETWEEN, _AFTER))


def _splice_adjacent(subject: Subject) -> dict[str, object]:
    """Images side by side after a newline, which a tokenizer may join with what follows."""
    media = [block_image(1), block_image(2)]
    return _splice(subject, "image", media, ("Look:\n", "", "\nWhat is it?"))


def _splice_video(subject: Subject) -> dict[str, object] | str:
    if not subject.family.video:
        return "no video"
    return _splice(subject, "video", [block_video(5), block_video(7)], (_BEFORE, _BETWEEN, _AFTER))


_TOPICS: Mapping[str, Callable[[Subject], object]] = {
    "generations": _generations,
    "keys": _keys,
    "caches": _caches,
    "splice, two images": _splice_images,
    "splice, two sizes": _splice_sizes,
    "splice, adjacent": _splice_adjacent,
    "splice, two videos": _splice_video,
}


def main(arguments: Sequence[str]) -> None:
    """Print each family's findings as one JSON object a line."""
    cache_directory = user_cache_directory(os.environ)  # noqa: TID251
    names = arguments or [name for name, one in FAMILIES.items() if isinstance(one, Family)]
    for name in names:
        with tempfile.TemporaryDirectory(prefix="vision-family-") as directory:
            try:
                findings = survey_family(name, Path(directory), cache_directory)
            except Exception as error:  # noqa: BLE001
                findings = {"ERROR": "".join(traceback.format_exception(error)[-4:])}
        sys.stdout.write(json.dumps({"family": name, **findings}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
