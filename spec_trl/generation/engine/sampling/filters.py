"""Applies top-p without sorting the vocabulary."""


import torch
from torch import Tensor
from transformers.generation import logits_process as hf


# Tokens read first, and factor of the next reads. At top_p = 0.95 few positions of a trained model need more than 128
# tokens; sorting 152k logits costs sixty times as much.
_FIRST, _MORE = 128, 16
_BLOCK = 64  # tokens
# Elements per chunk: 4 MiB of float32 scratch stay in a CPU's cache.
_CHUNK = 1 << 20
# Share of the mass: a cut that close is left to transformers, whose float32 sums err by 5e-7.
_CLOSE = 1e-6


def keep_top_p(warper: hf.TopPLogitsWarper, scores: Tensor, count: int = _FIRST, out: Tensor | None = None) -> Tensor:
    """Applies `warper` to scores `[n, vocabulary]`, reading a row's `count` best scores if they decide.

    They decide if they hold the mass, and the cut is neither within rounding nor between equal scores: transformers'
    unstable sort keeps any of these. Else more scores are read, and finally sorted. `out`: output, may be `scores`, to
    avoid new memory: that costs more than the arithmetic.
    """
    vocabulary = scores.shape[1]
    usual = 0 < warper.top_p < 1 and warper.min_tokens_to_keep == 1
    if scores.device.type != "cpu" or count * _MORE > vocabulary or not usual:
        return warper(None, scores)
    parts = [_likeliest(part, count) for part in scores.split(max(1, _CHUNK // vocabulary))]
    values, tokens, p = map(torch.cat, zip(*parts, strict=True))  # [n, count] each
    # transformers removes tokens that hold, together with all less likely tokens, at most 1 - top_p.
    left = warper.top_p - (p.cumsum(1) - p)  # [n, count], of the mass, before each token
    kept = left > 0
    tied = kept[:, :-1] & ~kept[:, 1:] & (values[:, :-1] == values[:, 1:])
    decided = (left.abs() > _CLOSE).all(1) & ~kept[:, -1] & ~tied.any(1)  # [n]; not where scores are NaN
    rest = None if decided.all() else keep_top_p(warper, scores[~decided], count * _MORE)
    out = torch.full_like(scores, warper.filter_value) if out is None else out.fill_(warper.filter_value)
    out.scatter_(1, tokens, values.masked_fill(~kept, warper.filter_value))
    if rest is not None:
        out[~decided] = rest
    return out


def _likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of scores `[n, vocabulary]`, their tokens and probabilities (float64): `[n, count]` each."""
    values, tokens = _best(scores, count)
    p = scores.softmax(-1)  # [n, V]
    return values, tokens, p.gather(1, tokens).double() / p.sum(1, keepdim=True)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`scores.topk(count)` of scores `[n, vocabulary]` in half the time: the best are in the `count` best blocks."""
    rows, vocabulary = scores.shape
    if count * _BLOCK > vocabulary:
        return scores.topk(count)
    whole = vocabulary - vocabulary % _BLOCK
    blocks = scores[:, :whole].unflatten(1, (-1, _BLOCK)).amax(2).topk(count, sorted=False).indices  # [n, count]
    tokens = (_BLOCK * blocks[..., None] + torch.arange(_BLOCK)).flatten(1)  # [n, count * block]
    tokens = torch.cat([tokens, torch.arange(whole, vocabulary).expand(rows, -1)], dim=1)
    values, at = scores.gather(1, tokens).topk(count)  # [n, count] each
    return values, tokens.gather(1, at)
