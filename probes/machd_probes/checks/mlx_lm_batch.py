"""mlx-lm's own batch path, run on the same rows. The result is about mlx-lm, not about machd."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from machd_probes.finding import Finding
from machd_probes.passes import Logprobs, Passes, rounding_floor
from machd_probes.subject import Subject

_TOKENS = 5


def probe(subject: Subject) -> Finding:
    """Prompts of unequal length in one ``BatchGenerator``, made to say what each says alone."""
    passes = subject.passes(subject.plain)
    prompts = [prompt for prompt in subject.prompts if len(prompt) > 1]
    pairs: list[tuple[Logprobs, Logprobs]] = []
    for width in (3, len(prompts)):
        some = prompts[-width:]
        alone = [_alone(passes, prompt, _TOKENS) for prompt in some]
        said = [[int(np.argmax(row)) for row in logprobs] for logprobs in alone]
        together = _batch(subject, some, said)
        pairs += zip(alone, together, strict=True)
    floor = max(subject.noise_floor, rounding_floor(alone for alone, _ in pairs))
    return subject.judged_passes(pairs, "rows say something else than alone", floor)


def _alone(passes: Passes, prompt: tuple[int, ...], tokens: int) -> Logprobs:
    """Log-probabilities of a greedy completion, the prompt cut as mlx-lm's batch path cuts it."""
    caches = passes.new_caches()
    passes.feed(prompt[:-1], caches)
    rows = [passes.feed(prompt[-1:], caches)[-1]]
    while len(rows) < tokens:
        rows.append(passes.feed([int(np.argmax(rows[-1]))], caches)[-1])
    return np.stack(rows)


def _batch(
    subject: Subject, prompts: list[tuple[int, ...]], said: list[list[int]]
) -> list[Logprobs]:
    generator = BatchGenerator(
        subject.plain, completion_batch_size=len(prompts), prefill_batch_size=len(prompts)
    )
    try:
        uids = generator.insert(
            [list(prompt) for prompt in prompts],
            max_tokens=[len(tokens) for tokens in said],
            samplers=[_repeating(tokens) for tokens in said],
        )
        heard: dict[int, list[np.ndarray]] = {uid: [] for uid in uids}
        while any(len(heard[uid]) < len(tokens) for uid, tokens in zip(uids, said, strict=True)):
            for response in generator.next_generated():
                heard[response.uid].append(np.array(response.logprobs.astype(mx.float32)))
    finally:
        generator.close()
    return [np.stack(heard[uid]) for uid in uids]


def _repeating(tokens: list[int]) -> Callable[[mx.array], mx.array]:
    """A sampler that says these tokens, whatever it is given."""
    rest = iter([*tokens, *tokens[-1:] * 4])
    return lambda _logprobs: mx.array([next(rest)])
