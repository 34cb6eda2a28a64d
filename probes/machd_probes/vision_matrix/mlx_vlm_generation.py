"""mlx-vlm's own generation, alone: what every row of machd's is compared with."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from machd.engine.protocol.step import SampledToken, TokenLogprob
from machd.engine.vision.mlx_vlm_import import import_family
from machd_probes.vision_matrix.turns import ImagePart, Turn, VideoPart

Untyped = Any


class OwnGeneration:
    """A checkpoint that mlx-vlm has loaded, in float32."""

    def __init__(self, directory: Path) -> None:
        """Load model and processor, which reads images as one tile where machd's does.

        Raises:
            Exception: Any error of mlx-vlm's about the files.
        """
        family = import_family(directory)
        self._model: Untyped = family.load_model()
        with _ignored_warnings():
            self._processor = family.load_processor()
        self._model.update(tree_map(_as_float32, self._model.parameters()))

    def answer(self, turn: Turn, max_tokens: int) -> str:
        """Generate greedily, and decode as a chat's answer is: without special tokens."""
        token_ids = [one.token_id for one in self.tokens(turn, max_tokens, 1)]
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @property
    def _tokenizer(self) -> Untyped:
        return getattr(self._processor, "tokenizer", self._processor)

    def tokens(self, turn: Turn, count: int, top_logprobs: int) -> list[SampledToken]:
        """Generate greedily.

        Args:
            turn: The user's message.
            count: Tokens to generate; an end token ends nothing.
            top_logprobs: The likeliest tokens to list for each.

        Raises:
            Exception: Any error of mlx-vlm's.
        """
        from mlx_vlm.generate.ar import generate_step  # noqa: PLC0415 - imported with the model

        arrays = {name: _as_mlx(one) for name, one in self._inputs(turn).items()}
        # Some language models keep the last prompt's positions as attributes.
        language_model = self._model.language_model
        language_model._rope_deltas = language_model._position_ids = None  # noqa: SLF001 - mlx-vlm's
        steps = generate_step(
            arrays.pop("input_ids"),
            self._model,
            arrays.pop("pixel_values", None),
            arrays.pop("attention_mask", None),
            max_tokens=count,
            temperature=0.0,
            **arrays,
        )
        return [
            _sampled(int(token), logprobs, top_logprobs)
            for (token, logprobs), _ in zip(steps, range(count), strict=False)
        ]

    def _inputs(self, turn: Turn) -> Mapping[str, Untyped]:
        """Run the processor as mlx-vlm does; with the bare prompt and images where its own call fails."""
        from mlx_vlm.utils import prepare_inputs  # noqa: PLC0415 - imported with the model

        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": _content(turn)}],
            tokenize=False,
            add_generation_prompt=True,
        )
        if type(self._processor).__name__ == "Phi3VProcessor":
            # mlx-vlm's processor drops the first token of the text behind an image, so it gets one to drop.
            text = re.sub(r"<\|image_\d+\|>", r"\g<0><|end|>", text)
        images = [one.picture() for one in turn if isinstance(one, ImagePart)]
        with ExitStack() as files, _ignored_warnings():
            videos = [_file(one, files) for one in turn if isinstance(one, VideoPart)]
            pairs = (("images", images), ("videos", videos))
            given: dict[str, Untyped] = {name: media for name, media in pairs if media}
            try:
                inputs: Mapping[str, Untyped] = prepare_inputs(
                    self._processor, prompts=text, add_special_tokens=False, **given
                )
            except ValueError:
                if not given:
                    raise
                inputs = dict(self._processor(text=[text], **given))
        return inputs


@contextmanager
def _ignored_warnings() -> Iterator[None]:
    """Let a processor warn: mlx-vlm takes a warning that was made an error for a file that cannot be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _file(video: VideoPart, files: ExitStack) -> str:
    path = Path(files.enter_context(tempfile.TemporaryDirectory())) / "video.mp4"
    path.write_bytes(video.content())
    return str(path)


def _content(turn: Turn) -> str | list[dict[str, str]]:
    if all(isinstance(one, str) for one in turn):
        return "".join(str(one) for one in turn)
    return [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": "image" if isinstance(one, ImagePart) else "video"}
        for one in turn
    ]


def _as_float32(one: mx.array) -> mx.array:
    return one.astype(mx.float32) if mx.issubdtype(one.dtype, mx.floating) else one


def _as_mlx(one: Untyped) -> Untyped:
    return mx.array(one) if isinstance(one, np.ndarray) else one


def _sampled(token_id: int, logprobs: mx.array, top_logprobs: int) -> SampledToken:
    values = np.array(logprobs.reshape(-1).astype(mx.float32))
    best = np.argsort(-values, kind="stable")[:top_logprobs]
    return SampledToken(
        0,
        token_id,
        float(values[token_id]),
        tuple(TokenLogprob(int(one), float(values[one])) for one in best),
    )
