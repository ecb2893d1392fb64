"""One warning when a drafter's acceptance falls apart between two rollouts."""

import warnings

from .run_log import RolloutRecord


COLLAPSE, COLLAPSE_FROM = 0.5, 0.3
"""A warning is given below the share COLLAPSE of the acceptance before, if that was COLLAPSE_FROM or more."""
COLLAPSE_DRAFTED = 64
"""Rollouts with fewer draft tokens are not compared: a toggle stops a bad drafter early."""
LOOKUPS = ("history", "ngram")
"""Drafters that are not compared: their acceptance follows the texts, and they have no weights that could go stale."""


class CollapseAlarm:
    """Warns of a drafter that no longer predicts its policy: it makes rollouts slow, which nothing else would show.

    Args:
        by_first_token: compare the acceptance of first draft tokens alone, which does not depend on γ.
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
        name = "first_token_acceptance" if self._by_first_token else "acceptance_rate"
        before, now = (vars(each)[name] or 0.0 for each in (previous, record))
        if before >= COLLAPSE_FROM and now < COLLAPSE * before:
            warnings.warn(
                f"the acceptance rate of the drafter {record.drafter!r} fell from {before:.2f} to {now:.2f} between "
                f"two rollouts (step {record.step}). Outputs are not affected, speed is. Did something write weights "
                "that the drafter cannot see, or did the policy collapse?",
                stacklevel=2,
            )
