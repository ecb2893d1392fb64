"""Rows that leave a rollout before they have ended: into the queue where memory ends, or to another rank."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .cache import RowStates
from .memory import free_memory
from .rows import Progress, Request


if TYPE_CHECKING:
    from .rollout import Rollout


NEWEST = 1024  # rounds whose times tell what rounds take


def hand_over(
    rollout: "Rollout", leaving: Sequence[int], head_share: float, method: str | None = None
) -> list[Request]:
    """Returns the requests of the rows `leaving` with what they have come to. They leave; or they stay, and another
    rank races for them with its drafter named `method`.

    The K/V of the first `head_share` of their columns is left out; all of it where there is no memory for a copy, or
    where drafters read hidden states, which only a forward over these columns gives.
    """
    rows, cache = rollout.rows, rollout.target.cache
    needed = sum(int(rows.host_lengths[row]) for row in leaving) * cache.column_bytes
    share = 1.0 if rollout.target.is_heard or 2 * needed > free_memory(rows.tokens.device) else head_share
    requests = []
    for row in leaving:
        columns, span = int(rows.host_lengths[row]) - 1, rows.generated_span(row)
        head = round(share * columns)
        logprobs = rows.logprobs[row, span].clone() if rollout.want_logprobs else None
        tail: Callable[[], RowStates] = partial(dict, cache.export_row(row, head, columns))
        progress = Progress(rows.tokens[row, span].clone(), logprobs, head, columns, tail, method)
        requests.append(replace(rollout.queue.requests[rows.indices[row]], progress=progress))
    if method is None:
        rollout.drop(leaving)
    return requests


def expected_tokens(rollout: "Rollout") -> float:
    """Expected tokens that a row in flight will still generate: as many as it has generated, which fits long-tailed
    lengths best, and no more than it may."""
    rows = rollout.rows
    return float(np.minimum(rows.host_generated, rows.room).mean())


def rounds_by_batch(rollout: "Rollout") -> list[tuple[int, int, float]]:
    """(rows, tokens, seconds) of the newest rounds, the last one over."""
    return [(len(each.requests), each.tokens, each.seconds) for each in rollout.record.rounds[-NEWEST:]]


def seconds_per_prompt_token(rollout: "Rollout") -> float:
    """Seconds that reading a prompt took, per token."""
    return rollout.record.phase_seconds().get("prefill", 0.0) / max(rollout.record.tokens_read, 1)
