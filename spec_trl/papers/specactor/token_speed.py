"""Predicts a request's tokens per second: decoupled, coupled and without drafts (SA §4.1).

TGS is tokens per second of each request of a batch. p is the probability that a draft token is accepted when all
before it were. A verification over `positions` tokens of each request judges `positions` drafts if the drafter runs
ahead (it has drafted the bonus token already), and `positions` - 1 drafts if it waits.
"""

from collections.abc import Callable
from typing import TypeAlias

from ...generation.planner.acceptance import expected_block_efficiency
from ...generation.planner.clock import AffineSeconds


DraftSeconds: TypeAlias = Callable[[int], AffineSeconds]
"""D of g_d: one forward of a drafter that has `g_d` GPUs."""
VerifySeconds: TypeAlias = Callable[[int, int], AffineSeconds]
"""V of (g_v, positions): one target forward on `g_v` GPUs over `positions` tokens of each request."""


def replicated(drafter: AffineSeconds) -> DraftSeconds:
    """D of g_d one-GPU replicas of `drafter` that share the batch: D' = D'_1 / g_d, α as it was (SA: "For drafter, we
    assume it only uses one GPU as it is small")."""
    return lambda gpus: AffineSeconds(drafter.per_request / gpus, drafter.fixed)


def committed_tokens(acceptance: float, window: int) -> float:
    """N = (1 - p^w) / (1 - p): tokens that one verification of a window commits on average, the corrected token of a
    refused draft included. A fully accepted window commits w tokens, not w + 1: the next token is drafted already."""
    return expected_block_efficiency(acceptance, window - 1)


def printed_window_tokens(acceptance: float, window: int) -> float:
    """τ_w as SA §4.1 prints it: Σ p^a (1 - p) (a + 1)/2 + w p^w.

    The tokens of a refused window are halved, since the window drafted after it is lost: two periods. That averages
    ratios and is up to 29 % above the ratio of the averages, `window_tokens`.
    """
    return (committed_tokens(acceptance, window) + window * acceptance**window) / 2


def window_tokens(acceptance: float, window: int) -> float:
    """τ_w exactly: N / (2 - p^w) tokens per period. A refused window costs two periods: its verification, and drafting
    the next window again."""
    return committed_tokens(acceptance, window) / (2 - acceptance**window)


def busy_window_tokens(acceptance: float, window: int) -> float:
    """Tokens per period if the verifier is never idle, as in this package's engine: while a window is drafted again,
    the row decodes one token.

    A period has a window to verify, or not. With a window it commits N tokens, and the next period has a window if all
    w drafts are right (p^w). Without, it commits 1 token, and the next period has a window if the first new draft is
    that token (p). So (p N + 1 - p^w) / (1 + p - p^w): 1.27 at p = 0.5 and w = 3, against 0.93 of `window_tokens`.
    """
    full = acceptance**window
    return (acceptance * committed_tokens(acceptance, window) + 1 - full) / (1 + acceptance - full)


def busy_decoupled_speed(acceptance: float, window: int, draft_seconds: float, verify_seconds: float) -> float:
    """TGS by that rule: `busy_window_tokens` / max(w D, V)."""
    return busy_window_tokens(acceptance, window) / max(window * draft_seconds, verify_seconds)


def busy_alternating_speed(acceptance: float, window: int, draft_seconds: float, verify_seconds: float) -> float:
    """TGS, by the same rule, of a request that drafts nothing while its window is verified: (1 + p N) / (1 + p) tokens
    per period. `window` counts the drafts without the token that is decoded at the same time, as in
    `alternating_speed`: w - 1 of w drafts."""
    tokens = 1 + acceptance * committed_tokens(acceptance, window + 1)
    return tokens / (1 + acceptance) / max((window + 1) * draft_seconds, verify_seconds)


def decoupled_speed(acceptance: float, window: int, draft_seconds: float, verify_seconds: float) -> float:
    """TGS where the drafter runs ahead by a window: τ_w / max(w D, V)."""
    return window_tokens(acceptance, window) / max(window * draft_seconds, verify_seconds)


def coupled_speed(acceptance: float, window: int, draft_seconds: float, verify_seconds: float) -> float:
    """TGS where drafting waits for verification: (1 - p^(w+1)) / (1 - p) tokens in w D + V. w = 0: plain decoding."""
    return expected_block_efficiency(acceptance, window) / (window * draft_seconds + verify_seconds)


def alternating_speed(acceptance: float, window: int, draft_seconds: float, verify_seconds: float) -> float:
    """TGS of a request that waits for its verification among requests whose drafters run ahead: drafts in one period,
    verification in the next."""
    tokens = expected_block_efficiency(acceptance, window)
    return tokens / (2 * max(window * draft_seconds, verify_seconds))
