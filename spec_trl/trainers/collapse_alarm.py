"""One warning when a drafter's acceptance falls apart between two rollouts."""

import warnings

from .rollout_totals import RolloutTotals


COLLAPSE = 0.5
"""An acceptance rate below this share of the one before is worth a warning, if that was COLLAPSE_FROM or more."""
COLLAPSE_FROM = 0.3
COLLAPSE_DRAFTED = 64
"""Draft tokens of a rollout from which on its acceptance rate is compared: a toggle stops a bad drafter early."""
LOOKUPS = ("history", "ngram")
"""They follow the texts, whose likeness comes and goes; no weights of theirs can go stale."""


class CollapseAlarm:
    """A drafter that has lost its policy is slow, and nothing else would show it.

    Args:
        by_first_token: compare the acceptance of first draft tokens alone, where γ may jump from rollout to rollout:
            of a longer draft a smaller share is accepted.
    """

    def __init__(self, by_first_token: bool) -> None:
        self._by_first_token = by_first_token
        self._previous: RolloutTotals | None = None

    def hear(self, totals: RolloutTotals, step: int) -> None:
        """Takes a training rollout, after `step` optimizer steps, and warns if need be."""
        if totals.drafts.drafted < COLLAPSE_DRAFTED or totals.main_drafter in LOOKUPS:
            return
        previous, self._previous = self._previous, totals
        if previous is None or previous.main_drafter != totals.main_drafter:
            return
        before, now = previous.drafts.acceptance_rate, totals.drafts.acceptance_rate
        if self._by_first_token:
            before, now = previous.drafts.first_token_acceptance, totals.drafts.first_token_acceptance
        if before >= COLLAPSE_FROM and now < COLLAPSE * before:
            warnings.warn(
                f"the acceptance rate of the drafter {totals.main_drafter!r} fell from {before:.2f} to {now:.2f} "
                f"between two rollouts (step {step}). Outputs are not affected, speed is. Did something write weights "
                "that the drafter cannot see, or did the policy collapse?",
                stacklevel=2,
            )
