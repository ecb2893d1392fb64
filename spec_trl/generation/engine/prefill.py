"""Reading prompts into the cache, each distinct prompt once."""

import torch

from .rows import Admission, Rows
from .runner import EagerRunner


# Tokens of one prefill forward, padding included: bounds activations and masks.
_TOKENS_PER_FORWARD = 8192
_QUERIES_PER_FORWARD = 2048


def prefill(runner: EagerRunner, rows: Rows, admission: Admission) -> None:
    """Writes the K/V of newly admitted prompts, all but their last token, into `runner`'s cache.

    The last prompt token is fed by the first decoding round, like any other last committed token; so prefill needs no
    logits, and a row that shares its prompt with another only copies K/V.
    """
    device = rows.tokens.device
    lengths = (rows.lengths[admission.first :] - 1).tolist()  # ascending over the leaders
    start = 0
    while start < admission.leaders:
        end = start + 1
        while end < admission.leaders and lengths[end] * (end + 1 - start) <= _TOKENS_PER_FORWARD:
            end += 1
        for column in range(0, lengths[end - 1], _QUERIES_PER_FORWARD):
            stop = min(column + _QUERIES_PER_FORWARD, lengths[end - 1])
            first, last = admission.first + start, admission.first + end
            positions = torch.arange(column, stop, device=device).expand(end - start, -1)  # [n, q]
            # Shorter rows of the chunk feed scratch tokens behind their prompt: masked now, overwritten later.
            runner.prefill(rows.tokens[first:last, column:stop], positions, stop, first_row=first)
        start = end
    if admission.followers:
        runner.cache.copy_rows(admission.sources, admission.followers, max(lengths[admission.leaders :]))
