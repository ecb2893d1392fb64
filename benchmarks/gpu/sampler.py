"""Drawing a token and its log-probability from the logits: the fused kernel over the same in torch operations.

Every copy has logits of its own, with a spread like a trained model's. Before anything is timed, both must draw the
same tokens, but for near-ties.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spec_trl.generation.engine.noise import gumbel_noise, sample, token_logprobs, widen

from .part import Part
from .shapes import config_of
from .timing import compare, copies_for, copy_bandwidth


BATCHES = (1, 8, 32)
QUERIES = (1, 6)
TEMPERATURE = 1.0
SPREAD = 4.0  # standard deviation of the logits
NEAR_TIE = 1e-3
"""Scores closer than this may be drawn either way: the noise's logarithms differ in the last bits."""


def in_torch(logits: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [N], scores [N] and logprobs [N] from logits [N, V] with the noise of keys [N]."""
    wide = widen(logits) / TEMPERATURE  # [N, V]
    scores, tokens = sample(wide, gumbel_noise(keys, logits.shape[1]))  # [N]
    return tokens, scores, token_logprobs(wide, tokens)


def fused(logits: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the kernel."""
    from spec_trl.generation.engine.kernels.gumbel_sampler import fused_draw

    return fused_draw(logits, keys, TEMPERATURE)


def compare_draws(logits: Tensor, keys: Tensor) -> dict[str, float]:
    """How the two agree.

    Raises:
        ArithmeticError: they draw differently and it is no near-tie, or their log-probabilities differ.
    """
    tokens, scores, logprobs = in_torch(logits, keys)
    theirs, their_scores, their_logprobs = fused(logits, keys)
    same = tokens == theirs  # [N]
    worst_score = (scores - their_scores).abs().max().item()
    worst_logprob = (logprobs - their_logprobs)[same].abs().max().item() if bool(same.any()) else float("nan")
    if not (worst_score < NEAR_TIE and worst_logprob < NEAR_TIE):
        raise ArithmeticError(f"scores differ by up to {worst_score:.3g}, log-probabilities by {worst_logprob:.3g}")
    return {"same_tokens": same.float().mean().item(), "score_error": worst_score, "logprob_error": worst_logprob}


def measure(part: Part, rows: int, vocabulary: int, bandwidth: float) -> dict[str, Any]:
    """Both on `rows` rows of logits."""
    count = copies_for(2 * rows * vocabulary, part.device)
    copies = [(torch.randn(rows, vocabulary, device=part.device) * SPREAD).bfloat16() for _ in range(count)]
    keys = [torch.randint(-(2**62), 2**62, (rows,), device=part.device) for _ in range(count)]  # [N]
    result: dict[str, Any] = {"rows": rows, "vocabulary": vocabulary, "copies": count}
    works = {"torch": [partial(in_torch, x, k) for x, k in zip(copies, keys, strict=True)]}
    agreement = None
    if part.triton_absent is None:
        agreement = part.attempt(f"{rows} rows | fused", partial(compare_draws, copies[0], keys[0]))
    if agreement is not None:
        result |= agreement
        works["fused"] = [partial(fused, x, k) for x, k in zip(copies, keys, strict=True)]
    for captured in (True, False):
        timings = compare(works, part.device, repeats=15 if captured else 5, captured=captured)
        result["captured" if captured else "eager"] = {
            name: asdict(timing) | {"bandwidth_share": copies[0].nbytes / timing.seconds / bandwidth}
            for name, timing in timings.items()
        }
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("sampler", __doc__, arguments)
    vocabulary = config_of(part.shape).vocab_size
    torch.manual_seed(part.seed)
    bandwidth = copy_bandwidth(part.device)
    part.state(dtype="bfloat16", temperature=TEMPERATURE, logit_std=SPREAD, copy_bandwidth=bandwidth)
    if part.triton_absent is not None:
        part.skip("fused", part.triton_absent)
    for batch in (2,) if part.is_smoke else BATCHES:
        for queries in QUERIES:
            key = f"B {batch}, q {queries}"
            part.measure(key, partial(measure, part, batch * queries, vocabulary, bandwidth))
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
