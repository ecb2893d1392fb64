"""Top-p on a CPU keeps what transformers keeps, to the last token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from spec_trl.generation.engine.sampling import filters
from spec_trl.generation.engine.sampling.filters import keep_top_p


def scores_like(kind: str, rows: int, vocabulary: int, scale: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(rows, vocabulary, generator=generator)
    if kind == "peaked":
        scores[:, seed % vocabulary] += 12
    elif kind == "ties":
        scores = scores.round()
    elif kind == "bfloat16":
        scores = scores.bfloat16().float()
    elif kind == "flat":
        scores = torch.full_like(scores, scale)
    elif kind == "like words":  # log-probabilities of ranks
        order = torch.rand(rows, vocabulary, generator=generator).argsort(1)
        scores = -scale * (1.0 + order).log() + 0.1 * scores
    elif kind == "after top-k":
        scores = hf.TopKLogitsWarper(3 + seed % 60)(None, scores)
    return scores


KINDS = st.sampled_from(["normal", "peaked", "ties", "bfloat16", "flat", "like words", "after top-k"])
SHARES = st.sampled_from([1e-4, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.9999])
SCALES = st.sampled_from([0.1, 0.7, 1.0, 1.6, 2.5, 4.0, 8.0])


@settings(deadline=None, max_examples=200, derandomize=True, database=None)
@given(kind=KINDS, top_p=SHARES, scale=SCALES, seed=st.integers(0, 2**32), vocabulary=st.sampled_from([32, 700, 5000]))
def test_keeps_what_transformers_keeps(kind: str, top_p: float, scale: float, seed: int, vocabulary: int) -> None:
    scores = scores_like(kind, 24, vocabulary, scale, seed)
    warper = hf.TopPLogitsWarper(top_p)
    for count in (1, 2, 128):
        assert torch.equal(keep_top_p(warper, scores, count), warper(None, scores))


@settings(deadline=None, max_examples=12, derandomize=True, database=None)
@given(kind=KINDS, top_p=SHARES, scale=SCALES, seed=st.integers(0, 2**32))
def test_keeps_what_transformers_keeps_of_a_large_vocabulary(kind: str, top_p: float, scale: float, seed: int) -> None:
    scores = scores_like(kind, 3, 151_936, scale, seed)
    warper = hf.TopPLogitsWarper(top_p)
    assert torch.equal(keep_top_p(warper, scores), warper(None, scores))


@pytest.mark.parametrize("options", [{}, dict(filter_value=-5.0), dict(min_tokens_to_keep=3)])
def test_broken_scores_and_other_options(options: dict) -> None:
    scores = 3 * torch.randn(8, 4000, generator=torch.Generator().manual_seed(0))
    scores[0, 17], scores[1], scores[2, 5], scores[3, 7:] = torch.nan, -torch.inf, torch.inf, -torch.inf
    for top_p in (0.0, 0.6, 1.0):
        warper = hf.TopPLogitsWarper(top_p, **options)
        torch.testing.assert_close(keep_top_p(warper, scores), warper(None, scores), rtol=0, atol=0, equal_nan=True)


def test_only_undecided_rows_are_sorted(monkeypatch) -> None:
    """One row of four is flat, so that 2048 tokens do not hold the mass; the others are decided by 128."""
    kinds = ("like words", "flat", "like words", "like words")
    scores = torch.stack([scores_like(kind, 1, 40_000, 1.6, seed)[0] for seed, kind in enumerate(kinds)])
    sorted_rows, looked_at = [], []
    warper, topk = hf.TopPLogitsWarper(0.9), Tensor.topk
    monkeypatch.setattr(Tensor, "topk", lambda own, k, **how: looked_at.append((len(own), k)) or topk(own, k, **how))
    monkeypatch.setattr(
        filters.hf.TopPLogitsWarper, "__call__", lambda _, ids, own: sorted_rows.append(len(own)) or own
    )
    keep_top_p(warper, scores)
    assert looked_at[0] == (4, 128) and looked_at[-1] == (1, 2048) and sorted_rows == [1]
