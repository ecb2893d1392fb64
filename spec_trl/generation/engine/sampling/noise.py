"""Makes Gumbel noise that depends only on (seed, request, position, token).

The Gumbel-max trick: argmax_v(logits_v + G_v) with independent standard Gumbel G is a draw from softmax(logits). Here
G is a pure function of the key, so drafter and target use the same noise for the same token, wherever and whenever
they run, and agree if their logits nearly agree (Gumbel coupling: P(agree) >= (1 - TV) / (1 + TV), Daliri, Musco,
Suresh, arXiv 2408.07978).
"""

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock

import numpy as np
import torch
from torch import Tensor

from ....native import cpu_sampling


# Elements hashed at a time: the scratch of a chunk stays in a CPU's cache; a GPU takes larger chunks, for fewer
# launches.
CPU_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 25
# Most elements of a round's noise to store, so that verification reuses the noise of drafting.
_ROUND_BUDGET = 1 << 26
# Rounds hashed at once: a sixteenth of the calls, and little waste when rows end.
MOST_ROUNDS = 16
_MASK31 = 0x7FFFFFFF
# The float32 below 2**-31: 31-bit numbers near 2**31 round up, and u = 1 would give noise of -inf, which could forbid
# the only token that processors allow.
_TO_UNIT = 2.0**-31 * (1 - 2.0**-24)


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_INCREMENT, _FIRST, _SECOND = (
    _signed(each, 64) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_ROUNDS = (_signed(0x85EBCA6B, 32), 15), (_signed(0xC2B2AE35, 32), 13)  # multiplier and shift of each
_LAST = _signed(0x27D4EB2F, 32)


def _splitmix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64 tensors, modulo 2**64."""
    x = x + _INCREMENT
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FIRST  # torch shifts arithmetically: mask
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def stream_keys(seed: int, requests: Tensor) -> Tensor:
    """Keys `[n]` int64 of `requests` (`[n]` int64 ids) under `seed`, any int; see :func:`position_keys`."""
    base = torch.tensor(_signed(seed, 64), dtype=torch.int64, device=requests.device)
    # Hash after every part: with keys linear in (request, position) streams would be shifted copies of one another.
    return _splitmix64(_splitmix64(base) ^ requests)


def derive(streams: Tensor, purpose: int) -> Tensor:
    """Keys of independent noise in the same streams: coins and resampling of rejection verification."""
    return _splitmix64(streams + purpose)


def position_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """Keys `[..., q]` int64 of generated positions (`[..., q]`) in streams (`[...]`)."""
    return _splitmix64(streams[..., None] ^ _splitmix64(positions))


def _hash_into(keys: Tensor, counters: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
    """Two-round int32 hash of (key, counter) into `out` `[n, width]`; int32 products wrap, shifts are masked."""
    low = keys.to(torch.int32)[:, None]  # [n, 1], the low 32 bits
    high = (keys >> 32).to(torch.int32)[:, None]
    torch.bitwise_xor(counters, low, out=out)  # [n, width]
    for (multiplier, shift), salt in zip(_ROUNDS, (high, low), strict=True):
        out.mul_(multiplier)
        torch.bitwise_right_shift(out, shift, out=scratch)
        out.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1)).add_(salt)
    out.mul_(_LAST)
    torch.bitwise_right_shift(out, 16, out=scratch)
    return out.bitwise_xor_(scratch.bitwise_and_(0xFFFF))


@functools.cache  # for ever: captured draft loops read it
def _counters(vocabulary: int, device: torch.device) -> Tensor:
    """`[V]` int32. An odd multiplier: counters of one key differ in many bits before the first round."""
    return torch.arange(vocabulary, dtype=torch.int32, device=device).mul_(_signed(0x9E3779B1, 32))


def gumbel_noise(keys: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise `[n, vocabulary]` float32 for `keys` `[n]` int64."""
    if keys.device.type == "cpu" and cpu_sampling.library() is not None:
        return cpu_sampling.gumbel_noise(keys, vocabulary)
    noise = torch.empty(keys.shape[0], vocabulary, dtype=torch.float32, device=keys.device)  # [n, V]
    counters = _counters(vocabulary, keys.device)  # [V]
    rows = max(1, (CPU_CHUNK if keys.device.type == "cpu" else _GPU_CHUNK) // vocabulary)
    hashed = torch.empty(min(rows, keys.shape[0]), vocabulary, dtype=torch.int32, device=keys.device)
    scratch = torch.empty_like(hashed)
    for start in range(0, keys.shape[0], rows):
        chunk = keys[start : start + rows]  # [m]
        bits = _hash_into(chunk, counters, hashed[: len(chunk)], scratch[: len(chunk)]).bitwise_and_(_MASK31)
        uniform = noise[start : start + rows].copy_(bits).add_(0.5).mul_(_TO_UNIT)  # (0, 1)
        # -log(-log1p(-u)): keeps full resolution where the noise is large. -log(-log(u)) would round u to 1 in
        # float32 and return +inf on 0.8 % of tokens at a vocabulary of 152k.
        uniform.neg_().log1p_().neg_().log_().neg_()
    return noise


def uniform_coins(keys: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), float64, one per key (`keys`: any shape, int64)."""
    mixed = _splitmix64(keys)
    return ((mixed >> 11) & ((1 << 53) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-53)


class RoundNoise:
    """Noise of generated positions with `keys` `[B, count]` int64 (:func:`position_keys`), computed at first use."""

    def __init__(self, keys: Tensor, vocabulary: int) -> None:
        self.keys, self._vocabulary = keys, vocabulary

    @functools.cached_property
    def block(self) -> Tensor | None:
        """The whole noise `[B, count, vocabulary]`, computed once; None: too large, or as fast computed as read."""
        is_fast = self.keys.device.type == "cpu" and cpu_sampling.library() is not None
        if is_fast or self.keys.numel() * self._vocabulary > _ROUND_BUDGET:
            return None
        return gumbel_noise(self.keys.view(-1), self._vocabulary).view(*self.keys.shape, self._vocabulary)

    def over(self, keys: Tensor) -> "RoundNoise":
        return RoundNoise(keys, self._vocabulary)

    def part(self, step: int) -> "RoundNoise":
        """Noise of position `step`; computed for all positions at once if small."""
        part = RoundNoise(self.keys[:, step : step + 1], self._vocabulary)
        if self.block is not None:
            part.block = self.block[:, step : step + 1]
        return part

    def at(self, step: int, count: int = 1) -> Tensor:
        """`[B, count, vocabulary]` float32 at the round's positions from `step` on."""
        if self.block is not None:
            return self.block[:, step : step + count]
        keys = self.keys[:, step : step + count]  # [B, count]
        return gumbel_noise(keys.reshape(-1), self._vocabulary).view(*keys.shape, self._vocabulary)


@dataclass(frozen=True)
class Draw:
    """One token for each of n positions of B rows.

    Args:
        tokens: `[B, n]` int64.
        scores: `[B, n]`, perturbed logits of the tokens; NaN or -inf where the logits were broken.
        logprobs: `[B, n]` log-probabilities of the tokens under the processed distribution, if asked for.
        most: `[B]` int64, limit of accepted drafts by row. None: no limit; -1: the row commits nothing in this round,
            not even the target's own token.
        kept: `[B, n, vocabulary]` bool, tokens with a probability above 0, if asked for.
    """

    tokens: Tensor
    scores: Tensor
    logprobs: Tensor | None
    most: Tensor | None = None
    kept: Tensor | None = None

    def spread(self, row: Tensor, batch: int) -> "Draw":
        """Extends this draw of the rows `row` (`[B]` int64) to `batch` rows; other rows take no token."""

        def extend(part: Tensor) -> Tensor:
            return part.new_zeros(batch, *part.shape[1:]).index_copy_(0, row, part)

        return Draw(
            extend(self.tokens),
            extend(self.scores),
            None if self.logprobs is None else extend(self.logprobs),
            row.new_full((batch,), -1).index_fill_(0, row, 0),
            None if self.kept is None else extend(self.kept),
        )


def draw(logits: Tensor, noise: RoundNoise | None, first: int = 0, want_logprobs: bool = False) -> Draw:
    """Draws a token at each of n positions from processed logits `[B, n, vocabulary]`, float32 or float64.

    `noise`: of the round, with the first position at `first`; None: greedy.
    """
    count = logits.shape[1]
    if noise is None:
        scores, tokens = logits.max(dim=-1)
    elif cpu_sampling.serves(logits):
        scores, tokens = cpu_sampling.draw(logits, noise.keys[:, first : first + count])
    elif noise.block is not None:
        scores, tokens = sample(logits, noise.at(first, count))
    else:  # the noise of one position at a time bounds the memory
        drawn = [sample(logits[:, step : step + 1], noise.at(first + step)) for step in range(count)]
        scores, tokens = (torch.cat(parts, dim=1) for parts in zip(*drawn, strict=True))
    return Draw(tokens, scores, token_logprobs(logits, tokens) if want_logprobs else None)


def sample(logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draws from softmax(logits) by the Gumbel-max trick; `noise` None: argmax. Both are `[..., vocabulary]`. Returns
    scores `[...]`, NaN where a logit is NaN, and tokens `[...]` int64."""
    return torch.max(logits if noise is None else logits + noise, dim=-1)


def widen(logits: Tensor) -> Tensor:
    """Logits in at least float32: half precision ties too often to sample from."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at `tokens`: `[..., vocabulary]`, `[...]` -> `[...]`."""
    if cpu_sampling.serves(logits):
        return cpu_sampling.token_logprobs(logits, tokens)
    # One kernel; logsumexp's exponentials of unlikely tokens are denormal, and a CPU takes 15 times as long.
    return logits.log_softmax(dim=-1).gather(-1, tokens[..., None]).squeeze(-1)


# ---- the seed, the one number that a call draws from global generators; loading an assistant may draw others --------

_in_use = RLock()  # a seed that is drawn while another thread restores the generators would be drawn again


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Within it nothing is sampled: the generators of torch, numpy and `random` are as before at its end."""
    with _in_use:
        on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        of_torch, of_numpy, of_random = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            yield
        finally:
            torch.set_rng_state(of_torch)
            np.random.set_state(of_numpy)
            random.setstate(of_random)
            if on_cuda is not None:
                torch.cuda.set_rng_state_all(on_cuda)


def draw_seed() -> int:
    """A seed from torch's generator."""
    with _in_use:
        return int(torch.randint(2**62, ()))
