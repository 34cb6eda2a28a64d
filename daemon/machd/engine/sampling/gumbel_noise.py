"""Noise of a row's tokens: a hash of (seed, position, token) with the Gumbel distribution.

The token with the largest sum of logit and noise is a draw from the softmax of the logits (the Gumbel-max
trick; Maddison et al. 2014, arXiv:1411.0030, section 2). No sum runs over the vocabulary: another token wins
only where its sum comes as close to the best one's as the logits were rounded.

The hash is integer arithmetic, the same on every device. ``mx.random`` has keys too and costs three times as
much on the CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mlx.core as mx

_TO_UNIT = 2.0**-32
_BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1."""


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit numbers that (seed, position) alone decides, the same on every machine.

    Args:
        seed: Any 64-bit integer, signed or not.
        position: Index of the token in the completion.
    """
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def gumbel_noise(draws: Sequence[tuple[int, int]], vocabulary_tokens: int) -> mx.array:
    """Noise of every token for each (seed, position), float32 [draws, vocabulary], between -2.9 and 22.9.

    With ``v`` uniform in (0, 1), ``-log(-log(1 - v))`` has the Gumbel distribution. Its upper tail, which
    lets an unlikely token win, lies where ``v`` is small, and a float32 there keeps all of its bits: a token is
    drawn as often as it should be down to a probability of about 1e-9.
    """
    keys = [draw_key(seed, position) for seed, position in draws]
    bits = _hashed(mx.array(keys, dtype=mx.uint32), vocabulary_tokens)
    v = mx.minimum((bits.astype(mx.float32) + 0.5) * _TO_UNIT, _BELOW_ONE)
    # -log(1 - v) without the error of rounding 1 - v (Goldberg 1991, theorem 4); MLX's log1p takes four times
    # as long as its log on the CPU.
    rest = 1.0 - v
    exponential = mx.where(rest == 1.0, v, mx.log(rest) * v / (rest - 1.0))
    return -mx.log(exponential)


def _hashed(keys: mx.array, vocabulary_tokens: int) -> mx.array:
    """Hash each token id under each key [keys, 2], uint32 [keys, vocabulary].

    Wellons' ``triple32`` (hash-prospector, 2018) with the halves of the key at its beginning and in its
    middle: under each key another permutation of the 32-bit integers.
    """
    x = mx.arange(vocabulary_tokens, dtype=mx.uint32) ^ keys[:, :1]
    x = (x ^ (x >> 17)) * mx.array(0xED5AD4BB, dtype=mx.uint32)
    x = (x ^ (x >> 11)) * mx.array(0xAC4C1B51, dtype=mx.uint32) + keys[:, 1:]
    x = (x ^ (x >> 15)) * mx.array(0x31848BAB, dtype=mx.uint32)
    return x ^ (x >> 14)
