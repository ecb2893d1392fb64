"""One warning when a drafter's acceptance falls apart between two rollouts."""

import warnings

from .run_log import RolloutRecord


COLLAPSE = 0.5
"""An acceptance rate below this share of the one before is worth a warning, if that was COLLAPSE_FROM or more."""
COLLAPSE_FROM = 0.3
COLLAPSE_DRAFTED = 64
"""Rollouts with fewer draft tokens are not compared: a toggle stops a bad drafter early."""
LOOKUPS = ("history", "ngram")
"""Not compared: they follow the texts, whose likeness comes and goes, and have no weights that could go stale."""


class CollapseAlarm:
    """Warns of a drafter that has lost its policy. Such a drafter is slow, and nothing else would show it.

    Args:
        by_first_token: compare the acceptance of first draft tokens alone. γ may then jump from rollout to rollout; of
            a longer draft a smaller share is accepted.
    """

    def __init__(self, by_first_token: bool) -> None:
        self._by_first_token = by_first_token
        self._previous: RolloutRecord | None = None

    def hear(self, record: RolloutRecord) -> None:
        """Takes a training rollout, and warns if need be."""
        drafted = sum(depth.drafted for depth in record.per_depth.values())
        if drafted < COLLAPSE_DRAFTED or record.drafter in LOOKUPS:
            return
        previous, self._previous = self._previous, record
        if previous is None or previous.drafter != record.drafter:
            return
        before, now = previous.acceptance_rate or 0.0, record.acceptance_rate or 0.0
        if self._by_first_token:
            before, now = previous.first_token_acceptance or 0.0, record.first_token_acceptance or 0.0
        if before >= COLLAPSE_FROM and now < COLLAPSE * before:
            warnings.warn(
                f"the acceptance rate of the drafter {record.drafter!r} fell from {before:.2f} to {now:.2f} between "
                f"two rollouts (step {record.step}). Outputs are not affected, speed is. Did something write weights "
                "that the drafter cannot see, or did the policy collapse?",
                stacklevel=2,
            )
