"""Plans decoupled execution: GPUs that draft, GPUs that verify, and the window (SA Algorithm 1).

A group of g_d GPUs that draft and g_v GPUs that verify serves its share of the requests; the cluster is as many groups
as fit. The paper searches only decoupled execution; here coupled execution and plain decoding are compared with it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from ...generation.planner.acceptance import MAX_DRAFT_LENGTH
from ...generation.planner.clock import AffineSeconds
from .token_speed import (
    DraftSeconds,
    VerifySeconds,
    busy_decoupled_speed,
    committed_tokens,
    coupled_speed,
    decoupled_speed,
)


Mode: TypeAlias = Literal["plain", "coupled", "decoupled"]
SpeedModel: TypeAlias = Callable[[float, int, float, float], float]
"""TGS of (p, w, D, V)."""


@dataclass(frozen=True)
class ExecutionPlan:
    """How a group of GPUs executes its requests."""

    mode: Mode
    draft_gpus: int  # g_d, GPUs that only draft; 0: a drafter runs on the GPUs of the target
    verify_gpus: int  # g_v
    window: int  # w, draft tokens per verification; 0: plain decoding
    batch: int  # requests of the group
    tokens_per_second: float  # expected TGS of a request


def execution_plan(
    requests: int,
    gpus: int,
    verify_gpus: Sequence[int],
    acceptance: float,
    draft: DraftSeconds,
    verify: VerifySeconds,
    modes: Sequence[Mode] = ("plain", "coupled", "decoupled"),
) -> ExecutionPlan:
    """The plan of highest TGS; among equals the first in the order plain, coupled, decoupled, small groups first.

    Args:
        requests: B, of the whole cluster, at least 1.
        gpus: G, of the whole cluster.
        verify_gpus: 𝔾, numbers of GPUs of one copy of the target; those above G are left out.
        acceptance: p, 0 to 1.
        draft: D of g_d.
        verify: V of (g_v, positions).
        modes: modes to compare; the paper's search is ("decoupled",).

    Raises:
        ValueError: an argument is out of range, or no plan fits the GPUs.
    """
    if requests < 1:
        raise ValueError(f"requests={requests} is out of range; it must be at least 1.")
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} is out of range; it must be 0 to 1.")
    plans = (
        plan
        for mode in ("plain", "coupled", "decoupled")
        if mode in modes
        for g_v in sorted({size for size in verify_gpus if 1 <= size <= gpus})
        for plan in _plans(mode, g_v, requests, gpus, acceptance, draft, verify)
    )
    best = max(plans, key=lambda plan: plan.tokens_per_second, default=None)
    if best is None:
        raise ValueError(f"no plan fits: gpus={gpus}, verify_gpus={list(verify_gpus)}, modes={list(modes)}.")
    return best


def plan_of_machine(
    acceptance: float,
    draft_length: int,
    batch: int,
    coupled_draft: AffineSeconds,
    decoupled_draft: AffineSeconds,
    verify: Callable[[int], AffineSeconds],
) -> ExecutionPlan:
    """Plans how one machine executes a batch at a fixed γ: the fastest of plain, coupled, and decoupled by
    :func:`~.token_speed.busy_decoupled_speed`, the rule of this package's engine; among equals the first. Algorithm 1
    splits a cluster among groups; here the group is the machine and b its whole batch.

    Args:
        acceptance: p, 0 to 1.
        draft_length: γ; decoupled the window is γ + 1, so that a verification has γ + 1 positions in both.
        batch: b, rows.
        coupled_draft, decoupled_draft: D of a drafter alone on the machine, and next to the target.
        verify: V of positions per row.
    """
    positions = draft_length + 1
    seconds = verify(positions)(batch)
    choices: list[tuple[float, Mode, int]] = [
        (1.0 / verify(1)(batch), "plain", 0),
        (coupled_speed(acceptance, draft_length, coupled_draft(batch), seconds), "coupled", draft_length),
        (busy_decoupled_speed(acceptance, positions, decoupled_draft(batch), seconds), "decoupled", positions),
    ]
    speed, mode, window = max(choices, key=lambda choice: choice[0])
    return ExecutionPlan(mode, int(mode == "decoupled"), 1, window, batch, speed)


def group_batch(requests: int, gpus: int, group: int) -> int:
    """b: most requests of a group of `group` GPUs, out of `requests`.

    Line 4 of Algorithm 1 has ⌈group · B / G⌉, too few if `group` does not divide G: the remaining GPUs make no group,
    and the whole groups share all requests.
    """
    return -(-requests // (gpus // group))


def _plans(
    mode: Mode,
    g_v: int,
    requests: int,
    gpus: int,
    acceptance: float,
    draft: DraftSeconds,
    verify: VerifySeconds,
) -> Iterator[ExecutionPlan]:
    # "drafters need fewer GPUs than verifiers" (SA, line 3 of Algorithm 1)
    for g_d in range(1, min(g_v, gpus - g_v) + 1) if mode == "decoupled" else (0,):
        batch = group_batch(requests, gpus, g_d + g_v)
        if mode == "plain":
            window, tgs = 0, 1.0 / verify(g_v, 1)(batch)
        else:
            drafter, verifier = draft(g_d or 1), partial(verify, g_v)
            speed, bonus = (coupled_speed, 1) if mode == "coupled" else (decoupled_speed, 0)
            window, tgs = best_window(acceptance, batch, drafter, verifier, speed, bonus)
        yield ExecutionPlan(mode, g_d, g_v, window, batch, tgs)


def best_window(
    acceptance: float,
    batch: int,
    draft: AffineSeconds,
    verify: Callable[[int], AffineSeconds],
    speed: SpeedModel,
    bonus: int = 0,
) -> tuple[int, float]:
    """Returns w from 1 to 64 of the highest TGS, and that TGS. `verify` is V of positions per request. A verification
    has w positions, and one more with a `bonus` token (coupled execution).

    The paper searches up to w_max = max(⌈V'/D'⌉, ⌈β/α⌉), in which V depends on w itself. Here the search ends where no
    longer window can win: TGS ≤ N / (w D), which falls as w grows.
    """
    draft_seconds = draft(batch)
    best, most = 0, 0.0
    for window in range(1, MAX_DRAFT_LENGTH + 1):
        tokens = 1 + committed_tokens(acceptance, window)  # the bonus token included
        if draft_seconds and tokens / (window * draft_seconds) <= most:
            break
        tgs = speed(acceptance, window, draft_seconds, verify(window + bonus)(batch))
        if tgs > most:
            best, most = window, tgs
    return best, most
